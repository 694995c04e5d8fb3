"""Old weights files on a network mount: kept while someone may read them, and no longer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

import dbuffer
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import encode
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem, retention
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.liveness import owner_fields
from dbuffer.store.records import OwnRecord
from dbuffer.store.retention import Retention
from dbuffer.testing.moments import die
from tests.support.children import Child
from tests.support.patterns import SMALL, SPARSE, newest, publish
from tests.support.stores import named_files, version_files, weights_files

pytestmark = pytest.mark.usefixtures("network")

READER_TIMEOUT_S = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic clock of the module that counts ages."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(retention, "time", clock)
    return clock


def put_record(store: Path, held: int | None, receiver: str = "far", **owner: Any) -> None:
    """Put the record of a receiver, of another host by default, that reads a version."""
    record = structs.replace(
        OwnRecord(receiver).current,
        held=None if held is None else VersionId(DoubleBuffer(store).pointer().id.run, held),
        token="0" * 16,
        updated_at=0.0,
        **{"host": "another-host", "pid": 1, "boot": "", "pid_namespace": 0, "started": 0} | owner,
    )
    (store / "receivers" / f"{receiver}.{record.token}.json").write_bytes(encode(record))


def files_in(store: Path) -> list[str]:
    return sorted(name for names in weights_files(store).values() for name in names)


def publish_five_and_die(connection: Connection, store: Path) -> None:
    os.environ["DBUFFER_MOUNT"] = "network"
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        for _ in range(5):
            sender.send(SMALL.weights(sender._writer.next_version(None)))
        die()


KEEP_S = TIMING.keep_superseded_s


@pytest.fixture
def sender(store: Path, clock: SimpleNamespace) -> Iterator[dbuffer.WeightSender]:
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
        assert len(files) <= 2 + KEEP_S
        clock.now_s += 1.0
    clock.now_s += KEEP_S
    publish(sender, 11)
    clock.now_s += KEEP_S
    publish(sender, 12)
    assert len(files_in(store)) == 2, "two versions need room for two"


@pytest.mark.parametrize(
    ("held", "stays_s", "warning"),
    [
        ([], KEEP_S, ""),
        ([None, 2], KEEP_S, ""),
        ([None, 1, 2], READER_TIMEOUT_S, "of version 1, which far-1 has read for more than 60 s"),
    ],
)
def test_a_file_stays_for_a_moment_or_while_it_is_read_but_not_forever(
    store, sender, clock, caplog, monkeypatch, held, stays_s, warning
):
    publish(sender, 1, 2)
    [old] = (store / "B").glob("weights-*")
    for version in held:
        put_record(store, version, f"far-{version}")
    publish(sender, 3)
    clock.now_s += stays_s - 0.01
    publish(sender, 4)
    assert old.exists()
    assert not caplog.records
    clock.now_s += 0.01
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", cannot_remove)
        publish(sender, 5)
    assert f"cannot remove the old version {old}: [Errno 13]" in caplog.text
    assert warning in caplog.text
    assert old.exists()
    assert newest(store) == 5


@pytest.mark.timing(keep_superseded_s=0.0)
def test_a_delta_of_several_versions_that_are_dropped_together_stays_for_readers_of_each(store):
    """A sender that keeps none drops versions that another kept, and one from its buffer."""
    with dbuffer.WeightSender(store, num_threads=1, delta=True, keep=3) as sender:
        publish(sender, *range(1, 6), pattern=SPARSE)
        sender.send(SMALL.weights(6))  # stands on no delta
    deltas = set(store.glob("deltas/*"))
    assert len(deltas) == 4
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        put_record(store, 5)
        publish(sender, 7, 8, 9)
        assert set(store.glob("deltas/*")) == deltas
        put_record(store, None)
        publish(sender, 10)
        assert not list(store.glob("deltas/*"))


def test_what_was_put_away_is_not_looked_at_again(store, sender, clock, monkeypatch):
    """Each look at a file asks the server."""
    publish(sender, 1, 2)
    put_record(store, 1)
    publish(sender, 3)
    looks: list[Path] = []
    touched_at = filesystem.touched_at
    monkeypatch.setattr(
        filesystem, "touched_at", lambda path: looks.append(path) or touched_at(path)
    )
    for version in range(4, 8):
        clock.now_s += KEEP_S
        publish(sender, version)
    assert not [path for path in looks if path.suffix == ".td"]


def cannot_remove(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_version_that_is_read_elsewhere_outlives_its_withdrawal(store, sender, clock):
    """As a mirror withdraws versions that the store it copies has lost."""
    publish(sender, 1, 2)
    [held] = weights_files(store)["A"]
    put_record(store, 2)
    sender._writer.withdraw()
    clock.now_s += KEEP_S
    publish(sender, 3)
    assert (store / "A" / held).exists()
    put_record(store, None)
    publish(sender, 4)
    assert not (store / "A" / held).exists()


@pytest.mark.parametrize("is_here", [True, False], ids=["this host", "another host"])
def test_records_of_dead_processes_count_only_where_nobody_can_tell(store, sender, clock, is_here):
    with Child(do_nothing) as child:
        assert child.wait() == 0
        owner = {"pid": child.pid, "started": 0}
    publish(sender, 1, 2)
    [old] = weights_files(store)["B"]
    put_record(store, 1, **(owner_fields() | owner if is_here else owner))
    publish(sender, 3)
    clock.now_s += KEEP_S
    publish(sender, 4)
    assert (store / "B" / old).exists() == (not is_here)


def do_nothing(connection: Connection) -> None:
    """A process that ends."""


def begin_a_version_and_die(connection: Connection, store: Path) -> None:
    os.environ["DBUFFER_MOUNT"] = "network"
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1, 2)
        sender._writer.claim(sender._writer.version(3))
        die()


def test_half_a_version_makes_room_for_the_next_one_at_once(store, clock):
    """No reader has looked for it."""
    with Child(begin_a_version_and_die, store) as child:
        assert child.wait() == -signal.SIGKILL
    [half] = {path for path in version_files(store) if not path.stat().st_size}
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 3)
    assert half not in version_files(store)


def grow_older(store: Path, age_s: float) -> None:
    """Let all that is there have been written so much earlier."""
    for path in (*store.glob("[AB]/*"), *store.glob("deltas/*"), store / "writer.json"):
        found = path.stat()
        os.utime(path, (found.st_atime - age_s, found.st_mtime - age_s))


def test_writers_that_die_again_and_again_leave_little(store):
    """A file's age is its own: it does not begin anew with each writer that lives for a moment."""
    left = []
    for _ in range(6):
        with Child(publish_five_and_die, store) as child:
            assert child.wait() == -signal.SIGKILL
        left.append(len(files_in(store)))
        # The life of one writer, by the filesystem's clock.
        grow_older(store, KEEP_S / 2)
    assert max(left[2:]) <= left[1] + 5, left
    assert newest(store) == 30


def test_writers_that_live_for_a_moment_leave_little_with_deltas_too(store):
    """No file tells when a manifest named another one last: it counts from the last publish."""
    left = []
    for version in range(1, 31, 5):
        with dbuffer.WeightSender(store, num_threads=1, delta=True) as sender:
            publish(sender, *range(version, version + 5), pattern=SPARSE)
        left.append(len(version_files(store) - named_files(store)))
        grow_older(store, 2 * KEEP_S)
    assert max(left[2:]) <= left[1], left


def test_half_a_version_of_a_dead_writer_counts_from_when_it_was_dropped(store, clock, monkeypatch):
    """By the next file in its buffer, in as many parts as that has."""
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1, 2)
    for buffer in ("A", "B"):
        for part in ("", ".r0", ".r1"):
            (store / buffer / f"weights-0123456789abcdef-9{part}.td").write_bytes(b"old")
    grow_older(store, 1000.0)
    # By its whole name: a run that began a file of the store may begin with the same digits.
    for number, path in enumerate(sorted(store.glob("?/weights-0123456789abcdef-9*"))):
        written_at = path.stat().st_mtime - 100.0 + number
        os.utime(path, (written_at, written_at))
    noted: dict[Path, float] = {}
    ages_s = Retention._ages_s
    monkeypatch.setattr(Retention, "_ages_s", lambda *of: noted.update(ages_s(*of)) or noted)
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        assert 990 < noted[store / "A" / "weights-0123456789abcdef-9.td"] < 1090
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
