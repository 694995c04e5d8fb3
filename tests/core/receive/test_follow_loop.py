"""`FollowLoop`: the retries, the log and the policies that all followers of a store share."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.runtime.trouble import RetryLoop
from tests.support.patterns import SMALL
from tests.support.waiting import meanwhile

logger = logging.getLogger(__name__)

IN_TIME_S = 60.0


@pytest.fixture
def receiver(store: Path) -> Iterator[dbuffer.WeightReceiver]:
    with dbuffer.WeightReceiver(store, receiver_id="follower", poll_interval_s=0.05) as made:
        yield made


@pytest.fixture
def loop(store: Path, receiver: dbuffer.WeightReceiver) -> FollowLoop:
    publish(store, 1)
    return FollowLoop(receiver, "testing", logger)


def publish(store: Path, version: int) -> None:
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(version), version=version)


def fail(loop: FollowLoop, error: Exception, newer_than: int | None = None) -> int | None:
    """Make an attempt that finds a version and fails."""
    with loop.attempt():
        version = loop.wait(newer_than, timeout_s=IN_TIME_S)
        raise error
    return version


def wait(loop: FollowLoop, newer_than: int | None, **more: Any) -> int | None:
    """Return the version for which an attempt waits. In its block, a failed assertion would be its
    failure, and be retried."""
    with loop.attempt():
        return loop.wait(newer_than, **more)
    raise AssertionError(loop.error)


def require_no_attempt(loop: FollowLoop, newer_than: int | None) -> None:
    interrupt = threading.Event()
    with meanwhile(interrupt.set, after_s=0.3):
        assert wait(loop, newer_than, interrupt=interrupt) is None


def test_a_request_to_retry_is_not_kept_for_a_failure_that_comes_later(store, loop):
    """It comes while the loop waits, and the attempt that follows is of a new version."""

    def ask_and_publish() -> None:
        loop.retry_now()
        publish(store, 2)

    with meanwhile(ask_and_publish, after_s=0.2):
        assert fail(loop, dbuffer.WeightsMismatchError("one too many"), newer_than=1) == 2
    require_no_attempt(loop, 1)


@pytest.mark.timing(retry_min_s=1000.0, retry_max_s=1000.0)
@pytest.mark.parametrize("is_found", [False, True], ids=["interrupted", "not used"])
def test_a_request_to_retry_is_kept_until_a_version_is_used(loop, is_found):
    assert fail(loop, dbuffer.DBufferError("a passing problem")) == 1
    loop.retry_now()
    interrupt = threading.Event()
    if not is_found:
        interrupt.set()
    assert wait(loop, None, interrupt=interrupt) == (1 if is_found else None)
    assert fail(loop, dbuffer.DBufferError("a passing problem")) == 1
    require_no_attempt(loop, None)


def test_a_snapshot_that_was_evicted_is_no_failure(loop):
    fail(loop, dbuffer.SnapshotEvictedError("a writer took it"))
    assert (loop.error, loop.is_failing, loop.has_forked) == (None, False, False)


def test_final_errors_leave_the_block_and_errors_after_a_stop_do_not_count(receiver, caplog):
    stop = threading.Event()
    loop = FollowLoop(receiver, "testing", logger, final=(dbuffer.OptionError,), stop=stop)
    with pytest.raises(dbuffer.OptionError), loop.attempt():
        raise dbuffer.OptionError("not this way")
    stop.set()
    with loop.attempt():
        raise dbuffer.DBufferError("it was closing")
    assert not loop.is_failing
    assert not [entry for entry in caplog.records if entry.name == __name__]


def test_an_error_that_is_kept_keeps_no_variables():
    """They may be mapped files, whose room the next attempt needs."""
    references: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.ones(3)
        references.append(weakref.ref(tensor))
        try:
            raise OSError(28, "no room")
        except OSError as error:
            raise dbuffer.StoreFullError("no room") from error

    loop = RetryLoop(logger)
    with loop.attempt():
        fail()
    assert isinstance(loop.error, dbuffer.StoreFullError)
    assert references[0]() is None
