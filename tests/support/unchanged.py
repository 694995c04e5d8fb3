"""Scenarios of the NFS lab that a run skips: what they test has not changed since the last landing.

They take long, and those that rest on a version's protocol run always. The last landing is the
revision that `DBUFFER_BASE` names, or else where this branch left `origin/main`. Changes that are
not committed count. Everything runs if nothing has changed, as in a clean clone; without git or
that revision; in soaks; and with `--all`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.soak import is_soak

BASE = os.environ.get("DBUFFER_BASE", "origin/main")
TESTED = (
    *(
        f"dbuffer/{name}/"
        for name in ("format", "io", "mirror", "publish", "ranks", "receive", "store")
    ),
    *("dbuffer/tools/doctor/", "tests/lab/", "tests/support/", "tests/conftest.py"),
    *("dev.py", "pyproject.toml", "requirements-"),
)
"""Beginnings of paths: a change below one of them and all scenarios run."""


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


def skips_half(changed: list[str] | None) -> bool:
    """Whether a run with these changes skips half of the lab."""
    return bool(changed) and not is_soak() and not any(p.startswith(TESTED) for p in changed or ())


def mark(item: pytest.Item) -> None:
    """Skip a scenario that rests on no version's protocol, and say why in pytest's summary."""
    scenario = getattr(getattr(item, "function", None), "scenario", None)
    if scenario is not None and not scenario.both:
        reason = f"half of the NFS lab: unchanged since {BASE} (--all runs it)"
        item.add_marker(pytest.mark.skipif(True, reason=reason))
