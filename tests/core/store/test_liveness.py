"""Who may live, and whose name it is: by processes, locks and time, in real PID namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

import dbuffer
from dbuffer.format.manifest import encode
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem, writer
from dbuffer.store.buffer import DoubleBuffer, _file_state
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.liveness import Process
from dbuffer.store.records import OwnRecord, RecordFile
from dbuffer.testing.moments import LOOKS, at_call
from dbuffer.testing.waiting import until
from dbuffer.tools.status import read_status
from tests.support.children import Child
from tests.support.namespaces import Boxed
from tests.support.patterns import SMALL, newest, publish
from tests.support.stores import applied, make_temporaries_old

pytestmark = pytest.mark.timing(last_word_s=0.2)

NAME = "boxed"
SOON_S = 60.0


def load_and_stay(connection: Connection, store: Path, name: str | None = NAME) -> None:
    """Load, say so, and write the record again whenever asked to."""
    with dbuffer.WeightReceiver(store, receiver_id=name) as receiver:
        assert receiver.load_into(SMALL.empty()) is not None
        connection.send(os.getpid())
        while connection.recv():
            receiver.record.write()
            connection.send(None)


def applied_newest(store: Path) -> dict[str, Any]:
    """Return the fields of a record that tell that the newest version is applied."""
    pointer = DoubleBuffer(store).pointer()
    return {"applied": pointer.id, "runs": pointer.runs}


TOKEN = "0123456789abcdef"
"""Token of records that these tests write themselves."""


def path_of(store: Path, name: str = NAME) -> Path:
    [path] = (store / RECEIVERS_DIRECTORY).glob(f"{name}.*.json")
    return path


def is_alive(store: Path) -> bool:
    [found] = [r for r in read_status(DoubleBuffer(store))["receivers"] if r["receiver"] == NAME]
    return found["is_alive"]


def make_old(path: Path, more_s: float = 20.0) -> None:
    """Let its owner have been silent for as long as makes it count as dead, and some more."""
    then = time.time() - TIMING.presumed_dead_after_s - more_s
    os.utime(path, (then, then))


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    """A sender that has published version 1."""
    with dbuffer.WeightSender(store, reader_timeout_s=0.1) as sender:
        publish(sender, 1)
        yield sender


# Processes of other containers


@pytest.mark.parametrize("pid", [None, 1], ids=["a free number", "number 1"])
def test_a_receiver_in_another_container_lives_until_it_ends(store, sender, pid):
    with Boxed(load_and_stay, store, pid=pid) as boxed:
        boxed.receive()
        publish(sender, 2)
        assert is_alive(store)
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(2, receivers=[NAME], timeout_s=0.2)
        boxed.kill()
        assert not is_alive(store)
        with pytest.raises(dbuffer.ReceiverFailedError, match=rf"{NAME} .*\b1\b"):
            sender.wait_applied(2, receivers=[NAME], timeout_s=SOON_S)


def test_a_number_that_another_process_has_by_now_is_dead():
    here = Process.here()
    assert here.started > 0
    assert here.boot
    assert not here.has_ended()
    assert dataclasses.replace(here, started=here.started + 1).has_ended()
    for elsewhere in ({"pid_namespace": 1}, {"boot": "another"}):
        assert not dataclasses.replace(here, pid=2**22 + 1, **elsewhere).has_ended()


def put(store: Path, **changes: Any) -> None:
    record = structs.replace(OwnRecord(NAME).current, **{"token": TOKEN} | changes)
    DoubleBuffer(store).record_path(record.receiver, record.token).write_bytes(encode(record))


@pytest.mark.usefixtures("sender")
def test_two_threads_see_all_records_at_once(store):
    """A trainer waits for receivers while its metrics are read."""
    for number in range(100):
        put(store, receiver=f"r-{number}")
    view = DoubleBuffer(store)
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(lambda _: len(view.receivers()), range(50))) == {100}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("where", [{"boot": "a-b"}, {"pid_namespace": 1}], ids=["host", "box"])
def test_time_says_who_is_dead_elsewhere(store, sender, where):
    put(store, **where)
    assert is_alive(store)
    make_old(path_of(store), more_s=-20)
    assert is_alive(store)
    make_old(path_of(store))
    assert not is_alive(store)
    with pytest.raises(dbuffer.ReceiverFailedError, match=NAME):
        sender.wait_applied(1, receivers=[NAME], timeout_s=SOON_S)


@pytest.mark.parametrize("where", [{"boot": "a-b"}, {"pid_namespace": 1}], ids=["host", "box"])
def test_a_receiver_lives_on_when_the_mirror_that_told_of_it_has_ended(
    store, sender, where, timing
):
    put(store, is_relayed=True, **where)
    with pytest.raises(dbuffer.WaitTimeoutError, match=rf"{NAME} seems dead, and was at"):
        sender.wait_applied(1, receivers=[NAME], timeout_s=1.5 * timing.last_word_s)
    timing.bucket_heartbeat_s = 0.025
    with pytest.raises(dbuffer.ReceiverFailedError, match=NAME):
        sender.wait_applied(1, receivers=[NAME], timeout_s=SOON_S)
    put(store, is_relayed=True, has_ended=True, **where)
    timing.bucket_heartbeat_s = 60.0
    with pytest.raises(dbuffer.ReceiverFailedError, match=NAME):
        sender.wait_applied(1, receivers=[NAME], timeout_s=SOON_S)


@pytest.mark.usefixtures("network", "sender")
@pytest.mark.timing(heartbeat_s=0.02)
def test_an_idle_receiver_touches_its_record_and_writes_it_again(store):
    """Another host that could not see it may have taken it for dead, and removed its record."""
    threads = set(threading.enumerate())
    receiver = dbuffer.WeightReceiver(store, receiver_id=NAME)
    assert receiver.load_into(SMALL.empty()) == 1
    path = path_of(store)
    for _ in range(2):
        make_old(path, more_s=100.0)
        until("it is touched", lambda: time.time() - path.stat().st_mtime < 60)
    path.unlink()
    until("it is there again", lambda: applied_by(store) == [1])
    del receiver  # and nothing is left that could be alive
    until("its thread ends", lambda: set(threading.enumerate()) <= threads)
    make_old(path, more_s=100.0)
    time.sleep(0.2)
    assert time.time() - path.stat().st_mtime > 60


# Several receivers of one id


def applied_by(store: Path) -> list[int | None]:
    """List the versions that the receivers of the name have applied, the last writer's last."""
    return [record.applied_version for record in DoubleBuffer(store).records_of(NAME)]


def test_an_id_has_applied_what_all_living_receivers_of_it_have(store, mount, sender, caplog):
    with Child(load_and_stay, store) as first:
        pid = first.receive()
        publish(sender, 2)
        with dbuffer.WeightReceiver(store, receiver_id=NAME) as second:
            assert second.load_into(SMALL.empty()) == 2
            assert applied_by(store) == [1, 2]
            [entry] = [e for e in caplog.records if "already has a receiver" in e.message]
            assert NAME in entry.message
            assert entry.levelno == logging.WARNING
            receivers = read_status(DoubleBuffer(store))["receivers"]
            assert {(r["receiver"], r["pid"]) for r in receivers} == {
                (NAME, pid),
                (NAME, os.getpid()),
            }
            sender.wait_applied(1, receivers=2, timeout_s=0)
            for receivers in ([NAME], 2):
                with pytest.raises(dbuffer.WaitTimeoutError, match=rf"{NAME} .*\b1\b"):
                    sender.wait_applied(2, receivers=receivers, timeout_s=0.2)
            first.kill()
            sender.wait_applied(2, receivers=[NAME], timeout_s=0)
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(2, receivers=2, timeout_s=0.2)
    # Both have ended: the one that wrote last counts.
    sender.wait_applied(2, receivers=[NAME], timeout_s=0)
    with pytest.raises(dbuffer.ReceiverFailedError, match=rf"{NAME} .*\b2\b"):
        sender.wait_applied(3, receivers=[NAME], timeout_s=SOON_S)


@pytest.mark.parametrize("way", ["closed", "dropped", "killed"])
def test_a_record_of_one_that_has_ended_goes_when_another_comes(store, mount, sender, way):
    if way == "killed":
        with Child(load_and_stay, store) as child:
            child.receive()
            child.kill()
    else:
        receiver = dbuffer.WeightReceiver(store, receiver_id=NAME)
        assert receiver.load_into(SMALL.empty()) == 1
        if way == "closed":
            receiver.close()
            assert not is_alive(store)
        del receiver
    publish(sender, 2)
    with dbuffer.WeightReceiver(store, receiver_id=NAME) as newcomer:
        assert newcomer.load_into(SMALL.empty()) == 2
        assert applied_by(store) == [2]
        sender.wait_applied(2, receivers=[NAME], timeout_s=0)


@pytest.mark.usefixtures("sender")
def test_an_id_that_begins_with_another_is_another_id(store):
    names = (NAME, f"{NAME}.rank-0", f"{NAME}.{TOKEN}")
    records = [RecordFile(store, name) for name in names]
    for version, record in enumerate(records):
        record.write(**applied(version + 1))
    for version, name in enumerate(names):
        assert [r.applied_version for r in DoubleBuffer(store).records_of(name)] == [version + 1]


def test_a_container_that_was_restarted_takes_its_record_away_at_once(store, mount, sender):
    """Its host name and its process id are those of the one before it."""
    with Boxed(load_and_stay, store, pid=1) as first:
        first.receive()
        # Else the second one's namespace may have its number.
        namespace = os.open(f"/proc/{first.boxed_pid}/ns/pid", os.O_RDONLY)
        first.kill()
    publish(sender, 2)
    with Descriptor(namespace), Boxed(load_and_stay, store, pid=1) as second:
        second.receive()
        assert applied_by(store) == [2]
        sender.wait_applied(2, receivers=[NAME], timeout_s=0)


def test_of_two_living_containers_that_are_alike_both_are_waited_for(store, mount, sender):
    with (
        Boxed(load_and_stay, store, pid=1) as first,
        Boxed(load_and_stay, store, pid=1) as second,
    ):
        for boxed in (first, second):
            boxed.receive()
        for boxed in (first, second):
            boxed.send(True)
            boxed.receive()
        assert applied_by(store) == [1, 1]
        sender.wait_applied(1, receivers=2, timeout_s=SOON_S)


@pytest.mark.usefixtures("sender")
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_an_interrupted_write_leaves_nothing_that_is_waited_for(store, mount, is_made_anew):
    """Whichever call it comes before, and whatever it has left open."""
    record = RecordFile(store, NAME)
    interrupts = []
    for number in itertools.count(1):
        try:
            # One in a finalizer is not raised; only a lock that is not closed matters.
            at_call(number, interrupt, LOOKS if mount == "local" else LOOKS - {"close"})
            record.write(**applied(number))
            break
        except KeyboardInterrupt as error:
            interrupts.append(error)  # and with it what its frames have in hand
        finally:
            sys.setprofile(None)
        if is_made_anew:
            record.close()
            record = RecordFile(store, NAME)
        record.write(**applied(number))
        assert applied_by(store) == [number]
    assert len(interrupts) > 2


def interrupt() -> None:
    raise KeyboardInterrupt


def write_when_told(connection: Connection, store: Path, go: Path) -> None:
    record = RecordFile(store, NAME)
    connection.send(None)
    while not go.exists():
        pass
    record.write()
    connection.send(None)
    connection.recv()


@pytest.mark.usefixtures("sender")
def test_several_that_start_at_once_have_a_record_each(store, mount, tmp_path):
    go = tmp_path / "go"
    put(store, started=1)  # a dead one's
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(Child(write_when_told, store, go)) for _ in range(4)]
        for racer in racers:
            racer.receive()
        go.touch()
        for racer in racers:
            racer.receive()
        found = DoubleBuffer(store).records_of(NAME)
        assert {record.pid for record in found} == {racer.pid for racer in racers}


# Many


NUM_RECORDS = 1000


def test_listing_reads_what_has_changed(store, sender, monkeypatch):
    for number in range(NUM_RECORDS):
        put(store, receiver=f"r-{number}")
    for path in (store / RECEIVERS_DIRECTORY).iterdir():
        os.utime(path, (1e9, 1e9))
    time.sleep(1.1)  # a file of this second is not trusted to stay as it is
    reads: list[str] = []
    real = filesystem.open_regular

    def count(path: Path, *args: Any, **options: Any) -> filesystem.Descriptor:
        if path.parent == store / RECEIVERS_DIRECTORY:
            reads.append(path.name)
        return real(path, *args, **options)

    monkeypatch.setattr(filesystem, "open_regular", count)
    for timeout_s, num_reads in ((0, NUM_RECORDS), (0.5, 0)):
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(1, receivers=1, timeout_s=timeout_s)
        assert len(reads) <= num_reads
        reads.clear()
    put(store, receiver="r-77", **applied_newest(store))
    sender.wait_applied(1, receivers=1, timeout_s=SOON_S)
    assert set(reads) == {f"r-77.{TOKEN}.json"}


@pytest.mark.usefixtures("sender")
def test_what_changes_twice_within_a_tick_is_seen(store, monkeypatch):
    monkeypatch.setattr("dbuffer.store.buffer._file_state", state_in_whole_seconds)
    view = DoubleBuffer(store)
    for version in range(100, 400):  # in place: the same inode, the same length
        put(store, **applied(version), updated_at=1.0)
        assert [record.applied_version for record in view.receivers()] == [version]


def state_in_whole_seconds(found: os.stat_result, now: float) -> tuple[int, ...] | None:
    """As on a server that counts in seconds."""
    times = {name: int(getattr(found, name)) for name in ("st_mtime", "st_ctime")}
    times |= {f"{name}_ns": value * 10**9 for name, value in times.items()}
    coarse = {"st_ino": found.st_ino, "st_size": found.st_size}
    return _file_state(SimpleNamespace(**times | coarse), now)  # type: ignore[arg-type]


def test_dead_receivers_with_generated_names_go_while_the_sender_lives(
    store, sender, timing, monkeypatch
):
    monkeypatch.setattr(writer, "_CLEAR_UP_S", 0.0)
    names = lambda: {record.receiver for record in DoubleBuffer(store).receivers()}  # noqa: E731
    with Child(load_and_stay, store, None) as child:
        child.receive()
        [generated] = names()
        child.kill()
    with Child(load_and_stay, store, "named") as child:
        child.receive()
    publish(sender, 2)
    assert names() == {generated, "named"}, "who waits for a version counts those that ended"
    timing.forget_ephemeral_after_s = 0.0
    with dbuffer.WeightReceiver(store) as living:
        assert living.load_into(SMALL.empty()) == 2
        publish(sender, 3)
        assert names() == {living.receiver_id, "named"}


def test_what_a_killed_process_was_writing_goes_while_the_sender_lives(store, sender, monkeypatch):
    monkeypatch.setattr(writer, "_CLEAR_UP_S", 0.0)
    left = [store / "tmp" / f".{name}.{'0' * 16}.tmp" for name in ("CURRENT", "directory")]
    left[0].write_bytes(b"half a record")
    left[1].mkdir()
    (left[1] / "weights").write_bytes(b"second name")
    publish(sender, 2)
    assert all(path.exists() for path in left), "a live process may be about to rename it"
    make_temporaries_old(store)
    publish(sender, 3)
    assert not any(path.exists() for path in left)


def test_records_go_by_the_times_of_their_files(store, sender, timing, monkeypatch):
    """Clocks of their receivers' hosts may be wrong by any time."""
    monkeypatch.setattr(writer, "_CLEAR_UP_S", 0.0)
    ended = {"has_ended": True, "is_ephemeral": True}
    put(store, receiver="behind", updated_at=1.0, **ended)
    put(store, receiver="ahead", updated_at=time.time() + 1e6, **ended)
    put(store, receiver="twice", token="a" * 16, updated_at=time.time() + 1e6, has_ended=True)
    put(store, receiver="twice", updated_at=1.0, has_ended=True)
    then = time.time() - timing.forget_ephemeral_after_s - 60
    for name in ("ahead", f"twice.{'a' * 16}"):
        [path] = (store / RECEIVERS_DIRECTORY).glob(f"{name}*")
        os.utime(path, (then, then))
    publish(sender, 2)
    records = DoubleBuffer(store).receivers()
    assert {(record.receiver, record.token) for record in records} == {
        ("behind", TOKEN),
        ("twice", TOKEN),
    }


def test_a_record_that_others_can_write_to_is_passed_over_and_told_once(store, sender, caplog):
    for name, mode in (("theirs", 0o666), ("ours", 0o600)):
        put(store, receiver=name, **applied_newest(store))
        path_of(store, name).chmod(mode)
    sender.wait_applied(1, receivers=1, timeout_s=SOON_S)
    with pytest.raises(dbuffer.WaitTimeoutError):
        sender.wait_applied(1, receivers=2, timeout_s=0.2)
    publish(sender, 2)
    file = f"theirs.{TOKEN}.json"
    assert len([entry for entry in caplog.records if file in entry.getMessage()]) == 1
    assert newest(store) == 2


def publish_from_container(connection: Connection, store: Path, dies: bool) -> None:
    if dies:
        filesystem._rename = lambda *_: os._exit(1)
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1)
        connection.send(sender.send(SMALL.weights(2)).version)


def test_a_container_that_died_while_it_wrote_publishes_when_it_is_restarted(store):
    """Its sender has the same process id each time."""
    with Boxed(publish_from_container, store, True, pid=1) as boxed:
        boxed.wait()
    assert list(store.rglob("*.tmp"))
    with Boxed(publish_from_container, store, False, pid=1) as boxed:
        assert boxed.receive() == 2
