"""Acknowledgements on their way from a mirror's readers to the sender, through all mirrors."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import dbuffer
from dbuffer.format.lineage import Lineage
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.mirror.mirror import Mirror
from dbuffer.mirror.records import RELAY_S, AcknowledgementRelay, StoreRecords
from dbuffer.runtime.timing import TIMING
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import RecordFile
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child
from tests.support.patterns import SMALL, newest
from tests.support.stores import applied
from tests.support.waiting import Gate

POLL_S = 0.05


@pytest.fixture
def stores(remote: Path, local: Path) -> tuple[DoubleBuffer, DoubleBuffer]:
    """The local store and the remote one, which have a version."""
    for store in (remote, local):
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(1))
    return DoubleBuffer(local), DoubleBuffer(remote)


@pytest.fixture
def relay(stores: tuple[DoubleBuffer, DoubleBuffer]) -> Iterator[AcknowledgementRelay]:
    """Between the two."""
    relay = AcknowledgementRelay(stores[0], StoreRecords(stores[1].root))
    yield relay
    relay.close()


def record_of(store: Path, name: str = "rank") -> ReceiverRecord | None:
    return DoubleBuffer(store).receiver(name)


def relayed(store: Path) -> ReceiverRecord:
    """Wait for the record of the rank."""
    record: ReceiverRecord = until("it is relayed", lambda: record_of(store))
    return record


def mirrored(remote: Path, local: Path) -> Mirror:
    return Mirror(remote, local, poll_interval_s=POLL_S, num_threads=1).start()


def load_each(connection: Connection, store: Path, name: str) -> None:
    """A rank: load each version that is asked for, and say so."""
    target = SMALL.empty()
    with dbuffer.WeightReceiver(store, receiver_id=name) as receiver:
        while (version := connection.recv()) is not None:
            assert receiver.wait_for_version(version - 1, TIMEOUT_S) == version
            assert receiver.load_into(target) == version == SMALL.version_of(target)
            connection.send(version)


def test_a_sender_hears_of_readers_three_mirrors_away(shm_path):
    """A reader's death is heard of as well."""
    stores = [shm_path / name for name in ("first", "second", "third", "fourth")]
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(dbuffer.WeightSender(stores[0], checksum=True))
        sender.send(SMALL.weights(1))
        for pair in itertools.pairwise(stores):
            stack.enter_context(mirrored(*pair))
        readers = {
            name: stack.enter_context(Child(load_each, store, name))
            for name, store in (("near", stores[1]), ("far", stores[3]))
        }
        for version in (1, 2, 3):
            if version > 1:
                sender.send(SMALL.weights(version), metadata={"step": version})
                with pytest.raises(dbuffer.WaitTimeoutError):
                    sender.wait_applied(version, receivers=["far"], timeout_s=0)
            for reader in readers.values():
                reader.send(version)
            for reader in readers.values():
                assert reader.receive() == version
            for receivers in (["near", "far"], 2):
                sender.wait_applied(version, receivers=receivers, timeout_s=TIMEOUT_S)
            metadata = {"step": version} if version > 1 else {}
            assert record_of(stores[0], "far").metadata == metadata
            assert newest(stores[3], verify=True) == version
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(version, receivers=["near", "far", "nobody"], timeout_s=0)
            views = map(DoubleBuffer, stores)
            assert len({view.pointer().id for view in views}) == 1
        readers["near"].kill()
        sender.send(SMALL.weights(4))
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"near .*\b3\b"):
            sender.wait_applied(4, receivers=["near"], timeout_s=TIMEOUT_S)


def acknowledge_and_end(connection: Connection, store: Path, first: Lineage) -> None:
    record = RecordFile(store, "rank")
    record.write(applied=first.id, runs=first.runs)
    connection.send("come")
    second = connection.recv()
    record.write(applied=second.id, runs=second.runs)
    os._exit(0)  # dbuffer's own end would wait for nobody either


@pytest.mark.timing(last_word_s=0.2)
def test_the_last_word_of_a_reader_comes_before_its_end(relay, remote, local):
    """However late the mirror is with it: the sender waits for it, and not only for a while."""
    first = DoubleBuffer(remote).pointer().lineage
    with (
        dbuffer.WeightSender(remote) as sender,
        Child(acknowledge_and_end, local, first) as reader,
    ):
        assert reader.receive() == "come"
        assert (relayed(remote).is_relayed, relayed(remote).has_ended) == (True, False)
        gate = Gate()
        receivers = relay._reader.receivers

        def read_and_wait() -> list[ReceiverRecord]:
            found = receivers()
            gate.hold_up(TIMEOUT_S)
            return found

        relay._reader.receivers = read_and_wait
        assert gate.is_there.wait(TIMEOUT_S)  # and what it has read says version 1
        sender.send(SMALL.weights(2))
        reader.send(DoubleBuffer(remote).pointer().lineage)
        assert reader.wait() == 0
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(2, receivers=["rank"], timeout_s=TIMING.last_word_s + 0.5)
        gate.may_go_on.set()
        sender.wait_applied(2, receivers=["rank"], timeout_s=TIMEOUT_S)
        until("its end is told", lambda: record_of(remote).has_ended)
        assert record_of(remote).applied_version == 2
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"\b2\b"):
            sender.wait_applied(3, receivers=["rank"], timeout_s=TIMEOUT_S)


def acknowledge_and_stay(connection: Connection, store: Path, first: Lineage) -> None:
    RecordFile(store, "rank").write(applied=first.id, runs=first.runs)
    connection.send("come")
    connection.recv()


@pytest.mark.timing(last_word_s=0.2)
def test_a_sender_that_began_later_hears_of_the_end_of_a_reader(relay, remote, local):
    first = DoubleBuffer(remote).pointer().lineage
    with Child(acknowledge_and_stay, local, first) as reader:
        assert reader.receive() == "come"
        relayed(remote)
        with dbuffer.WeightSender(remote) as sender:
            reader.kill()
            sender.send(SMALL.weights(2))
            with pytest.raises(dbuffer.ReceiverFailedError, match=r"\b1\b"):
                sender.wait_applied(2, receivers=["rank"], timeout_s=TIMEOUT_S)


def test_what_concerns_the_sender_is_relayed(relay, remote, local):
    """A version that is held in the mirror keeps no file of the remote store."""
    (local / RECEIVERS_DIRECTORY / "broken.json").write_text("{")  # holds up no other
    record = RecordFile(local, "rank")
    record.write(**applied(1), held=applied(1)["applied"], stats={"loads": 1.0}, part_of="engine")
    there = relayed(remote)
    assert (there.held, there.stats) == (None, {})
    assert (there.applied_version, there.part_of) == (1, "engine")
    assert (there.host, there.pid) == (record.current.host, record.current.pid)
    with dbuffer.WeightSender(remote) as sender:
        second = sender.send(SMALL.weights(2)).id
        record.write(part_of=None, problem="out of memory", problem_version=second)
        until("its problem is relayed", lambda: record_of(remote).problem)
        with pytest.raises(dbuffer.ReceiverFailedError, match="out of memory"):
            sender.wait_applied(2, receivers=["rank"], timeout_s=TIMEOUT_S)
    record.remove()
    until("it has gone", lambda: record_of(remote) is None)


def test_what_has_not_changed_is_not_written_again(relay, remote, local):
    """Over a network, a record that is replaced costs every reader of it a look."""
    record = RecordFile(local, "rank")
    record.write(**applied(1))
    path = DoubleBuffer(remote).record_path("rank", record.current.token)
    until("it is relayed", path.exists)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    for loads, held in enumerate((record.current.applied, None) * 2):
        record.write(held=held, stats={"loads": float(loads)})
        time.sleep(2 * RELAY_S)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    record.write(**applied(2))
    until("it is relayed", lambda: record_of(remote).applied_version == 2)


def test_the_last_word_is_relayed_when_it_is_closed(relay, remote, local):
    record = RecordFile(local, "rank")
    for version in range(1, 20):
        record.write(**applied(version))
    relay.close()
    assert record_of(remote).applied_version == 19
    assert not [thread for thread in threading.enumerate() if "relay" in thread.name]


def test_a_remote_store_that_is_away_is_told_of_once_and_tried_again(relay, remote, local, caplog):
    receivers = remote / RECEIVERS_DIRECTORY
    receivers.rename(remote / "away")
    record = RecordFile(local, "rank")
    record.write(**applied(1))
    time.sleep(3 * RELAY_S)
    (remote / "away").rename(receivers)
    relayed(remote)
    assert str(remote) not in caplog.text
    # A directory where the record should be: what cannot be replaced.
    record.remove()
    until("it has gone", lambda: record_of(remote) is None)
    (receivers / record.path.name).mkdir()
    record.write(**applied(2))
    until("it is told", lambda: str(remote) in caplog.text)
    time.sleep(3 * RELAY_S)
    [line] = [message for message in caplog.messages if str(remote) in message]
    assert "cannot relay acknowledgements to" in line
    (receivers / record.path.name).rmdir()
    relayed(remote)


def test_a_mirror_that_is_killed_and_started_again_carries_on(remote, local):
    with dbuffer.WeightSender(remote) as sender:
        sender.send(SMALL.weights(1))
        with Child(mirror_for_ever, remote, local) as mirror:
            mirror.receive()
            mirror.kill()
        with Child(load_each, local, "rank") as reader:
            reader.send(1)
            assert reader.receive() == 1
            assert record_of(remote) is None
            with mirrored(remote, local):  # there is nothing new to copy
                sender.wait_applied(1, receivers=["rank"], timeout_s=TIMEOUT_S)


def mirror_for_ever(connection: Connection, remote: Path, local: Path) -> None:
    with mirrored(remote, local) as mirror:
        mirror.wait_until_current(TIMEOUT_S)
        connection.send("current")
        connection.recv()
