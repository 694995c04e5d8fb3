"""What a receiver says of itself: a small file, replaced whole, and never in the way of weights."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

import dbuffer
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import RecordFile
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child
from tests.support.patterns import SMALL
from tests.support.stores import RUN, applied, fill, small_disk

NOBODY = 65534
FOURTH = VersionId(RUN, 4)


@pytest.fixture
def made(store: Path) -> Path:
    """A store that is there, and holds nothing."""
    dbuffer.WeightSender(store).close()
    return store


def read(store: Path, receiver_id: str = "one") -> ReceiverRecord | None:
    return DoubleBuffer(store).receiver(receiver_id)


def test_a_later_record_has_a_later_time_also_where_the_clock_is_put_back(made, monkeypatch):
    record, times = RecordFile(made, "one"), []
    for seconds in (0.0, -3600.0, -3600.0, 1.0):
        now = time.time() + seconds
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            record.write()
        times.append(read(made).updated_at)
    assert times == sorted(set(times))


def test_a_store_that_is_not_there_yet_gets_the_record_later(store, caplog):
    record = RecordFile(store, "one")
    record.write(**applied(1))
    record.remove()
    assert not store.exists()
    assert str(store) not in caplog.text
    dbuffer.WeightSender(store).close()
    (store / RECEIVERS_DIRECTORY).rmdir()
    record.write()
    assert not (store / RECEIVERS_DIRECTORY).exists()
    (store / RECEIVERS_DIRECTORY).mkdir(mode=0o700)
    record.write()
    assert read(store) == record.current


def use_store_without_permissions(connection: Connection, store: Path) -> None:
    """As an ordinary user: write three times, where it is not allowed, then is, then is not."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: messages.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dbuffer.store.records").addHandler(handler)
    record = RecordFile(store, "one")
    directory = store / RECEIVERS_DIRECTORY
    for mode in (0o500, 0o700, 0o500):
        directory.chmod(mode)
        for version in (1, 2, 3):
            record.write(**applied(version))
    directory.chmod(0o700)
    connection.send((messages, DoubleBuffer(store).receiver("one").applied_version))
    store.chmod(0)  # it cannot even be entered
    record.write()
    record.remove()
    store.chmod(0o700)
    record.write()
    assert DoubleBuffer(store).receivers() == [record.current]
    connection.send([path.name for path in directory.iterdir()])


@pytest.fixture
def owned_by_nobody(shm_path: Path) -> Path:
    """A store of an ordinary user, for root has no read-only directory."""
    directory = shm_path / "other"
    with dbuffer.WeightSender(directory) as sender:
        sender.send(SMALL.weights(1))
    shm_path.chmod(0o711)
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    return directory


def test_a_store_that_cannot_be_written_is_told_once_by_name_and_harms_nobody(owned_by_nobody):
    with Child(use_store_without_permissions, owned_by_nobody) as child:
        messages, applied = child.receive()
        # Once for each time that it stops working.
        assert len(messages) == 2
        for message in messages:
            assert "receiver one cannot acknowledge" in message
            assert str(owned_by_nobody / RECEIVERS_DIRECTORY) in message
        assert applied == 3
        assert len(child.receive()) == 1


def test_threads_that_set_and_write_lose_nothing(made):
    record = RecordFile(made, "one")
    fields = ("held", "staged", "problem_version", "unreadable")

    def count_up(field: str) -> None:
        for number in range(1, 201):
            value = VersionId(RUN, number)
            record.set(**{field: value})
            record.write()
            assert getattr(record.current, field) == value, "another thread has undone it"
            assert getattr(read(made), field) == value, "the write waits behind another thread's"

    with ThreadPoolExecutor(len(fields)) as pool:
        for done in [pool.submit(count_up, field) for field in fields]:
            done.result(timeout=60)
    assert [getattr(record.current, field) for field in fields] == [VersionId(RUN, 200)] * 4
    assert read(made) == record.current
    assert os.listdir(made / RECEIVERS_DIRECTORY) == [record.path.name]  # noqa: PTH208


@pytest.mark.timing(heartbeat_s=0.02)
def test_a_heartbeat_that_hangs_delays_no_change_of_the_record(made, network, monkeypatch):
    """As on a hard mount whose server is away."""
    record, begun, is_back = RecordFile(made, "one"), threading.Event(), threading.Event()
    record.write()

    def hang(*arguments: object) -> None:
        begun.set()
        is_back.wait(TIMEOUT_S)

    monkeypatch.setattr(os, "utime", hang)
    assert begun.wait(TIMEOUT_S)
    change = threading.Thread(target=record.set, kwargs={"staged": FOURTH}, daemon=True)
    change.start()
    change.join(1)
    is_changed = not change.is_alive()
    is_back.set()
    record.close()
    assert is_changed
    assert record.current.staged == FOURTH


@pytest.mark.timing(heartbeat_s=0.02)
def test_without_a_thread_for_heartbeats_the_record_is_written(made, network, monkeypatch, caplog):
    """As at a limit on threads, or when the interpreter ends; a later write begins them."""
    record = RecordFile(made, "one")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no threads")))
        for version in (1, 2):
            record.write(**applied(version))
            assert read(made) == record.current
    assert caplog.text.count("receiver one has no heartbeat, and may count as dead") == 1
    record.write()
    os.utime(record.path, (1, 1))
    until("it is touched", lambda: record.path.stat().st_mtime > 1)
    record.close()


@pytest.mark.timing(heartbeat_s=0.02)
def test_what_could_not_be_written_is_written_when_it_can_be(tmp_path, mount):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        dbuffer.WeightSender(disk / "store").close()
        record = RecordFile(disk / "store", "one")
        record.write(**applied(1))
        filler = fill(disk)
        record.write(**applied(2))
        assert read(disk / "store").applied_version == 1
        filler.unlink()
        until("it is written", lambda: read(disk / "store") == record.current)
        record.close()


def test_a_receiver_with_a_mirrors_form_of_id_is_no_mirror(store, sender):
    sender.send(SMALL.weights(1))
    with dbuffer.WeightReceiver(store, receiver_id="mirror-mine-0123456789abcdef") as receiver:
        with receiver.open():
            pass
        [record] = DoubleBuffer(store).receivers()
    staged = replace(record, staged=VersionId(record.applied.run, 2))
    assert (staged.applied_version, staged.copied) == (1, None)
    assert replace(staged, applied=None).copied == staged.staged
