"""Errors: one base, standard types beside it, pickles that keep the message."""

from __future__ import annotations

import ast
import gc
import inspect
import pickle
import weakref
from pathlib import Path

import pytest

import dbuffer
from dbuffer import errors
from dbuffer.store.filesystem import os_errors


def defined_errors() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


@pytest.mark.parametrize("name", sorted(defined_errors()))
def test_each_error_is_a_standard_one_too_and_pickles_with_its_message(name):
    kind = getattr(dbuffer, name)
    assert kind.__doc__
    assert issubclass(kind, dbuffer.DBufferError)
    standard = [one for one in kind.__mro__ if one.__module__ == "builtins"]
    assert len(standard) > 3 or name == "DBufferError"
    error = kind("store 'x y': tensor 'é' is off\nby one")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error) == "store 'x y': tensor 'é' is off\nby one"
        assert again.args == error.args


def test_a_fork_that_a_receiver_came_upon_pickles_too():
    again = pickle.loads(pickle.dumps(errors.VersionRegressedError("forked", is_forked=True)))
    assert (str(again), again.is_forked) == ("forked", True)


# Exceptions in other terms


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
