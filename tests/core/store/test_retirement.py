"""Old weights files on a network mount: kept while someone may read them, and no longer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.format.manifest import ReceiverRecord, encode
from dbuffer.runtime.timing import TIMING
from dbuffer.store import network_files
from dbuffer.store.contents import Contents
from dbuffer.store.liveness import owner_fields
from dbuffer.store.network_files import NetworkFiles
from tests.support.children import Child
from tests.support.patterns import OTHER, SMALL, newest, publish
from tests.support.stores import weights_files

pytestmark = pytest.mark.usefixtures("network")

READER_TIMEOUT_S = 60.0


class Clock:
    """Stands for the monotonic clock of the module that counts ages."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(network_files, "time", clock)
    return clock


def record_of(
    held: int | None, receiver: str = "far", host: str = "another-host", pid: int = 1
) -> ReceiverRecord:
    return ReceiverRecord(
        receiver=receiver,
        token="0" * 16,
        host=host,
        pid=pid,
        applied_version=None,
        held_version=held,
        updated_at=0.0,
    )


def put_record(store: Path, record: ReceiverRecord) -> None:
    (store / "receivers" / f"{record.receiver}.{record.token}.json").write_bytes(encode(record))


def files_in(store: Path) -> list[str]:
    return sorted(name for names in weights_files(store).values() for name in names)


def named_files(store: Path) -> list[str]:
    manifests = [store / buffer / "manifest.json" for buffer in ("A", "B")]
    return sorted(json.loads(path.read_bytes())["file"] for path in manifests)


# The rule by itself


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights-0123456789abcdef-2.td"
    path.write_bytes(b"old")
    return path


class Retiring:
    """One file that was retired at 0 s, and who says to read what."""

    def __init__(
        self, path: Path, version: int | None, clock: Clock, named: tuple[int, ...] = ()
    ) -> None:
        self.records: list[ReceiverRecord] = []
        self.let_go: list[Path] = []
        self._path, self._clock = path, clock
        self._start_s = clock.now_s
        store = SimpleNamespace(root=path.parent, readers=lambda: self.records)
        self._files: Any = NetworkFiles(store, READER_TIMEOUT_S)  # type: ignore[arg-type]
        self._files.close_at = self._note
        self._files._named_versions = lambda: set(named)
        self._files._retire(path, None if version is None else range(version, version + 1))

    def _note(self, path: Path) -> None:
        assert path.exists(), "a file is let go of before it is removed"
        self.let_go.append(path)

    def is_there_at(self, age_s: float) -> bool:
        self._clock.now_s = self._start_s + age_s
        self._files._remove_unneeded()
        return self._path.exists()


def test_a_file_that_nobody_says_to_read_goes_after_a_moment(old_file, clock):
    retiring = Retiring(old_file, 7, clock)
    assert retiring.is_there_at(0.0)
    assert retiring.is_there_at(TIMING.keep_superseded_s - 0.01)
    assert not retiring.let_go
    assert not retiring.is_there_at(TIMING.keep_superseded_s)
    assert retiring.let_go == [old_file]


def test_a_file_stays_while_a_record_says_that_it_is_read(old_file, clock):
    retiring = Retiring(old_file, 7, clock)
    retiring.records = [record_of(None, "one"), record_of(7, "two"), record_of(8, "three")]
    assert retiring.is_there_at(TIMING.keep_superseded_s)
    assert retiring.is_there_at(READER_TIMEOUT_S - 0.01)
    retiring.records = [record_of(None, "one"), record_of(8, "three")]
    assert not retiring.is_there_at(READER_TIMEOUT_S - 0.005)


def test_no_file_stays_for_longer_than_readers_are_waited_for(old_file, clock, caplog):
    retiring = Retiring(old_file, 7, clock)
    retiring.records = [record_of(7, "stuck")]
    assert retiring.is_there_at(READER_TIMEOUT_S - 0.01)
    with caplog.at_level(logging.WARNING, "dbuffer"):
        assert not retiring.is_there_at(READER_TIMEOUT_S)
    assert "stuck" in caplog.text
    assert "version 7" in caplog.text


def test_a_file_that_served_many_versions_stays_while_one_of_them_is_read(old_file, clock):
    retiring = Retiring(old_file, None, clock)
    retiring._files._retired.clear()
    retiring._files._retire(old_file, range(4, 8))
    retiring.records = [record_of(3, "before"), record_of(5, "one"), record_of(8, "after")]
    assert retiring.is_there_at(TIMING.keep_superseded_s)
    retiring.records = [record_of(3, "before"), record_of(8, "after")]
    assert not retiring.is_there_at(TIMING.keep_superseded_s + 0.01)


def test_a_file_of_which_nothing_is_known_stays_for_as_long_as_readers_are_waited_for(
    old_file, clock, caplog
):
    """Of its version nothing is known, so that who reads a version with no name may read this."""
    retiring = Retiring(old_file, None, clock)
    retiring.records = [record_of(None), record_of(3, "other")]
    assert retiring.is_there_at(READER_TIMEOUT_S - 0.01)
    assert not retiring.is_there_at(READER_TIMEOUT_S)
    assert "which other has read" in caplog.text


@pytest.mark.parametrize("held", [None, 8])
def test_a_file_of_which_nothing_is_known_goes_when_all_read_others(old_file, clock, held):
    retiring = Retiring(old_file, None, clock, named=(7, 8))
    retiring.records = [record_of(held)]
    assert retiring.is_there_at(TIMING.keep_superseded_s - 0.01)
    assert not retiring.is_there_at(TIMING.keep_superseded_s)


def test_a_file_is_as_old_as_its_first_retirement(old_file, clock):
    """A writer that fails again and again retires it each time; that must not keep it young."""
    retiring = Retiring(old_file, 7, clock)
    for age_s in (0.5, 1.0, 1.5):
        assert retiring.is_there_at(age_s)
        retiring._files._retire(old_file, range(7, 8))
    assert not retiring.is_there_at(TIMING.keep_superseded_s)


def test_a_file_that_cannot_be_removed_is_no_error(old_file, clock, monkeypatch, caplog):
    retiring = Retiring(old_file, 7, clock)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert retiring.is_there_at(TIMING.keep_superseded_s)
    assert str(old_file) in caplog.text


def test_a_file_that_is_gone_already_is_no_error(old_file, clock):
    retiring = Retiring(old_file, 7, clock)
    old_file.unlink()
    retiring._files.close_at = lambda path: None
    assert not retiring.is_there_at(TIMING.keep_superseded_s)


# The rule at work


@pytest.fixture
def sender(store: Path, clock: Clock) -> Iterator[dbuffer.WeightSender]:
    with dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=READER_TIMEOUT_S) as sender:
        yield sender


def test_each_publish_writes_a_new_file_and_old_ones_go_in_time(store, sender, clock):
    seen: set[str] = set()
    for version in range(1, 11):
        publish(sender, version)
        files = set(files_in(store))
        assert len(files - seen) == 1, "a version has a file that no version had before"
        seen |= files
        # At one a second: the two that are named, and those of the last two seconds.
        assert len(files) <= 2 + TIMING.keep_superseded_s
        clock.now_s += 1.0
    clock.now_s += TIMING.keep_superseded_s
    publish(sender, 11)
    clock.now_s += TIMING.keep_superseded_s
    publish(sender, 12)
    assert len(files_in(store)) == 2, "two versions need room for two"


def test_a_version_that_is_read_elsewhere_outlives_many_publishes(store, sender, clock):
    publish(sender, 1, 2)
    [held] = weights_files(store)["B"]
    put_record(store, record_of(1))
    for version in range(3, 13):
        clock.now_s += 5.0
        publish(sender, version)
        assert (store / "B" / held).exists(), "version 1 is being read"
        assert len(files_in(store)) <= 4, "and nothing else is kept for that"
    put_record(store, record_of(None))
    publish(sender, 13)
    assert not (store / "B" / held).exists()


def test_a_reader_that_never_lets_go_keeps_a_bounded_number_of_files(store, sender, clock):
    """Whatever stands in records: after the time-out a file goes."""
    for number in range(20):
        (store / "receivers").mkdir(exist_ok=True)
        put_record(store, record_of(number + 1, f"stuck-{number}"))
    for version in range(1, 41):
        publish(sender, version)
        clock.now_s += 10.0
        assert len(files_in(store)) <= 3 + READER_TIMEOUT_S / 10.0
    assert len(files_in(store)) <= 3


@pytest.mark.parametrize("is_here", [True, False], ids=["this host", "another host"])
def test_records_of_dead_processes_count_only_where_nobody_can_tell(store, sender, clock, is_here):
    with Child(do_nothing) as child:
        assert child.wait() == 0
        pid = child.pid
    publish(sender, 1, 2)
    [old] = weights_files(store)["B"]
    record = record_of(1, "dead", pid=pid)
    if is_here:
        record = dataclasses.replace(record, **owner_fields() | {"pid": pid, "started": 0})
    put_record(store, record)
    publish(sender, 3)
    clock.now_s += TIMING.keep_superseded_s
    publish(sender, 4)
    assert (store / "B" / old).exists() == (not is_here)


def do_nothing(connection: Connection) -> None:
    """A process that ends."""


def test_a_damaged_record_does_not_stop_publishing(store, sender, clock):
    publish(sender, 1, 2)
    (store / "receivers" / "broken.json").write_bytes(b'{"format":1,"receiver":')
    for version in (3, 4, 5):
        clock.now_s += TIMING.keep_superseded_s
        publish(sender, version)
        assert newest(store) == version
    assert len(files_in(store)) <= 3


def test_a_publish_that_failed_leaves_no_file(store, sender):
    publish(sender, 1, 2)
    before = files_in(store)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3)
        raise KeyError("the trainer's own trouble")

    for _ in range(5):
        with pytest.raises(KeyError):
            sender.send(breaks_off())
        assert files_in(store) == before, "half a version is of no use to anybody"
    publish(sender, 3)
    assert newest(store) == 3


def test_failures_leave_no_growing_heap(store, sender, clock, monkeypatch):
    """Whichever flush fails: what no manifest names any more goes in time."""
    publish(sender, 1, 2)
    real_fsync = os.fsync
    for failing in range(1, 41):
        left = failing % 8 + 1

        def fsync(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(5, "Input/output error")
            real_fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        with contextlib.suppress(dbuffer.StoreAccessError):
            sender.send(OTHER.weights(failing + 2), version=failing + 2)
        monkeypatch.setattr(os, "fsync", real_fsync)
        clock.now_s += TIMING.keep_superseded_s
    clock.now_s += READER_TIMEOUT_S
    publish(sender, 100)
    clock.now_s += READER_TIMEOUT_S
    publish(sender, 101)
    # Two that are named, and the one that this publish put away.
    assert len(files_in(store)) <= 3
    assert newest(store) == 101


def publish_and_die(connection: Connection, store: Path) -> None:
    os.environ["DBUFFER_MOUNT"] = "network"
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1, 2, 3, 4, 5)
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_dead_writer_kept_goes_when_readers_were_waited_for(store, clock):
    """The next writer knows no version of them, and someone reads one that has no name."""
    with Child(publish_and_die, store) as child:
        assert child.wait() == -signal.SIGKILL
    left = set(files_in(store)) - set(named_files(store))
    assert left, "the killed writer had put files away"
    with dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=READER_TIMEOUT_S) as sender:
        put_record(store, record_of(3))
        assert left < set(files_in(store)), "another host may read them"
        publish(sender, 6)
        clock.now_s += READER_TIMEOUT_S - 10  # the files are some moments old
        publish(sender, 7)
        assert left < set(files_in(store))
        clock.now_s += 10
        publish(sender, 8)
        assert not left & set(files_in(store))


def grow_older(store: Path, age_s: float) -> None:
    """Let all that is there have been written so much earlier."""
    for path in (*store.glob("[AB]/*"), store / "writer.json"):
        found = path.stat()
        os.utime(path, (found.st_atime - age_s, found.st_mtime - age_s))


def test_writers_that_die_again_and_again_leave_little(store):
    """A file's age is its own: it does not begin anew with each writer that lives for a moment."""
    left = []
    for _ in range(6):
        with Child(publish_and_die_above, store) as child:
            assert child.wait() == -signal.SIGKILL
        left.append(len(files_in(store)))
        # The life of one writer, by the filesystem's clock.
        grow_older(store, TIMING.keep_superseded_s / 2)
    assert max(left[2:]) <= left[1] + 5, left
    assert newest(store) == 30


def publish_and_die_above(connection: Connection, store: Path) -> None:
    os.environ["DBUFFER_MOUNT"] = "network"
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        last = Contents(sender._writer.store).last_version
        for version in range(last + 1, last + 6):
            sender.send(SMALL.weights(version))
        os.kill(os.getpid(), signal.SIGKILL)


def test_half_a_version_of_a_dead_writer_counts_from_when_it_was_dropped(store, clock):
    """By the next file in its buffer, in as many parts as that has."""
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1, 2)
    names = dict.fromkeys(("A", "B"), "weights-0123456789abcdef-9")
    for buffer, name in names.items():
        for part in ("", ".r0", ".r1"):
            path = store / buffer / f"{name}{part}.td"
            path.write_bytes(b"old")
    grow_older(store, 1000.0)
    for buffer in names:
        for number, path in enumerate(sorted((store / buffer).glob("weights-012*"))):
            written_at = path.stat().st_mtime - 100.0 + number
            os.utime(path, (written_at, written_at))
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        ages_s = sender._writer._files._ages_s("A", list((store / "A").glob("weights-*")))
        assert 990 < ages_s["weights-0123456789abcdef-9.td"] < 1090
        publish(sender, 3)
        assert not list(store.glob("?/weights-0123456789abcdef-9*"))
    assert clock.now_s == 1000.0


def test_only_weights_files_are_removed(store, sender, clock):
    publish(sender, 1)
    (store / "A" / "notes.txt").write_text("mine")
    (store / "B" / "weights-mine.safetensors").write_text("mine")
    sender.close()
    with dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=READER_TIMEOUT_S) as again:
        for version in (2, 3, 4):
            clock.now_s += READER_TIMEOUT_S
            publish(again, version)
    assert (store / "A" / "notes.txt").exists()
    assert (store / "B" / "weights-mine.safetensors").exists()


def test_a_record_is_read_as_it_is_now(store, sender):
    """What a receiver of ours says while it reads is what a writer goes by."""
    publish(sender, 1, 2)
    with dbuffer.WeightReceiver(store, receiver_id="mine", num_threads=1) as receiver:
        with receiver.hold_seen() as held:
            assert held is not None
            record = sender._writer.store.receiver("mine")
            assert record.held_version == held.manifest.version == 2
        record = sender._writer.store.receiver("mine")
        assert record is not None
        assert dataclasses.replace(record, held_version=None) == record
