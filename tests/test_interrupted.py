"""Guarantee 3 where the process lives on: interrupts and failing flushes at every step.

Control-C, a signal handler that raises, a disk that reports an error: the sender's own cleaning
up runs then, which a crash skips, and it must not take away what is published already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from pathlib import Path

import pytest
from steps import CASES
from support import OTHER, SMALL, Step, assert_tidy, at_step, make_temporaries_old, newest

import dbuffer


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_goes_on(sender: dbuffer.WeightSender, expected: int | None) -> None:
    """What was published reads whole, and the same sender publishes on."""
    store = sender.store
    assert newest(store, verify=True) == expected
    for version in range((expected or 0) + 2, (expected or 0) + 5):
        assert sender.send(SMALL.weights(version), version=version).version == version
        assert newest(store, verify=True) == version
    sender.close()
    make_temporaries_old(store)
    with dbuffer.WeightSender(store):
        assert_tidy(store)


@pytest.mark.usefixtures("settle_slowly")
@pytest.mark.parametrize(("situation", "step", "is_published"), CASES)
def test_interrupted_at_a_step_of_a_publish(
    store: Path, situation: str, step: Step, is_published: bool
) -> None:
    is_first, durable = situation.startswith("first"), situation.endswith("durable")
    last = None if is_first else 3
    with dbuffer.WeightSender(store, durable=durable, checksum=True, num_threads=1) as sender:
        for version in range(1, (last or 0) + 1):
            sender.send(SMALL.weights(version))
        version = (last or 0) + 1
        weights = (OTHER if situation == "new layout" else SMALL).weights(version)
        at_step(step, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                sender.send(weights)
        finally:
            sys.setprofile(None)
        started = time.monotonic()
        assert_goes_on(sender, version if is_published else last)
        assert time.monotonic() - started < 5.0  # and not half a minute


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_flush_that_fails_takes_nothing_away(
    any_store: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A publish that raised may or may not be seen; what is seen is whole."""
    flush, calls = os.fsync, 0

    def fail_once(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    with dbuffer.WeightSender(any_store, durable=True, checksum=True) as sender:
        for version in (1, 2, 3):
            sender.send(SMALL.weights(version))
        monkeypatch.setattr(os, "fsync", fail_once)
        with pytest.raises(dbuffer.StoreAccessError, match=str(any_store)):
            sender.send(SMALL.weights(4))
        assert calls >= failing
        found = newest(any_store, verify=True)
        assert found in (3, 4)
        with contextlib.suppress(dbuffer.VersionError):
            sender.send(SMALL.weights(4), version=4)
        assert_goes_on(sender, 4)
