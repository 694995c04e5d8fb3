"""The suite itself: what a run leaves out, how it is measured, and the rules of its code."""

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

from tests.support import unchanged
from tests.support.ports import free_port
from tests.support.scopes import SCOPES, scope_of
from tests.support.unchanged import RULES, changed_since, left_out, mark

NAMES = {rule.name for rule in RULES}


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
    assert changed_since("origin/main", clone) == left_out([]) == []
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
    assert left_out(None) == []


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("README.md", set()),
        ("dbuffer/store/mounts.py", NAMES),
        ("dbuffer/publish/sender.py", NAMES),
        ("dbuffer/receive/receiver.py", NAMES),
        ("requirements-cpu.txt", NAMES),
        ("tests/support/children.py", NAMES),
        ("dbuffer/integrations/vllm/rank.py", {"the oldest vLLM"}),
        ("dbuffer/integrations/sglang/rank.py", {"SGLang's server"}),
        ("dbuffer/integrations/engine/rank.py", {"the oldest vLLM", "SGLang's server"}),
        ("dbuffer/mirror/mirror.py", {"half of the NFS lab"}),
        ("dbuffer/integrations/trl/sync.py", set()),
    ],
)
def test_a_change_runs_what_depends_on_it(monkeypatch, changed, runs):
    monkeypatch.delenv("DBUFFER_SOAK", raising=False)
    assert NAMES - set(left_out(["CHANGELOG.md", changed])) == runs
    monkeypatch.setenv("DBUFFER_SOAK", "1")
    assert left_out(["CHANGELOG.md", changed]) == []


def test_each_rule_selects_tests_and_says_why():
    class Item(SimpleNamespace):
        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks = {**self.marks, mark.name: mark.kwargs.get("reason")}

    def scenario(*, both: bool) -> Item:
        function = SimpleNamespace(scenario=SimpleNamespace(both=both))
        return Item(path=unchanged.ROOT / "tests/lab/test_nfs.py", function=function, marks={})

    files = ("vllm/test_oldest.py", "sglang/test_server.py")
    items = [Item(path=unchanged.ROOT / "tests/integrations" / name, marks={}) for name in files]
    assert all(item.path.is_file() for item in items)
    items.append(scenario(both=False))
    crash = Item(path=unchanged.ROOT / "tests/core/test_crash.py", marks={})
    for item in (others := [scenario(both=True), crash]):
        mark(item, list(NAMES))  # type: ignore[arg-type]
    assert [item.marks for item in others] == [{}, {}]
    for item, rule in zip(items, RULES, strict=True):
        mark(item, [])  # type: ignore[arg-type]
        assert item.marks == {}
        mark(item, list(NAMES))  # type: ignore[arg-type]
        assert rule.name in item.marks["skipif"]
        assert "--all" in item.marks["skipif"]


@pytest.mark.parametrize("framework", ["sglang", "verl"])
def test_what_stands_for_a_gpu_is_where_dev_py_says(framework):
    stubs: Path = runpy.run_path(str(unchanged.ROOT / "dev.py"))["stubs_for"](framework)
    assert (stubs / f"{framework}_without_gpu.py").is_file()


VLLM_PROGRAMS = {
    "tests.support.engines.preforked",
    "tests.support.engines.vllm_engines.observe",
}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    paths = sorted((unchanged.ROOT / "tests").rglob("*.py"))
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
        name = path.relative_to(unchanged.ROOT).as_posix()
        if path.name.startswith("test_") and VLLM_PROGRAMS & set(names_imported(module)):
            assert scope_of(name) != name, f"tests/support/scopes.py does not name {name}"
    for name, beginnings in SCOPES.items():
        assert all((unchanged.ROOT / beginning).exists() for beginning in beginnings)
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
        wrong += [f"{path.relative_to(unchanged.ROOT)}: {name}" for name in at_once + of_tests]
    assert not wrong, "\n".join(wrong)


def test_only_until_waits_in_a_loop():
    """A pause in a loop that is part of a scenario is a constant with a name.

    Programs in the lab's guests and forks of zygotes have loops of their own.
    """
    waiting = [
        f"{path.relative_to(unchanged.ROOT)}:{call.lineno}"
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
