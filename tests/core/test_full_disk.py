"""A disk without room: a clear error, the old version still served, and then it goes on.

The stores are on a tmpfs of a few megabytes, mounted for the test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import dbuffer
from tests.support.children import Child
from tests.support.patterns import SMALL, SPARSE, Pattern, Sparse, newest, publish, received
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


@pytest.mark.parametrize("first", [0, 1, 2], ids=["nothing", "one buffer", "both buffers there"])
def test_full(disk, first):
    """Without room for a byte, not even a version into a file that is there can be marked."""
    with dbuffer.WeightSender(disk / "store") as sender:
        publish(sender, *range(1, first + 1), pattern=BIG)
        filler = fill(disk, leave_bytes=0 if first else MEGABYTE)
        for _ in range(3):
            with pytest.raises(dbuffer.StoreFullError, match=str(disk)):
                sender.send(BIG.weights(first + 1))
            assert newest(disk / "store", BIG) == (first or None)
        filler.unlink()
        for version in range(first + 1, first + 4):
            assert sender.send(BIG.weights(version), version=version).version == version
            assert newest(disk / "store", BIG) == version
        assert_tidy(disk / "store")


def test_full_before_the_store_is_made(disk):
    filler = fill(disk)
    with contextlib.suppress(dbuffer.StoreFullError), dbuffer.WeightSender(disk / "store") as one:
        one.send(SMALL.weights(1))
    filler.unlink()
    with dbuffer.WeightSender(disk / "store") as sender:
        sender.send(SMALL.weights(1), version=1)
    assert newest(disk / "store", SMALL) == 1


def test_full_at_any_page(disk):
    """Room for a few pages: whichever small file comes too late, nothing is lost."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    failures = 0
    with dbuffer.WeightSender(disk / "store", checksum=True) as sender:
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
                    assert newest(disk / "store", pattern) == last
                filler.unlink()
        assert failures > 0
        assert last > 0
        sender.send(SMALL.weights(last + 1))
        assert newest(disk / "store", SMALL) == last + 1
        assert_tidy(disk / "store")


@pytest.mark.timing(keep_superseded_s=0.0)
def test_deltas_full_at_any_page(disk, mount, monkeypatch):
    """Whichever file of a delta, or of an anchor after some, comes too late."""
    monkeypatch.setattr("dbuffer.publish.delta_chain.MAX_CHAIN", 2)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    failures = last = 0
    with dbuffer.WeightSender(disk / "store", checksum=True, delta=True) as sender:
        for num_pages in range(14):
            for _ in range(4):
                last += 1
                sender.send(SPARSE.weights(last), version=last)
            filler = fill(disk, leave_bytes=num_pages * page_bytes)
            for _ in range(4):
                try:
                    sender.send(SPARSE.weights(last + 1), version=last + 1)
                except dbuffer.StoreFullError:
                    failures += 1
                else:
                    last += 1
                assert newest(disk / "store", SPARSE) == last
            filler.unlink()
        assert 5 < failures < 50
        for _ in range(4):
            last += 1
            sender.send(SPARSE.weights(last), version=last)
            assert newest(disk / "store", SPARSE) == last
        left = version_files(disk / "store") - named_files(disk / "store")
        assert len(left) <= (4 if mount == "network" else 0)


@pytest.mark.timing(keep_superseded_s=0.0)
def test_room_for_two_versions_is_enough_for_deltas(disk, mount, monkeypatch):
    """And for the anchors between them, and after an error."""
    monkeypatch.setattr("dbuffer.publish.delta_chain.MAX_CHAIN", 2)
    with dbuffer.WeightSender(disk / "store", delta=True, checksum=True) as sender:
        for version in range(1, 10):
            sender.send(CHANGING.weights(version))
            assert newest(disk / "store", CHANGING) == version
        for version in (10, 12, 14):
            with pytest.raises(dbuffer.StoreFullError, match=str(disk)):
                sender.send(HUGE.weights(version))
            assert newest(disk / "store", CHANGING) == version - 1
            for later in (version, version + 1):
                sender.send(CHANGING.weights(later))
                assert newest(disk / "store", CHANGING) == later


def test_room_for_two_versions_is_enough_for_a_new_layout(disk):
    """The version that is replaced must not take up room, nor what a receiver that follows had."""
    with (
        dbuffer.WeightSender(disk / "store") as sender,
        dbuffer.WeightReceiver(disk / "store") as receiver,
    ):
        for version, pattern in enumerate((BIG, BIG, BIG, WIDE, WIDE, WIDE), start=1):
            sender.send(pattern.weights(version))
            with receiver.open() as snapshot:
                assert pattern.version_of(snapshot.tensors) == version
            del snapshot  # it maps its file, and an unlinked file keeps its room while mapped
        assert_tidy(disk / "store")


@pytest.mark.parametrize("form", [dict, lambda weights: iter(weights.items())])
def test_full_at_a_new_layout(disk, form):
    """A stream's size shows only as it comes."""
    with dbuffer.WeightSender(disk / "store") as sender:
        publish(sender, 1, 2, pattern=BIG)
        for _ in range(3):
            with pytest.raises(dbuffer.StoreFullError, match=str(disk)):
                sender.send(form(HUGE.weights(3)))
            assert newest(disk / "store", BIG) == 2
        sender.send(form(BIG.weights(3)))
        assert newest(disk / "store", BIG) == 3
        assert_tidy(disk / "store")
    with dbuffer.WeightSender(disk / "store") as sender:
        sender.send(BIG.weights(4))
        assert newest(disk / "store", BIG) == 4


def hold(connection: Connection, store: Path) -> None:
    with dbuffer.WeightReceiver(store) as receiver:
        try:
            with receiver.open() as snapshot:
                connection.send(snapshot.version)
                connection.recv()
                connection.send(BIG.version_of(snapshot.tensors))
        except dbuffer.SnapshotEvictedError:
            connection.send("evicted")
    connection.send("closed")
    connection.recv()


def test_full_because_an_evicted_reader_still_has_its_file(disk):
    """Its bytes cannot be given to anyone else as long as it maps them."""
    with (
        dbuffer.WeightSender(disk / "store", reader_timeout_s=0.1) as sender,
        contextlib.ExitStack() as readers,
    ):
        sender.send(BIG.weights(1))
        reader = readers.enter_context(Child(hold, disk / "store"))
        assert reader.receive() == 1
        sender.send(BIG.weights(2))
        for _ in range(2):
            with pytest.raises(dbuffer.StoreFullError, match=str(disk)):
                sender.send(BIG.weights(3))
            assert newest(disk / "store", BIG) == 2
        reader.send("let go")
        assert reader.receive() == 1, "what it held is whole"
        assert reader.receive() == "evicted"
        assert reader.receive() == "closed"  # killed while it writes its record, it leaves a file
        readers.close()
        for version in (3, 4, 5):
            sender.send(BIG.weights(version))
            assert newest(disk / "store", BIG) == version
        assert_tidy(disk / "store")


def test_receiver_acknowledges_again_when_there_is_room(disk):
    target = SMALL.empty()
    with (
        dbuffer.WeightSender(disk / "store") as sender,
        dbuffer.WeightReceiver(disk / "store") as receiver,
    ):
        sender.send(SMALL.weights(1))
        filler = fill(disk)
        assert receiver.load_into(target) == 1, "a reader needs no room"
        filler.unlink()
        sender.send(SMALL.weights(2))
        assert receiver.load_into(target) == 2
        sender.wait_applied(2, timeout_s=0)


def test_a_version_whose_delta_has_no_room_is_published_without(disk, monkeypatch, caplog):
    """On a local mount, where a buffer is whole and its delta tells what changed."""
    monkeypatch.setenv("DBUFFER_MOUNT", "local")
    store, weights = disk / "store", {"a": torch.zeros(3 * MEGABYTE, dtype=torch.uint8)}
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
        assert [record.message for record in caplog.records] == [
            f"{store} has no room for deltas: publishing versions without, until it has"
        ]
        filler.unlink()
        assert None not in [send() for _ in range(3)]
