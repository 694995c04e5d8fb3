"""The error tree: one base, standard types beside it, and pickles that keep the message."""

from __future__ import annotations

import inspect
import pickle

import pytest

import dbuffer
from dbuffer import errors


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
