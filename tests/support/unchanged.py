"""Tests that a run leaves out: what they test has not changed since the last landing.

They take long, and show for one more version or system what others show in every run. The last
landing is the revision that `DBUFFER_BASE` names, or else where this branch left `origin/main`.
Changes that are not committed count. Everything runs if nothing has changed, as in a clean clone;
without git or that revision; in soaks; and with `--all`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT
from tests.support.soak import is_soak

BASE = os.environ.get("DBUFFER_BASE", "origin/main")
ALWAYS = (
    *("dbuffer/store/", "dbuffer/publish/", "dbuffer/receive/"),
    *("tests/support/", "tests/conftest.py", "dev.py", "pyproject.toml", "requirements-"),
)
"""Beginnings of paths: a change below one of them and all tests run."""


class Rule(NamedTuple):
    """Which tests run only after a change, besides one of `ALWAYS`."""

    name: str
    selects: Callable[[pytest.Item], bool]
    paths: tuple[str, ...]


def is_in(path: str) -> Callable[[pytest.Item], bool]:
    """Return the choice of a file's tests."""
    return lambda item: item.path == ROOT / path


def is_of_one_protocol(item: pytest.Item) -> bool:
    """Whether an item is a scenario of the NFS lab that rests on no version's protocol."""
    scenario = getattr(getattr(item, "function", None), "scenario", None)
    return scenario is not None and not scenario.both


ENGINES = ("dbuffer/integrations/engine/", "tests/programs/")
RULES = (
    Rule(
        "the oldest vLLM",
        is_in("tests/integrations/vllm/test_oldest.py"),
        (*ENGINES, "dbuffer/integrations/vllm/", "tests/integrations/vllm/"),
    ),
    Rule(
        "SGLang's server",
        is_in("tests/integrations/sglang/test_server.py"),
        (*ENGINES, "dbuffer/integrations/sglang/", "tests/integrations/sglang/"),
    ),
    Rule(
        "half of the NFS lab",
        is_of_one_protocol,
        (
            *(f"dbuffer/{name}/" for name in ("format", "io", "mirror", "ranks", "tools/doctor")),
            "tests/lab/",
        ),
    ),
)


def changed_since(base: str, root: Path) -> list[str] | None:
    """Return paths that differ from where HEAD left a revision; None if that cannot be said."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        landing = git("merge-base", "HEAD", base).strip()
        # Without --no-renames, a file's old name is not listed.
        names = git("diff", "--name-only", "--no-renames", "-z", landing)
        names += git("ls-files", "--others", "--exclude-standard", "-z")
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in names.split("\0") if name]


def left_out(changed: list[str] | None) -> list[str]:
    """Return the names of rules whose tests a run with these changes leaves out."""
    if not changed or is_soak():
        return []
    return [
        rule.name
        for rule in RULES
        if not any(path.startswith(ALWAYS + rule.paths) for path in changed)
    ]


def mark(item: pytest.Item, left_out: list[str]) -> None:
    """Skip a test that rules leave out, and say why in pytest's summary."""
    for rule in RULES:
        if rule.name in left_out and rule.selects(item):
            reason = f"{rule.name}: unchanged since {BASE} (--all runs it)"
            item.add_marker(pytest.mark.skipif(True, reason=reason))
