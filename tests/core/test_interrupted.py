"""Guarantee 3 where the process lives on: interrupts and failing flushes at every moment.

Control-C, a signal handler that raises, a disk that reports an error: the sender's own cleaning
up runs then, which a crash skips, and it must not take away what is published already.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import sys
import time

import pytest

import dbuffer
from dbuffer.format import chain
from dbuffer.store.filesystem import is_locked
from dbuffer.store.medium import medium_of
from dbuffer.testing.moments import LOOKS, at_call
from tests.support.crashes import (
    DELTA_SITUATIONS,
    DURABLE_SITUATIONS,
    SITUATIONS,
    Flip,
    last_before,
    make_sender,
    max_chain,
    noting,
    pattern_of,
)
from tests.support.patterns import OTHER, SMALL, SPARSE, Pattern, load, newest, publish
from tests.support.soak import IN_SOAKS_ALONE, is_soak, numbers
from tests.support.stores import assert_tidy, make_temporaries_old


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_goes_on(
    sender: dbuffer.WeightSender, expected: int | None, pattern: Pattern = SMALL
) -> None:
    """Require that the sender publishes on, and that nothing is left over then."""
    store = sender.store
    for version in range((expected or 0) + 2, (expected or 0) + 4):  # into both buffers
        assert sender.send(pattern.weights(version), version=version).version == version
        assert newest(store, verify=True) == version
    sender.close()
    make_temporaries_old(store)
    with dbuffer.WeightSender(store):
        if medium_of(store).maps_files:  # else what somebody may read stays for a while
            assert_tidy(store)


@pytest.mark.timing(settle_s=60.0)
@pytest.mark.parametrize(
    ("situation", "mount"),
    [
        *((situation, "local") for situation in SITUATIONS),
        *((situation, "network") for situation in DELTA_SITUATIONS),
        pytest.param(DURABLE_SITUATIONS[0], "local", marks=IN_SOAKS_ALONE),
    ],
)
def test_interrupted_at_every_moment_of_a_publish(
    shm_path, situation, mount, record_property, monkeypatch
):
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    monkeypatch.setattr(chain, "MAX_CHAIN", max_chain(situation))
    flip = Flip(last_before(situation))
    pattern = pattern_of(situation)
    # Every second moment; test_crash takes the others.
    for number in numbers(first=2 - (mount == "network"), every=2):
        store = shm_path / f"{number}"
        with make_sender(store, situation) as sender:
            for version in range(1, flip.new):
                sender.send(pattern.weights(version))
            weights = (OTHER if situation == "new layout" else pattern).weights(flip.new)
            # Not before every call of C, as kills in a soak: Python drops what is raised in the
            # callback of a weak reference, and a file that was about to be closed stays open.
            at_call(number, interrupt, repeats=is_soak())
            try:
                sender.send(weights)
                sys.setprofile(None)
            except KeyboardInterrupt:
                pass
            else:
                break
            started = time.monotonic()
            with noting(number):
                assert_goes_on(sender, flip.check(newest(store, verify=True)), pattern)
            assert time.monotonic() - started < 25.0  # and not half a minute
        shutil.rmtree(store)
    flip.check_all()
    record_property("senders interrupted at a moment of a publish", flip.moments)


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_interrupted_at_every_moment_of_a_close(shm_path, end):
    """Closed once more, it holds no lock."""
    for number in itertools.count(1):
        store = shm_path / f"{number}"
        with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
            publish(sender, 1)
            assert load(receiver) == 1
            closing = sender if end == "sender" else receiver
            at_call(number, interrupt, LOOKS)
            try:
                closing.close()
                sys.setprofile(None)
            except KeyboardInterrupt:
                closing.close()
            else:
                break
            if end == "sender":
                dbuffer.WeightSender(store).close()
            else:
                assert not is_locked(receiver.record.path)
        shutil.rmtree(store)
    assert number > 2, "no moment was found"


@pytest.mark.parametrize("failing", range(1, 8))
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
def test_a_flush_that_fails_takes_nothing_away(store, monkeypatch, failing, delta):
    """A publish that raised may or may not be seen; what is seen is whole."""
    pattern = SPARSE if delta else SMALL
    if delta:
        monkeypatch.setenv("DBUFFER_MOUNT", "network")
    flush, calls = os.fsync, 0

    def fail_once(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    with dbuffer.WeightSender(store, durable=True, checksum=True, delta=delta) as sender:
        publish(sender, 1, 2, 3, pattern=pattern)
        monkeypatch.setattr(os, "fsync", fail_once)
        with pytest.raises(dbuffer.StoreAccessError, match=str(store)):
            sender.send(pattern.weights(4))
        assert calls >= failing
        found = newest(store, verify=True)
        assert found in (3, 4)
        with contextlib.suppress(dbuffer.VersionError):  # readers may know its number
            sender.send(pattern.weights(4), version=4)
        assert newest(store, verify=True) in (found, 4)
        assert_goes_on(sender, 4, pattern)
