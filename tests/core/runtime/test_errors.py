"""The error tree: one base, standard types beside it, and pickles that keep the message."""

from __future__ import annotations

import inspect
import pickle

import pytest

import dbuffer
from dbuffer import errors

STANDARD_TYPES = {
    "ClosedError": ValueError,
    "EngineBrokenError": RuntimeError,
    "EngineBusyError": RuntimeError,
    "EngineEndedError": ValueError,
    "EngineUnreachableError": ConnectionError,
    "EngineUpdateError": RuntimeError,
    "InvalidWeightsError": ValueError,
    "NotReadyError": RuntimeError,
    "OptionError": ValueError,
    "RankFailedError": RuntimeError,
    "RankTimeoutError": TimeoutError,
    "ReceiverFailedError": RuntimeError,
    "SnapshotEvictedError": RuntimeError,
    "StoreAccessError": OSError,
    "StoreBusyError": BlockingIOError,
    "StoreCorruptError": ValueError,
    "StoreFullError": OSError,
    "StoreNotFoundError": FileNotFoundError,
    "UnsupportedError": NotImplementedError,
    "VersionError": ValueError,
    "VersionRegressedError": RuntimeError,
    "WaitTimeoutError": TimeoutError,
    "WeightsMismatchError": ValueError,
    "WriterSupersededError": RuntimeError,
}


def defined_errors() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_the_table_above_is_the_whole_tree():
    assert set(STANDARD_TYPES) | {"DBufferError"} == set(defined_errors())


@pytest.mark.parametrize("name", STANDARD_TYPES)
def test_each_error_is_ours_and_a_standard_one(name):
    error = getattr(dbuffer, name)
    assert issubclass(error, dbuffer.DBufferError)
    assert issubclass(error, STANDARD_TYPES[name])
    assert error.__doc__


@pytest.mark.parametrize("name", sorted(defined_errors()))
def test_each_error_pickles_with_its_message(name):
    error = getattr(dbuffer, name)("store 'x y': tensor 'é' is off\nby one")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error) == "store 'x y': tensor 'é' is off\nby one"
        assert again.args == error.args


def test_the_history_that_a_receiver_came_upon_pickles_too():
    again = pickle.loads(pickle.dumps(errors.VersionRegressedError("gone back", "a" * 16)))
    assert (str(again), again.history) == ("gone back", "a" * 16)


def test_a_raised_error_pickles_too(tmp_path):
    with (
        dbuffer.WeightReceiver(tmp_path / "none") as receiver,
        pytest.raises(TimeoutError) as caught,
        receiver.open(timeout_s=0),
    ):
        pass
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is dbuffer.WaitTimeoutError
    assert str(again) == str(caught.value)
    assert str(tmp_path) in str(again)


def test_all_is_complete_and_sorted():
    assert sorted(set(dbuffer.__all__)) == list(dbuffer.__all__)
    public = {
        name
        for name in dir(dbuffer)
        if not name.startswith("_") and not inspect.ismodule(getattr(dbuffer, name))
    }
    assert public | {"__version__"} == set(dbuffer.__all__)
    assert set(defined_errors()) <= set(dbuffer.__all__)
    for name in (
        "Publication",
        "ResidentModel",
        "ShardedWeightSender",
        "Snapshot",
        "WeightReceiver",
        "WeightSender",
    ):
        assert inspect.getdoc(getattr(dbuffer, name))
