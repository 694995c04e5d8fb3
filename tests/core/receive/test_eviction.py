"""Guarantee 5, nobody waits for ever: a reader that holds on is evicted, is told, and starts over.

What it holds stays whole all the same: its file is replaced, not overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from tests.support.patterns import OTHER, SMALL, SPARSE, newest, patches_between, publish
from tests.support.stores import assert_tidy, remove_store

TIMEOUT_S = 0.1
SOON_S = 30.0


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    with dbuffer.WeightSender(store, reader_timeout_s=TIMEOUT_S) as sender:
        yield sender


def hold(receiver: dbuffer.WeightReceiver) -> tuple[dbuffer.Snapshot, contextlib.ExitStack]:
    """A snapshot, and what to close to leave it."""
    leave = contextlib.ExitStack()
    return leave.enter_context(receiver.open(timeout_s=5)), leave


def test_an_evicted_snapshot_stays_whole_and_is_not_acknowledged(store, sender, receiver):
    publish(sender, 1)
    with receiver.open() as snapshot:
        publish(sender, 2)
        assert SMALL.version_of(snapshot.tensors) == 1
    sender.wait_applied(1, timeout_s=0)  # the newest version's buffer is not taken
    snapshot, leave = hold(receiver)
    publish(sender, 3, 4, 5)
    sender.send(iter(SMALL.weights(6).items()))
    sender.send(OTHER.weights(7))
    assert SMALL.version_of(snapshot.tensors) == snapshot.version == 2
    with pytest.raises(dbuffer.SnapshotEvictedError, match="version 2"):
        leave.close()
    with pytest.raises(dbuffer.WaitTimeoutError):
        sender.wait_applied(2, timeout_s=0)
    with receiver.open() as snapshot:
        assert OTHER.version_of(snapshot.tensors) == snapshot.version == 7
    assert_tidy(store)


def test_readers_of_files_that_are_never_rewritten_are_not_waited_for(
    store, receiver, monkeypatch, caplog
):
    monkeypatch.setattr("dbuffer.store.medium.REWRITABLE_FILESYSTEMS", frozenset())
    with dbuffer.WeightSender(store, reader_timeout_s=2 * SOON_S) as sender:
        publish(sender, 1)
        started = time.monotonic()
        with receiver.open() as snapshot:
            publish(sender, 2, 3, 4)
            assert SMALL.version_of(snapshot.tensors) == 1
        assert time.monotonic() - started < SOON_S
    assert "evicting" not in caplog.text


def test_a_version_that_is_published_again_waits_for_readers_too(sender, receiver, caplog):
    """It needs no room of theirs, but takes the buffer that they look at."""
    publish(sender, 1)
    with pytest.raises(dbuffer.SnapshotEvictedError), receiver.open():
        publish(sender, 2)
        sender.republish(2)
    assert "evicting receiver" in caplog.text


@pytest.mark.parametrize("keep", [None, 1])
def test_a_reader_of_a_version_that_is_kept_meanwhile_is_not_evicted(store, sender, receiver, keep):
    """It was pinned, or the next sender keeps versions."""
    publish(sender, 1)
    with receiver.open() as snapshot:
        publish(sender, 2)
        if keep is None:
            kept.pin(DoubleBuffer(store), 1)
        sender.close()
        with dbuffer.WeightSender(store, keep=keep or 0, reader_timeout_s=2 * SOON_S) as later:
            started = time.monotonic()
            publish(later, 3)
            assert time.monotonic() - started < SOON_S
        assert SMALL.version_of(snapshot.tensors) == 1


def test_an_error_in_the_block_goes_before_eviction(sender, receiver):
    publish(sender, 1)
    with pytest.raises(KeyError, match="mine"), receiver.open():
        publish(sender, 2, 3)
        raise KeyError("mine")


@pytest.mark.parametrize("is_begun_anew", [True, False])
def test_the_store_goes_in_the_block(store, sender, receiver, is_begun_anew):
    publish(sender, 1)
    sender.close()
    snapshot, leave = hold(receiver)
    remove_store(store)
    if is_begun_anew:
        with dbuffer.WeightSender(store) as again:
            publish(again, 2)
    assert SMALL.version_of(snapshot.tensors) == 1
    with pytest.raises(dbuffer.VersionRegressedError) as caught:
        leave.close()
    assert caught.value.is_forked == is_begun_anew


@pytest.mark.parametrize("checksum", [False, True])
def test_patches_go_on_past_readers_that_were_evicted(store, checksum):
    """The buffer moves to a new file, of which nothing is known: it is written whole."""
    with (
        dbuffer.WeightSender(
            store, delta=True, checksum=checksum, reader_timeout_s=TIMEOUT_S
        ) as sender,
        dbuffer.WeightReceiver(store, verify=checksum) as receiver,
    ):
        for version in (1, 2, 3):
            sender.send(SPARSE.weights(version))
        snapshot, leave = hold(receiver)
        for version in range(4, 9):
            patches = patches_between(SPARSE.weights(version - 1), SPARSE.weights(version))
            assert sender.send_patches(patches).delta_bytes is not None
            assert newest(store, verify=checksum) == version
            assert SPARSE.version_of(dict(snapshot.tensors)) == snapshot.version == 3
        with pytest.raises(dbuffer.SnapshotEvictedError, match="version 3"):
            leave.close()
        with receiver.open() as snapshot:
            assert SPARSE.version_of(dict(snapshot.tensors)) == snapshot.version == 8
        assert_tidy(store)


def test_a_reader_that_lets_go_in_time_is_waited_for_and_no_longer(store):
    with (
        dbuffer.WeightSender(store, reader_timeout_s=60) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        ThreadPoolExecutor(1) as thread,
    ):
        publish(sender, 1, 2)
        files = sorted(store.rglob("weights-*"))
        _, leave = hold(receiver)
        publish(sender, 3)
        publishing = thread.submit(publish, sender, 4)
        time.sleep(0.2)
        assert not publishing.done(), "the writer must wait"
        leave.close()
        publishing.result(timeout=SOON_S)
        assert newest(store) == 4
        assert sorted(store.rglob("weights-*")) == files, "the file is used again"


def test_loading_starts_over_by_itself(sender, receiver, caplog):
    calls: list[dict[str, torch.Tensor]] = []

    def load_slowly(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append({name: tensor.clone() for name, tensor in pairs})
        if len(calls) == 1:
            publish(sender, 2, 3)

    publish(sender, 1)
    with caplog.at_level(logging.WARNING, "dbuffer"):
        assert receiver.load_into(load_slowly) == 3
    sender.wait_applied(3, timeout_s=0)
    assert [SMALL.version_of(loaded) for loaded in calls] == [1, 3]
    assert "version 1" in caplog.text


def test_a_target_that_was_filled_is_not_said_to_be_untouched(sender, receiver, monkeypatch):
    target, read = SMALL.empty(), receiver._copier.read

    def read_slowly(*args: Any, **options: Any) -> None:
        read(*args, **options)
        publish(sender, 2, 3, pattern=OTHER)

    publish(sender, 1)
    monkeypatch.setattr(receiver._copier, "read", read_slowly)
    with pytest.raises(dbuffer.WeightsMismatchError) as caught:
        receiver.load_into(target)
    assert "touched" not in str(caught.value)
    assert "parts of version 1" in caught.value.__notes__[0]
