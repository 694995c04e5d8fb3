"""`WeightReceiver`: waiting, snapshots, loading again, following, acknowledging, closing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import ReceiverRecord, decode
from dbuffer.integrations.peft import save_adapter
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.status import read_status
from tests.support.children import Child
from tests.support.damage import flip_bit, weights_file
from tests.support.patterns import OTHER, SMALL
from tests.support.stores import begin_watching, open_files, removed_but_mapped
from tests.support.waiting import meanwhile

SOON_S = 20.0
"""Bound on a busy machine; what it bounds would otherwise take 30 s or more."""


def weights_of(value: float, numel: int = 1000) -> dict[str, torch.Tensor]:
    return {name: torch.full((numel,), float(value)) for name in ("a", "b", "c")}


def values_in(tensors) -> set[float]:
    return {value for tensor in tensors.values() for value in tensor.unique().tolist()}


@pytest.fixture
def sender(store):
    with dbuffer.WeightSender(store, reader_timeout_s=0.05) as sender:
        yield sender


@pytest.fixture
def receiver(store):
    with dbuffer.WeightReceiver(store, receiver_id="me", poll_interval_s=0.05) as receiver:
        yield receiver


@contextlib.contextmanager
def soon():
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_S


def is_applied(sender, version, receivers: Any = 1) -> bool:
    try:
        sender.wait_applied(version, receivers=receivers, timeout_s=0)
    except dbuffer.WaitTimeoutError:
        return False
    return True


def record_of(store: Path, name: str = "me") -> ReceiverRecord:
    [path] = (store / "receivers").glob(f"{name}.*.json")
    return decode(ReceiverRecord, path.read_bytes())


READS = (
    lambda receiver, target: receiver.load_into(target),
    lambda receiver, _: receiver.load_into(list),
    lambda receiver, _: receiver.open(timeout_s=0).__enter__(),
)
USES = (
    *READS,
    lambda receiver, _: receiver.open(version=1, timeout_s=0).__enter__(),
    lambda receiver, _: receiver.wait_for_version(timeout_s=0),
    lambda receiver, _: receiver.wait_for_version(1, timeout_s=0),
    lambda receiver, _: next(receiver.follow()),
)


def require_refused(receiver, error, match=None, uses=USES):
    target = weights_of(0)
    for use in uses:
        with pytest.raises(error, match=match):
            use(receiver, target)
    assert values_in(target) == {0.0}


class TestWaiting:
    def test_for_any_version_or_a_newer_one(self, sender, receiver):
        assert receiver.wait_for_version(timeout_s=0) is None
        sender.send(weights_of(1), version=7)
        with soon():
            for newer_than in (None, 6):
                assert receiver.wait_for_version(newer_than, timeout_s=0) == 7
                with receiver.open(newer_than, timeout_s=0) as snapshot:
                    assert snapshot.version == 7
            assert receiver.wait_for_version(7, timeout_s=0.05) is None
            with meanwhile(sender.send, weights_of(2)):
                assert receiver.wait_for_version(7, timeout_s=60) == 8
            with meanwhile(sender.send, weights_of(3)), receiver.open(8) as snapshot:
                assert values_in(snapshot.tensors) == {3.0}

    def test_ends_after_the_time_out(self, sender, receiver, store):
        for newer_than in (None, 5, 6):
            started = time.monotonic()
            missing = rf"{newer_than or 'no version'} .*0\.2 s in {re.escape(str(store))}"
            with pytest.raises(dbuffer.WaitTimeoutError, match=missing):
                receiver.open(newer_than, timeout_s=0.2).__enter__()
            assert 0.2 <= time.monotonic() - started < SOON_S
            if newer_than is None:
                sender.send(weights_of(1), version=5)

    def test_before_there_is_a_store(self, tmp_path):
        store = tmp_path / "later" / "store"
        senders = []

        def publish():
            senders.append(dbuffer.WeightSender(store))
            senders[0].send(weights_of(1))

        with dbuffer.WeightReceiver(store, poll_interval_s=0.05) as receiver:
            with pytest.raises(dbuffer.WaitTimeoutError), receiver.open(timeout_s=0.1):
                pass
            assert receiver.load_into({}) is None
            assert receiver.wait_for_version(timeout_s=0) is None
            assert not store.exists()
            with meanwhile(publish), receiver.open(timeout_s=60) as snapshot:
                assert snapshot.version == 1
        senders[0].close()

    def test_a_stop_event_or_closing_ends_it(self, sender, store):
        stop = threading.Event()
        with dbuffer.WeightReceiver(store, poll_interval_s=30) as receiver, soon():
            with meanwhile(stop.set):
                assert receiver.wait_for_version(timeout_s=None, stop_event=stop) is None
            with (
                meanwhile(receiver.close),
                pytest.raises(dbuffer.ClosedError),
                receiver.open(timeout_s=30),
            ):
                pass


class TestSnapshots:
    def test_hold_what_was_sent_in_mapped_memory(self, sender, receiver, store):
        sender.send(weights_of(3), metadata={"step": 3})
        with receiver.open() as snapshot:
            assert (snapshot.version, snapshot.metadata) == (1, {"step": 3})
            assert "version=1" in repr(snapshot)
            tensors = snapshot.tensors
            assert "3 tensors" in repr(tensors)
            assert (list(tensors), len(tensors)) == (["a", "b", "c"], 3)
            assert "a" in tensors
            assert tensors.get("x") is None
            with pytest.raises(KeyError):
                tensors["x"]
            with pytest.raises(TypeError):
                tensors["a"] = torch.ones(1)
            pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            [file] = {self.file_at(pointer) for pointer in pointers.values()}
            assert Path(file).parent.parent == store
            assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == pointers
            tensordict = snapshot.tensordict
            assert {name: tensordict[name].data_ptr() for name in tensordict.keys()} == pointers  # noqa: SIM118

    @staticmethod
    def file_at(address: int) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if start <= address < end:
                return line.split(maxsplit=5)[5]
        raise AssertionError("not mapped")

    def test_are_ones_own_to_write_into(self, sender, receiver, store):
        sender.send(weights_of(1))
        files = {path: path.read_bytes() for path in store.rglob("*.td")}
        with (
            dbuffer.WeightReceiver(store) as other,
            other.open() as others,
            receiver.open() as mine,
        ):
            mine.tensors["a"].fill_(9)
            mine.tensordict["b"].zero_()
            assert values_in(others.tensors) == {1.0}
            assert mine.tensors["a"][0] == 9
            with receiver.open() as again:
                assert values_in(again.tensors) == {1.0}
            assert {path: path.read_bytes() for path in store.rglob("*.td")} == files
            sender.send(weights_of(2))
            with receiver.open() as newer:
                assert values_in(newer.tensors) == {2.0}
            assert values_in(others.tensors) == {1.0}

    def test_have_aliases_of_their_own(self, sender, receiver):
        tensor = torch.ones(3)
        for _ in range(2):
            sender.send({"a": tensor, "b": tensor})
            with receiver.open() as snapshot:
                assert snapshot.aliases == {"b": "a"}
                snapshot.aliases.clear()


class TestThePointer:
    """It is read once a version: over a network each look costs three round trips."""

    @pytest.fixture
    def looks(self, store, monkeypatch):
        counted: list[Path] = []
        pointer = DoubleBuffer.pointer

        def look(view: DoubleBuffer) -> Any:
            if view.root == store:
                counted.append(view.root)
            return pointer(view)

        monkeypatch.setattr(DoubleBuffer, "pointer", look)
        return counted

    def test_is_read_once_to_open_or_load_and_not_after_a_wait(self, sender, receiver, looks):
        sender.send(weights_of(1))
        looks.clear()
        with receiver.open(timeout_s=1):
            pass
        assert len(looks) == 1
        assert receiver.load_into(weights_of(0)) == 1
        assert len(looks) == 2
        assert receiver.wait_for_version(timeout_s=1) == 1
        with receiver.open_seen(0) as held, receiver.open_seen(1) as none:
            assert (held.manifest.version, none) == (1, None)
        assert len(looks) == 3

    @pytest.mark.parametrize("num_publishes", [1, 2, 3])
    def test_one_that_is_out_of_date_is_read_again(self, sender, receiver, num_publishes):
        sender.send(weights_of(1))
        assert receiver.wait_for_version(timeout_s=1) == 1
        for version in range(2, 2 + num_publishes):
            sender.send(weights_of(version))
        with receiver.open_seen(0) as held:
            # What was seen is still there until its buffer is taken for another version.
            assert held.manifest.version == (1 if num_publishes == 1 else 1 + num_publishes)
            tensors = receiver.reader.read(held)
            assert values_in(dict(zip(tensors.layout.indices, tensors.views, strict=True))) == {
                float(held.manifest.version)
            }


class TestRollingBack:
    @pytest.mark.parametrize("delta", [False, True])
    def test_the_buffer_to_be_written_is_no_source(self, store, delta):
        with (
            dbuffer.WeightSender(store, delta=delta, reader_timeout_s=60) as sender,
            dbuffer.WeightReceiver(store) as receiver,
            soon(),
        ):
            for value in (1, 2, 3):
                sender.send(weights_of(value))
            with receiver.open(version=2) as snapshot:
                for weights in (snapshot.tensors, dict(snapshot.tensors), snapshot.tensordict):
                    with pytest.raises(dbuffer.InvalidWeightsError, match=r"snapshot\.copy\(\)"):
                        sender.send(weights)
                copy = snapshot.copy()
            assert sender.send(copy).version == 4
            with receiver.open() as snapshot:
                assert values_in(snapshot.tensors) == {2.0}
                assert sender.send(snapshot.tensors).version == 5, "the newest is not written to"


class TestAcknowledging:
    def test_what_was_read_or_loaded_and_only_that(self, sender, store):
        with dbuffer.WeightReceiver(store, receiver_id="me", poll_interval_s=30) as receiver:
            target = weights_of(0)
            with soon():
                assert receiver.load_into(target) is None
            sender.send(weights_of(1))
            with receiver.open():
                assert record_of(store).held.number == 1
                assert record_of(store).applied_version is None
                assert not is_applied(sender, 1)
            assert is_applied(sender, 1)
            assert record_of(store).held is None
            assert record_of(store).pid == os.getpid()
            assert receiver.load_into(target) == 1, "what a snapshot showed is loaded all the same"
            assert receiver.load_into(target) is None
            for value in (2, 3):
                sender.send(weights_of(value))
            with pytest.raises(KeyError), receiver.open():
                raise KeyError
            assert record_of(store).applied_version == 1
            assert record_of(store).held is None
            with receiver.open(acknowledge=False):
                pass
            assert not is_applied(sender, 3)
            receiver.acknowledge(3)
            assert is_applied(sender, 3)
            assert receiver.load_into(target) == 3
            assert values_in(target) == {3.0}
        assert is_applied(sender, 3), "after closing"

    def test_with_the_metadata_of_the_version(self, sender, receiver, store):
        def applied() -> tuple[int | None, dict[str, Any]]:
            record = record_of(store)
            return record.applied_version, record.metadata

        sender.send(weights_of(1), metadata={"step": 10})
        with receiver.open() as snapshot:
            assert applied() == (None, {})
            snapshot.metadata["read by"] = object()  # the reader's own, and nothing JSON can hold
        assert applied() == (1, {"step": 10})
        sender.send(weights_of(2), metadata={"step": 20, "loss": [0.5, None]})
        with pytest.raises(KeyError), receiver.open():
            raise KeyError
        assert applied() == (1, {"step": 10})
        receiver.load_into(weights_of(0))
        assert applied() == (2, {"step": 20, "loss": [0.5, None]})
        sender.send(weights_of(3))
        receiver.load_into(weights_of(0))
        assert applied() == (3, {})
        receiver.follow_fork()
        receiver.record.write()
        assert applied() == (None, {})
        # Of long metadata, the step alone; and that only if it is short.
        for step, text_bytes in ((1, 980), (2, 1024), ("s" * 1024, 1)):
            metadata = {"step": step, "text": "x" * text_bytes}
            sender.send(weights_of(1), metadata=metadata)
            receiver.load_into(weights_of(0))
            assert applied()[1] == {1: metadata, 2: {"step": 2}}.get(step, {})

    def test_with_the_metadata_of_what_was_read_or_is_still_there(self, sender, receiver, store):
        for version in (1, 2):
            sender.send(weights_of(version), metadata={"step": 10 * version})
        with receiver.open(version=1, acknowledge=False):
            pass
        for version in (3, 4, 5):
            sender.send(weights_of(version), metadata={"step": 10 * version})
        expected = {1: {"step": 10}, 3: {}, 4: {"step": 40}, 5: {"step": 50}}
        for version, metadata in expected.items():
            receiver.acknowledge(version)
            assert record_of(store).metadata == metadata

    def test_a_name_must_be_plain_and_default_names_differ(self, store):
        plain = ("", ".", "..", ".hidden", "a/b", "../a", "a b", "a\n", "é", "x" * 129, "a\0b")
        for name in plain:
            with pytest.raises(ValueError, match="receiver_id"):
                dbuffer.WeightReceiver(store, receiver_id=name)
        with dbuffer.WeightReceiver(store) as one, dbuffer.WeightReceiver(store) as other:
            assert one.receiver_id != other.receiver_id


async def load_later(pairs):
    dict(pairs)


def load_piecemeal(pairs):
    yield from pairs


class TestFunctions:
    @pytest.mark.parametrize("function", [load_later, load_piecemeal])
    def test_one_that_loads_after_its_call_is_refused(self, store, sender, function):
        sender.send(weights_of(1))
        with dbuffer.WeightReceiver(store) as receiver:
            with pytest.raises(dbuffer.OptionError, match=f"loaded nothing.*{function.__name__}"):
                receiver.load_into(function)
            assert receiver.load_into(dict) == 1

    def test_pairs_end_with_the_call(self, store, sender):
        sender.send(weights_of(1))
        kept = []
        with dbuffer.WeightReceiver(store) as receiver:
            receiver.load_into(kept.append)
        assert list(kept[0]) == []


def load_what_does_not_fit(receiver):
    receiver.load_into({"a": torch.zeros(4)})


def load_by_a_function_that_raises(receiver):
    def load(pairs):
        raise MemoryError("no room on the device")

    receiver.load_into(load)


def raise_in_the_block(receiver):
    with receiver.open() as snapshot:
        torch.nn.Linear(1, 1).load_state_dict(dict(snapshot.tensors))


def read_what_is_damaged(receiver):
    path = next(receiver.store.glob("[AB]/*.td"))
    flip_bit(path, 40)
    with receiver.open():
        pass


def save_an_adapter(receiver):
    save_adapter(receiver, receiver.store.with_name("saved"))


class TestReporting:
    @pytest.mark.parametrize(
        ("fail", "reason"),
        [
            (load_what_does_not_fit, "WeightsMismatchError: .*float32"),
            (load_by_a_function_that_raises, "MemoryError: no room on the device"),
            (raise_in_the_block, "RuntimeError: .*Linear"),
            (read_what_is_damaged, "StoreCorruptError: .*damaged"),
            (save_an_adapter, "WeightsMismatchError: .*not an adapter"),
        ],
    )
    def test_the_sender_learns_why_a_version_was_not_applied(self, store, fail, reason):
        with (
            dbuffer.WeightSender(store, checksum=True) as sender,
            dbuffer.WeightReceiver(store, receiver_id="me", verify=True) as receiver,
        ):
            sender.send(weights_of(1))
            with pytest.raises(Exception, match=reason.partition(": ")[2]):
                fail(receiver)
            with pytest.raises(dbuffer.ReceiverFailedError, match=f"me .* version 1: {reason}"):
                sender.wait_applied(1, receivers="me", timeout_s=60)
            [status] = read_status(DoubleBuffer(store))["receivers"]
            assert re.search(reason, status["problem"])
            sender.send(weights_of(2))
            assert not is_applied(sender, 2, "me")
            with receiver.open():
                pass
            assert is_applied(sender, 2, "me")
            assert record_of(store).problem is None

    def test_a_problem_with_the_store_is_reported_until_it_is_over(self, sender, receiver, store):
        sender.send(weights_of(1))
        receiver.load_into(weights_of(0))
        pointer = (store / "CURRENT").read_bytes()
        (store / "CURRENT").write_bytes(b"{")
        with pytest.raises(dbuffer.StoreCorruptError):
            receiver.load_into(weights_of(0))
        assert "StoreCorruptError" in record_of(store).problem
        (store / "CURRENT").write_bytes(pointer)
        assert receiver.load_into(weights_of(0)) is None
        assert record_of(store).problem is None

    def test_what_is_no_failure_is_not_reported(self, sender, receiver, store):
        sender.send(weights_of(1))
        with pytest.raises(dbuffer.WaitTimeoutError), receiver.open(newer_than=1, timeout_s=0):
            pass
        with pytest.raises(RuntimeError), receiver.open(acknowledge=False) as snapshot:
            raise RuntimeError(snapshot)
        with pytest.raises(dbuffer.SnapshotEvictedError), receiver.open():
            sender.send(weights_of(2))
            sender.send(weights_of(3))
        assert record_of(store).problem is None


class TestFollowing:
    def test_what_was_too_fast_is_skipped(self, sender, receiver):
        sender.send(weights_of(1))
        seen = []
        for snapshot in receiver.follow():
            seen.append(snapshot.version)
            if snapshot.version >= 9:
                break
            # One version more goes to the other buffer: this one stays whole.
            sender.send(weights_of(0), version=snapshot.version + 4)
        assert seen == [1, 5, 9]
        with meanwhile(sender.send, weights_of(2)):
            assert next(receiver.follow(newer_than=9)).version == 10

    def test_a_version_is_held_until_the_next_one_or_the_end(self, store, receiver):
        with dbuffer.WeightSender(store, reader_timeout_s=60) as sender, soon():
            sender.send(weights_of(1))
            snapshots = receiver.follow()
            assert next(snapshots).version == 1
            assert not is_applied(sender, 1)
            sender.send(weights_of(2))
            assert next(snapshots).version == 2
            assert is_applied(sender, 1)
            snapshots.close()
            for value in (3, 4, 5):
                sender.send(weights_of(value))
            assert not is_applied(sender, 2)


class TestVerifying:
    def test_refuses_what_has_no_checksums(self, sender, store):
        sender.send(weights_of(1))
        with dbuffer.WeightReceiver(store, verify=True) as receiver:
            require_refused(receiver, dbuffer.StoreCorruptError, "checksum=True", READS)


class TestKeptLayouts:
    def test_of_both_buffers_are_decoded_once_by_all_that_read(self, mount, store):
        Layout.decode.cache_clear()
        target: dict[str, torch.Tensor] = {}

        def load(pairs):
            target.update((name, tensor.clone()) for name, tensor in pairs)

        with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
            for version in range(1, 7):
                pattern = (SMALL, OTHER)[version % 2]
                sender.send(pattern.weights(version))
                target = pattern.empty()
                if version % 3 == 0:
                    with receiver.open() as snapshot:
                        load(snapshot.tensors.items())
                else:
                    assert receiver.load_into(load if version % 3 == 1 else target) == version
                assert pattern.version_of(target) == version
            sender.send({"third": torch.ones(2)})
            receiver.load_into(list)
        assert Layout.decode.cache_info().misses == 3

    def test_the_files_own_is_checked_all_the_same(self, mount, store):
        with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
            for version in (1, 2):
                sender.send(SMALL.weights(version))
                receiver.load_into(list)
            sender.send(SMALL.weights(3))
            pointer = DoubleBuffer(store).pointer()
            path, manifest = weights_file(store, pointer.buffer)
            flip_bit(path, 8 * (manifest["layout_offset"] + 40))
            with pytest.raises(dbuffer.StoreCorruptError):
                receiver.load_into(list)


class TestStore:
    def test_is_left_as_it_was_by_a_receiver_that_never_reads(self, sender, store):
        sender.send(weights_of(1))
        before = sorted(store.rglob("*"))
        with dbuffer.WeightReceiver(store) as receiver:
            receiver.wait_for_version(timeout_s=0)
        assert sorted(store.rglob("*")) == before

    @pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
    @pytest.mark.parametrize("is_waiting", [False, True], ids=["load", "wait"])
    def test_once_removed_it_takes_up_no_room(self, store, receiver, is_replaced, is_waiting):
        target = weights_of(0)
        with dbuffer.WeightSender(store) as sender:
            for version in (1, 2):
                sender.send(weights_of(version))
                receiver.load_into(target)
        shutil.rmtree(store)
        assert len(removed_but_mapped(store)) == 2
        if is_replaced:
            with dbuffer.WeightSender(store) as sender:
                sender.send(weights_of(1))
        with pytest.raises((dbuffer.StoreNotFoundError, dbuffer.VersionRegressedError)):
            receiver.wait_for_version(2) if is_waiting else receiver.load_into(target)
        assert not removed_but_mapped(store)


class TestLife:
    def test_closed_it_is_of_no_use_and_leaves_no_thread_and_no_file_open(self, sender, store):
        sender.send(weights_of(1))
        begin_watching(store)
        files, threads = open_files("inotify", str(store)), set(threading.enumerate())
        with dbuffer.WeightReceiver(store, num_threads=4) as receiver:
            receiver.wait_for_version(1, timeout_s=0.05)
            receiver.load_into(weights_of(0))
            with receiver.open(), receiver.open():
                assert set(threading.enumerate()) - threads
        receiver.close()  # once more is fine
        assert set(threading.enumerate()) <= threads
        assert open_files("inotify", str(store)) == files
        require_refused(receiver, dbuffer.ClosedError)

    def test_what_ends_after_closing_leaves_the_record_ended(self, sender, receiver, store):
        sender.send(weights_of(1))
        for version in ("1", 1.0, True, 0, 2**63):
            with pytest.raises(dbuffer.OptionError):
                receiver.acknowledge(version)
        followed = receiver.follow()
        next(followed)
        with pytest.raises(KeyError), receiver.open():
            receiver.close()
            raise KeyError
        followed.close()
        with pytest.raises(dbuffer.ClosedError):
            receiver.acknowledge(1)
        assert record_of(store).has_ended
        with pytest.raises(dbuffer.ReceiverFailedError):
            sender.wait_applied(1, receivers="me", timeout_s=60)

    def test_a_fork_closes_nothing_whatever_its_parent_was_doing(self, sender, store):
        sender.send(weights_of(1))
        with Child(fork_while_writing, store) as child:
            assert child.receive() == 0
        assert record_of(store).applied_version == 1


def fork_while_writing(connection: Connection, store: Path) -> None:
    """Fork while the record is locked, as by the heartbeat; let the fork close the receiver."""
    with dbuffer.WeightReceiver(store, receiver_id="me") as receiver:
        receiver.load_into(weights_of(0))
        with receiver.record._lock:
            if (pid := os.fork()) == 0:
                receiver.close()
                receiver.record.close()
                os._exit(0)
        connection.send(os.waitpid(pid, 0)[1])
