"""The suite itself: what a run skips, how it is measured, and the rules of its code."""

from __future__ import annotations

import ast
import functools
import os
import random
import re
import runpy
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.support import ROOT
from tests.support.ports import free_port
from tests.support.scopes import SCOPES, scope_of
from tests.support.unchanged import changed_since, mark, skips_half


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.test", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository with two files, at the landing."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    origin = tmp_path / "origin"
    (origin / "dbuffer" / "store").mkdir(parents=True)
    (origin / "README.md").touch()
    (origin / "dbuffer" / "store" / "mounts.py").write_text("1\n")
    git(origin, "init")
    git(origin, "add", ".")
    git(origin, "commit", "-m", "one")
    git(tmp_path, "clone", str(origin), "clone")
    return tmp_path / "clone"


def test_what_changed_is_committed_or_not_and_new_or_gone(clone):
    assert changed_since("origin/main", clone) == []
    (clone / "README.md").write_text("more\n")
    assert changed_since("origin/main", clone) == ["README.md"]
    git(clone, "commit", "-a", "-m", "two")
    origin = clone.parent / "origin"
    (origin / "dbuffer" / "store" / "mounts.py").write_text("2\n")
    git(origin, "commit", "-a", "-m", "theirs")
    git(clone, "fetch")
    assert changed_since("origin/main", clone) == ["README.md"], "what others landed is no change"
    git(clone, "mv", "dbuffer/store/mounts.py", "dbuffer/mounts.py")
    (clone / "a name\nof two lines").touch()
    changed = changed_since("origin/main", clone)
    moved = {"dbuffer/store/mounts.py", "dbuffer/mounts.py"}
    assert changed is not None
    assert set(changed) == {"README.md", "a name\nof two lines", *moved}


def test_without_a_landing_everything_runs(clone, tmp_path, monkeypatch):
    assert changed_since("no-such-revision", clone) is None
    assert changed_since("origin/main", tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert changed_since("origin/main", clone) is None
    assert not skips_half(None)
    assert not skips_half([])


@pytest.mark.parametrize(
    ("changed", "skips"),
    [
        ("README.md", True),
        ("dbuffer/store/mounts.py", False),
        ("requirements-cpu.txt", False),
        ("tests/support/children.py", False),
        ("dbuffer/integrations/trl/sync.py", True),
    ],
)
def test_half_of_the_lab_is_skipped_unless_a_change_concerns_it(monkeypatch, changed, skips):
    monkeypatch.delenv("DBUFFER_SOAK", raising=False)
    assert skips_half(["CHANGELOG.md", changed]) == skips
    monkeypatch.setenv("DBUFFER_SOAK", "1")
    assert not skips_half(["CHANGELOG.md", changed])


def test_what_is_skipped_rests_on_no_version_of_nfs_and_says_why():
    skipped = []
    for scenario in (None, SimpleNamespace(both=True), SimpleNamespace(both=False)):
        item = Mock(function=SimpleNamespace(scenario=scenario))
        mark(item)
        skipped += [call.args[0].kwargs["reason"] for call in item.add_marker.call_args_list]
    [reason] = skipped
    assert "--all" in reason


@pytest.mark.parametrize("framework", ["sglang", "verl"])
def test_what_stands_for_a_gpu_is_where_dev_py_says(framework):
    stubs: Path = runpy.run_path(str(ROOT / "dev.py"))["stubs_for"](framework)
    assert (stubs / f"{framework}_without_gpu.py").is_file()


VLLM_PROGRAMS = {
    "tests.support.engines.preforked",
    "tests.support.engines.vllm_engines.observe",
}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def names_imported(module: ast.AST) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_a_free_port_is_for_one_test_and_for_no_connection(monkeypatch):
    theirs = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
    first_theirs = min(server.getsockname()[1] for server in theirs)
    for server in theirs:
        server.close()
    seen = free_port()
    monkeypatch.setattr(
        random.SystemRandom, "randrange", Mock(side_effect=[seen, *range(seen - 50, seen)])
    )
    assert seen != free_port() < first_theirs


def test_files_that_run_vllm_are_in_scopes():
    for path, module in modules().items():
        name = path.relative_to(ROOT).as_posix()
        if path.name.startswith("test_") and VLLM_PROGRAMS & set(names_imported(module)):
            assert scope_of(name) != name, f"tests/support/scopes.py does not name {name}"
    for name, beginnings in SCOPES.items():
        assert all((ROOT / beginning).exists() for beginning in beginnings)
        assert {scope_of(beginning) for beginning in beginnings} == {name}


def test_imports_of_tests():
    """`Later` imports what takes seconds when a test uses it; tests share code in `support`."""
    slow = re.compile(r"(peft|transformers|trl|vllm|torchrl\.(collectors|envs|modules))(\.|$)")
    wrong = []
    for path, module in modules().items():
        at_once = [
            name
            for statement in module.body
            if isinstance(statement, ast.Import | ast.ImportFrom | ast.With)
            for name in names_imported(statement)
            if path.name.startswith("test_") and slow.match(name)
        ]
        of_tests = [
            name
            for name in names_imported(module)
            if name.startswith("tests.") and re.search(r"\.test_\w+(\.|$)", name)
        ]
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in at_once + of_tests]
    assert not wrong, "\n".join(wrong)


def test_tests_of_the_core_need_no_framework():
    """`dev.py lowest` runs them in an environment without any."""
    framework = re.compile(r"dbuffer\.integrations\.(megatron|sglang|torchrl|trl|verl|vllm)\b")
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, module in modules().items()
        if path.is_relative_to(ROOT / "tests" / "core")
        for statement in module.body
        for name in names_imported(statement)
        if isinstance(statement, ast.ImportFrom | ast.Import) and framework.match(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_until_waits_in_a_loop():
    """A pause in a loop that is part of a scenario is a constant with a name.

    Programs in the lab's guests and forks of zygotes have loops of their own.
    """
    waiting = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, module in modules().items()
        if path.parent.name != "lab" and path.name not in ("waiting.py", "zygote.py")
        for loop in ast.walk(module)
        if isinstance(loop, ast.While)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("sleep", "time.sleep")
        and isinstance(call.args[0], ast.Constant)
    ]
    assert not waiting, "\n".join(waiting)
