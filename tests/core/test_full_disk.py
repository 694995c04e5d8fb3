"""A disk without room: a clear error, the old version still served, and then it goes on.

The stores are on a tmpfs of a few megabytes, mounted for the test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.testing.patterns import Sparse
from tests.support.patterns import SMALL, SPARSE, Pattern, load, newest, publish, received
from tests.support.stores import assert_tidy, fill, named_files, small_disk, version_files

MEGABYTE = 1 << 20
DISK_BYTES = 8 * MEGABYTE
BIG = Pattern(num_tensors=12, numel=MEGABYTE // 32)  # 3 MB: the disk holds two, and no third
WIDE = Pattern(num_tensors=6, numel=MEGABYTE // 16)  # as large, and of another layout
CHANGING = Sparse(num_tensors=12, numel=MEGABYTE // 32)  # as large as the first
HUGE = Pattern(num_tensors=32, numel=MEGABYTE // 32)  # 8 MB, and the disk has not even one


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as path:
        yield path


@pytest.fixture
def store(disk: Path) -> Path:
    return disk / "store"


def publish_and_read(sender: dbuffer.WeightSender, pattern: Pattern, *versions: int) -> None:
    for version in versions:
        assert sender.send(pattern.weights(version), version=version).version == version
        assert newest(sender.store, pattern) == version


def assert_full(sender: dbuffer.WeightSender, weights: Any, there: int | None) -> None:
    with pytest.raises(dbuffer.StoreFullError, match=str(sender.store.parent)):
        sender.send(weights)
    assert newest(sender.store, BIG, CHANGING) == there


@pytest.mark.parametrize("first", [0, 1, 2], ids=["nothing", "one buffer", "both buffers there"])
def test_full(disk, store, first):
    """Without room for a byte, not even a version into a file that is there can be marked."""
    with dbuffer.WeightSender(store) as sender:
        publish(sender, *range(1, first + 1), pattern=BIG)
        filler = fill(disk, leave_bytes=0 if first else MEGABYTE)
        for _ in range(3):
            assert_full(sender, BIG.weights(first + 1), first or None)
        filler.unlink()
        publish_and_read(sender, BIG, *range(first + 1, first + 4))
        assert_tidy(store)


def test_the_error_says_how_much_is_needed_and_free(disk, store):
    with dbuffer.WeightSender(store) as sender:
        fill(disk, leave_bytes=MEGABYTE)
        room = r"which needs [\d.]+ MB \([\d.]+ [kM]?B free\)"
        with pytest.raises(dbuffer.StoreFullError, match=room):
            sender.send(BIG.weights(1))


def test_full_before_the_store_is_made(disk, store):
    filler = fill(disk)
    with contextlib.suppress(dbuffer.StoreFullError), dbuffer.WeightSender(store) as one:
        one.send(SMALL.weights(1))
    filler.unlink()
    with dbuffer.WeightSender(store) as sender:
        publish_and_read(sender, SMALL, 1)


def test_full_at_any_page(disk, store):
    """Room for a few pages: whichever small file comes too late, nothing is lost."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    failures = 0
    with dbuffer.WeightSender(store, checksum=True) as sender:
        last = 0
        for num_pages in range(8):
            for layout in (SMALL, Pattern(num_tensors=3, numel=100 + num_pages)):
                filler = fill(disk, leave_bytes=num_pages * page_bytes)
                try:
                    sender.send(layout.weights(last + 1))
                except dbuffer.StoreFullError:
                    failures += 1
                else:
                    last, pattern = last + 1, layout
                if last:
                    assert newest(store, pattern) == last
                filler.unlink()
        assert failures > 0
        assert last > 0
        publish_and_read(sender, SMALL, last + 1)
        assert_tidy(store)


@pytest.mark.timing(keep_superseded_s=0.0)
def test_deltas_full_at_any_page(disk, store, mount, monkeypatch):
    """Whichever file of a delta, or of an anchor after some, comes too late."""
    monkeypatch.setattr("dbuffer.format.chain.MAX_CHAIN", 2)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    failures = last = 0
    with dbuffer.WeightSender(store, checksum=True, delta=True) as sender:
        for num_pages in range(14):
            publish(sender, *range(last + 1, last + 5), pattern=SPARSE)
            last += 4
            filler = fill(disk, leave_bytes=num_pages * page_bytes)
            for _ in range(4):
                try:
                    sender.send(SPARSE.weights(last + 1), version=last + 1)
                except dbuffer.StoreFullError:
                    failures += 1
                else:
                    last += 1
                assert newest(store, SPARSE) == last
            filler.unlink()
        assert 5 < failures < 50
        publish_and_read(sender, SPARSE, *range(last + 1, last + 5))
        left = version_files(store) - named_files(store)
        assert len(left) <= (4 if mount == "network" else 0)


@pytest.mark.timing(keep_superseded_s=0.0)
def test_room_for_two_versions_is_enough_for_deltas(store, mount, monkeypatch):
    """And for the anchors between them, and after an error."""
    monkeypatch.setattr("dbuffer.format.chain.MAX_CHAIN", 2)
    with dbuffer.WeightSender(store, delta=True, checksum=True) as sender:
        publish_and_read(sender, CHANGING, *range(1, 10))
        for version in (10, 12, 14):
            assert_full(sender, HUGE.weights(version), version - 1)
            publish_and_read(sender, CHANGING, version, version + 1)


@pytest.mark.parametrize("delta", [False, True])
def test_room_for_two_versions_is_enough_for_new_files(store, delta, monkeypatch):
    """As on overlay, xfs and btrfs: neither end may map a file that was removed."""
    monkeypatch.setattr("dbuffer.store.medium.REWRITABLE_FILESYSTEMS", frozenset())
    with (
        dbuffer.WeightSender(store, delta=delta) as sender,
        dbuffer.WeightReceiver(store) as receiver,
    ):
        for version in range(1, 6):
            publish(sender, version, pattern=CHANGING)
            assert load(receiver, CHANGING) == version


def test_room_for_two_versions_is_enough_for_a_new_layout(store):
    """The version that is replaced must not take up room, nor what a receiver that follows had."""
    with (
        dbuffer.WeightSender(store) as sender,
        dbuffer.WeightReceiver(store) as receiver,
    ):
        for version, pattern in enumerate((BIG, BIG, BIG, WIDE, WIDE, WIDE), start=1):
            sender.send(pattern.weights(version))
            with receiver.open() as snapshot:
                assert pattern.version_of(snapshot.tensors) == version
            del snapshot  # it maps its file, and an unlinked file keeps its room while mapped
        assert_tidy(store)


@pytest.mark.parametrize("form", [dict, lambda weights: iter(weights.items())])
def test_full_at_a_new_layout(store, form):
    """A stream's size shows only as it comes."""
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2, pattern=BIG)
        for _ in range(3):
            assert_full(sender, form(HUGE.weights(3)), 2)
        sender.send(form(BIG.weights(3)))
        assert newest(store, BIG) == 3
        assert_tidy(store)
    with dbuffer.WeightSender(store) as sender:
        publish_and_read(sender, BIG, 4)


def test_full_because_an_evicted_reader_still_has_its_file(store):
    """Its bytes cannot be given to anyone else as long as it maps them."""
    with dbuffer.WeightSender(store, reader_timeout_s=0.1) as sender:
        sender.send(BIG.weights(1))
        with (
            pytest.raises(dbuffer.SnapshotEvictedError),
            dbuffer.WeightReceiver(store) as receiver,
            receiver.open() as snapshot,
        ):
            sender.send(BIG.weights(2))
            for _ in range(2):
                assert_full(sender, BIG.weights(3), 2)
            assert BIG.version_of(snapshot.tensors) == 1, "what it held is whole"
        del snapshot
        publish_and_read(sender, BIG, 3, 4, 5)
        assert_tidy(store)


def test_a_version_whose_delta_has_no_room_is_published_without(disk, store, monkeypatch, caplog):
    """On a local mount, where a buffer is whole and its delta tells what changed."""
    monkeypatch.setenv("DBUFFER_MOUNT", "local")
    weights = {"a": torch.zeros(3 * MEGABYTE, dtype=torch.uint8)}
    generator = torch.Generator().manual_seed(0)

    def send() -> int | None:
        places = torch.randperm(3 * MEGABYTE, generator=generator)[:100_000]
        weights["a"][places] += 1
        published = sender.send(weights)
        assert torch.equal(received(store)["a"], weights["a"])
        assert version_files(store) <= named_files(store)
        return published.delta_bytes

    with dbuffer.WeightSender(store, delta=True) as sender:
        delta_bytes = [send() for _ in range(3)][-1]
        assert delta_bytes is not None
        filler = fill(disk, leave_bytes=delta_bytes // 2)
        assert [send() for _ in range(4)].count(None) >= 2  # its own old deltas make room
        assert [message for message in caplog.messages if str(store) in message] == [
            f"{store} has no room for deltas: versions have no deltas until there is room"
        ]
        filler.unlink()
        assert None not in [send() for _ in range(3)]
