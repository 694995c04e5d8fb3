"""Rules of the suite's code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT
from tests.support.schedule import GROUPS, SLOW, group_of

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


def test_files_that_run_vllm_are_in_groups():
    for path, module in modules().items():
        name = path.relative_to(ROOT).as_posix()
        if path.name.startswith("test_") and VLLM_PROGRAMS & set(names_imported(module)):
            assert group_of(name) != name, f"tests/support/schedule.py does not name {name}"
    for name, beginnings in GROUPS.items():
        assert all((ROOT / beginning).exists() for beginning in beginnings)
        assert {group_of(beginning) for beginning in beginnings} == {name}
    assert all((ROOT / name).is_file() for name in SLOW)


def test_imports_of_tests():
    """Functions import what takes seconds, as all processes collect; tests share `support`."""
    slow = re.compile(r"(peft|transformers|trl|vllm|torchrl\.(collectors|envs|modules))(\.|$)")
    slow_in_core = re.compile(r"(tensordict|torch\.distributed\.(fsdp|pipelining|tensor))(\.|$)")
    wrong = []
    for path, module in modules().items():
        at_once = [
            name
            for statement in module.body
            if isinstance(statement, ast.Import | ast.ImportFrom | ast.With)
            for name in names_imported(statement)
            if (path.name.startswith("test_") and slow.match(name))
            or ("core" in path.parts and slow_in_core.match(name))
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
        if path.relative_to(ROOT / "tests").parts[0] in ("core", "project")
        for statement in module.body
        for name in names_imported(statement)
        if isinstance(statement, ast.ImportFrom | ast.Import) and framework.match(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_until_waits_in_a_loop():
    """A pause in a loop that is part of a scenario is a constant with a name.

    Programs in the lab's guests have loops of their own.
    """
    waiting = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, module in modules().items()
        if path.parent.name != "lab" and path.name != "waiting.py"
        for loop in ast.walk(module)
        if isinstance(loop, ast.While)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("sleep", "time.sleep")
        and isinstance(call.args[0], ast.Constant)
    ]
    assert not waiting, "\n".join(waiting)
