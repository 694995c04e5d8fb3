"""Exceptions in other terms: which leave, and that nobody keeps what their callers had in hand."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

import pytest

import dbuffer
from dbuffer.store.filesystem import os_errors

PACKAGE = Path(dbuffer.__file__).parent


class Weights:
    """Memory that somebody has in hand."""


def read_nothing(directory: Path) -> weakref.ref[Weights]:
    """Have something in hand while a file is found missing, as one does who waits for it."""
    weights = Weights()
    with pytest.raises(dbuffer.StoreNotFoundError), os_errors("read", directory):
        (directory / "none").read_bytes()
    return weakref.ref(weights)


def test_callers_memory_is_not_kept(tmp_path):
    gc.collect()
    gc.disable()
    try:
        assert read_nothing(tmp_path)() is None
    finally:
        gc.enable()


def raises_another(handler: ast.ExceptHandler) -> bool:
    raised = [node for node in ast.walk(handler) if isinstance(node, ast.Raise)]
    return any(node.exc is not None for node in raised)


def test_no_generator_does_it():
    """They keep it on Python 3.13, which need not be the one that runs this."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and any("contextmanager" in ast.unparse(each) for each in node.decorator_list)
        ]
        handlers = [node for each in functions for node in ast.walk(each)]
        found += [
            f"{path}:{handler.lineno}"
            for handler in handlers
            if isinstance(handler, ast.ExceptHandler) and raises_another(handler)
        ]
    assert found == []
