"""Versions that are published while the trainer goes on: `send(wait=False)`."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

import dbuffer
from dbuffer.integrations import metrics
from dbuffer.publish import sender as sender_module
from dbuffer.publish.draft import Draft
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.writer import BufferWriter
from dbuffer.testing.waiting import until
from tests.support.children import Child
from tests.support.forks import in_a_fork
from tests.support.patterns import assert_same, received
from tests.support.stores import removed_but_mapped, without_garbage_collection
from tests.support.waiting import Gate

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}


class PublishGate(Gate):
    """Holds up a publish between its bytes being written and its commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.error: Exception | None = None
        fill = Draft.write

        def filled(draft: Draft, *args: Any) -> None:
            fill(draft, *args)
            self.hold_up(60)
            if self.error is not None:
                raise self.error

        monkeypatch.setattr(Draft, "write", filled)

    def open_in(self, delay_s: float) -> None:
        threading.Timer(delay_s, self.may_go_on.set).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishGate]:
    gate = PublishGate(monkeypatch)
    yield gate
    gate.may_go_on.set()


def newest(store: Path) -> int | None:
    pointer = DoubleBuffer(store).pointer()
    return None if pointer is None else pointer.version


def test_it_returns_before_the_version_is_published(gate, sender, store):
    pending = sender.send(WEIGHTS, metadata={"step": 3}, wait=False)
    assert isinstance(pending, dbuffer.PendingPublication)
    assert gate.is_there.wait(60)
    with pytest.raises(dbuffer.WaitTimeoutError, match=r"0\.01 s"):
        pending.wait(0.01)
    assert not pending.is_done
    assert newest(store) is None
    gate.may_go_on.set()
    publication = pending.wait(60)
    assert pending.is_done
    assert (publication.version, publication.num_tensors, publication.num_bytes) == (1, 2, 56)
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert (snapshot.version, snapshot.metadata) == (1, {"step": 3})
        assert all(torch.equal(snapshot.tensors[name], WEIGHTS[name]) for name in WEIGHTS)


def test_weights_that_are_changed_meanwhile_are_not_published(gate, sender, store):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(2, 4)).sum().backward()

    @torch.no_grad()
    def change_a_view() -> None:
        model.get_parameter("weight")[0, 0] += 7

    for version, change in enumerate((optimizer.step, change_a_view), 1):
        gate.may_go_on.set()
        assert sender.send(model).version == version  # as if nothing had been
        before = received(store)
        assert torch.equal(before["bias"], model.bias)
        gate.may_go_on.clear()
        gate.is_there.clear()
        pending = sender.send(model, wait=False)
        assert gate.is_there.wait(60)
        change()
        gate.may_go_on.set()
        with pytest.raises(dbuffer.InvalidWeightsError, match=r"weight|bias"):
            pending.wait()
        assert newest(store) == version
        assert all(torch.equal(received(store)[name], before[name]) for name in before)


def test_a_guarded_optimizer_waits_with_its_step(gate, sender, store):
    """Also where another one wraps it; a forward pass goes on, and may write its buffers."""
    model = nn.Linear(4, 3)
    model.norm = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    guard = sender.guard(SimpleNamespace(optimizer=optimizer))
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pending = sender.send(model, wait=False)
    model.norm(model(torch.rand(2, 4))).square().sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(model.norm.running_mean, sent["norm.running_mean"])
    assert not pending.is_done
    gate.open_in(0.2)
    optimizer.step()
    assert pending.is_done
    assert_same(received(store), sent)
    changed = model.weight.detach().clone()
    assert not torch.equal(changed, sent["weight"])
    gate.error = dbuffer.StoreFullError("no room")
    sender.send(model, wait=False)
    with pytest.raises(dbuffer.StoreFullError, match="no room"):
        optimizer.step()
    assert torch.equal(model.weight, changed), "a failure ends a step before it is taken"
    optimizer.step()  # it was told once
    assert not torch.equal(model.weight, changed)
    guard.remove()
    gate.error = None
    gate.may_go_on.clear()
    pending = sender.send(model, wait=False)
    optimizer.step()  # which nobody guards any more
    gate.may_go_on.set()
    with pytest.raises(dbuffer.InvalidWeightsError):
        pending.wait()


NEXT: dict[str, Callable[[dbuffer.WeightSender, dbuffer.PendingPublication], Any]] = {
    "send": lambda sender, _: sender.send(WEIGHTS),
    "send without waiting": lambda sender, _: sender.send(WEIGHTS, wait=False),
    "close": lambda sender, _: sender.close(),
    "each wait": lambda _, pending: pending.wait(),
}


@pytest.mark.parametrize("action", NEXT)
def test_a_failure_is_raised_by_what_comes_next_or_by_each_wait(action, gate, store):
    sender = dbuffer.WeightSender(store)
    gate.error = dbuffer.StoreFullError("no room")
    pending = sender.send(WEIGHTS, wait=False)
    gate.may_go_on.set()
    for _ in range(2 if action == "each wait" else 1):
        with pytest.raises(dbuffer.StoreFullError, match="no room"):
            NEXT[action](sender, pending)
    gate.error = None
    if action != "close":
        assert sender.send(WEIGHTS).version == 1
    sender.close()
    with dbuffer.WeightSender(store) as another:  # it was let go of
        another.send(WEIGHTS)


def test_versions_come_in_the_order_in_which_they_were_sent(store):
    with dbuffer.WeightSender(store) as sender:
        handles = [sender.send({"a": torch.full((100,), float(n))}, wait=False) for n in range(20)]
        last = sender.send({"a": torch.full((100,), 20.0)})
        assert [handle.wait().version for handle in handles] == list(range(1, 21))
        assert last.version == 21
        assert received(store)["a"][0] == 20
        pending = sender.send(WEIGHTS, wait=False)
    assert pending.is_done, "closing waits"
    assert newest(store) == 22
    with pytest.raises(dbuffer.ClosedError):
        sender.send(WEIGHTS, wait=False)


def test_patches_follow_no_refused_weights_that_waited_for_a_version_before(gate, store):
    with dbuffer.WeightSender(store, delta=True) as sender:
        sender.send(WEIGHTS, wait=False)
        gate.open_in(0.1)
        with pytest.raises(dbuffer.InvalidWeightsError):
            sender.send({"a": object()})
        with pytest.raises(dbuffer.VersionError, match="send all weights"):
            sender.send_patches([])


def at_line(number: int, action: Callable[[FrameType], None]) -> None:
    """Call ``action`` before the ``number``-th line that this thread comes to, of some.

    Those of a sender that begins a thread, and where Python waits for it.
    """
    files = {sender_module.__file__}
    waits = threading.Condition.wait.__code__
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in files and frame.f_code is not waits:
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            action(frame)
        return trace

    sys.settrace(trace)


@pytest.fixture
def switches_in_waits() -> Iterator[None]:
    """Threads switch only where one waits, so that each run comes through the same lines.

    A collection could finalize another test's sender there, and swallow the interruption.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    with without_garbage_collection():
        yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switches_in_waits")
def test_a_send_that_is_interrupted_is_waited_for_if_it_goes_on(gate, store):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    went_on = []

    def interrupt(frame: FrameType) -> None:
        if "saved_state" in frame.f_locals:  # the lock that the thread needs to begin is free
            assert gate.is_there.wait(60)
        raise KeyboardInterrupt

    with dbuffer.WeightSender(store) as sender:
        sender.guard(optimizer)
        for number in itertools.count(1):
            gate.is_there.clear()
            gate.may_go_on.clear()
            sent, before = model.bias.detach().clone(), newest(store)
            at_line(number, interrupt)
            try:
                sender.send(model, wait=False)
            except (KeyboardInterrupt, RuntimeError):  # what Python makes of it in its own locks
                went_on.append(any(not one._future.cancelled() for one in sender._pending))
            else:
                break
            finally:
                sys.settrace(None)
                gate.open_in(0.01)
            model.bias.grad = torch.ones_like(model.bias)
            optimizer.step()
            assert (newest(store) != before) == went_on[-1], "a step was taken in the middle of it"
            if went_on[-1]:
                assert torch.equal(received(store)["bias"], sent)
    assert True in went_on
    assert False in went_on


def test_each_failure_of_several_threads_is_told(gate, store, caplog, monkeypatch):
    """Whichever thread's version is published first, and whoever sends, steps or closes next."""
    gate.error = dbuffer.StoreFullError("no room")
    gate.may_go_on.set()
    with dbuffer.WeightSender(store) as sender:
        ready = threading.Barrier(2)
        settle = sender._settle

        def settle_together() -> None:
            settle()
            ready.wait(60)

        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
            patch.setattr(sender, "_settle", settle_together)
            for _ in range(2):
                pool.submit(sender.send, WEIGHTS, wait=False)
        with pytest.raises(dbuffer.StoreFullError, match="no room"):
            sender.send(WEIGHTS)
        assert "another version that was sent was not published, either: no room" in caplog.text
        gate.error = None
        assert sender.send(WEIGHTS).version == 1


def test_closing_while_others_send_is_a_clear_error(store):
    def send(sender: dbuffer.WeightSender) -> None:
        while True:
            sender.send(WEIGHTS, wait=False)

    for _ in range(20):
        sender = dbuffer.WeightSender(store)
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(send, sender) for _ in range(3)]
            assert sender.send(WEIGHTS).version
            with contextlib.suppress(dbuffer.ClosedError):  # of one that was sent as it was closed
                sender.close()
        assert {type(other.exception()) for other in others} == {dbuffer.ClosedError}


def test_a_handler_on_top_of_a_publish_waits_for_nothing_that_waits_for_it(gate, store):
    """Another thread's version is next, for which the handler's thread holds the lock."""
    sender = dbuffer.WeightSender(store)
    pending = dbuffer.PendingPublication()
    filled = Draft.write

    def publish() -> dbuffer.Publication:
        with sender._publishing():
            raise AssertionError("it was closed before")

    def fill(draft: Draft, *args: Any) -> None:
        sender._pending.append(pending)
        pending.begin(publish)
        with pytest.raises(dbuffer.StoreBusyError):
            sender.send(WEIGHTS)
        sender.close()
        filled(draft, *args)

    gate.may_go_on.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "write", fill)
        assert sender.send(WEIGHTS).version == 1
    with pytest.raises(dbuffer.ClosedError):
        pending.wait(60)
    assert newest(store) == 1


def test_a_forked_child_cannot_wait_for_it(gate, sender):
    pending = sender.send(WEIGHTS, wait=False)
    assert gate.is_there.wait(60)

    def ask_in_child() -> None:
        for ask in (pending.wait, lambda: pending.wait(1), lambda: pending.is_done):
            with pytest.raises(dbuffer.ClosedError):
                ask()

    assert in_a_fork(ask_in_child) == 0
    gate.may_go_on.set()
    assert pending.wait(60).version == 1


def test_what_is_wrong_is_said_at_once(sender, store):
    sender.send(WEIGHTS, version=5)
    lazy = dbuffer.LazyTensor(torch.float32, (2,), lambda: torch.zeros(2))
    for error, message, call in (
        (dbuffer.VersionError, "5", {"version": 5}),
        (dbuffer.InvalidWeightsError, "meta", {"weights": {"a": torch.empty(2, device="meta")}}),
        (dbuffer.InvalidWeightsError, "metadata", {"metadata": {"a": object()}}),
        (dbuffer.OptionError, "wait", {"wait": 1}),
        (dbuffer.OptionError, "iterator", {"weights": iter(WEIGHTS.items())}),
        (dbuffer.OptionError, "lazy", {"weights": {"a": lazy}}),
    ):
        with pytest.raises(error, match=message):
            sender.send(**{"weights": WEIGHTS, "wait": False} | call)
    with pytest.raises(dbuffer.OptionError, match="optimizer"):
        sender.guard(nn.Linear(1, 1))
    assert newest(store) == 5


def test_weights_are_let_go_of_when_they_are_published(sender, store):
    """Also inference tensors, of which nobody counts the writes."""
    with torch.inference_mode():
        weights = {"a": torch.ones(1000)}
    watched = weakref.ref(weights["a"])
    pending = sender.send(weights, wait=False)
    pending.wait()
    del weights
    gc.collect()
    assert watched() is None
    assert pending.is_done
    assert torch.equal(received(store)["a"], torch.ones(1000))


def test_an_error_that_is_not_expected_says_where_it_came_from(gate, sender):
    gate.error = KeyError("the trainer's own trouble")
    gate.may_go_on.set()
    with pytest.raises(KeyError) as caught:
        sender.send(WEIGHTS, wait=False).wait()
    assert "in filled" in caught.value.__notes__[0]


@pytest.mark.parametrize("keep", [0, 2])
def test_a_failed_publish_takes_no_room(gate, store, keep):
    """Python's garbage collector may run much later, or when the trainer calls it."""
    weights = {"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}
    with dbuffer.WeightSender(store, delta=True, keep=keep) as sender, without_garbage_collection():
        for _ in range(3):
            weights["a"][5] += 1
            gate.may_go_on.set()
            sender.send(weights)
            gate.may_go_on.clear()
            pending = sender.send(weights, wait=False)
            weights["a"][5] += 1
            gate.may_go_on.set()
            with pytest.raises(dbuffer.InvalidWeightsError):
                pending.wait()
            del pending
            assert not removed_but_mapped(store)


def test_an_error_that_a_trainer_keeps_takes_no_room(sender, store, monkeypatch):
    sender.send(WEIGHTS)
    with monkeypatch.context() as patch:
        patch.setattr(BufferWriter, "commit", Mock(side_effect=OSError("it fails")))
        with pytest.raises(OSError, match="it fails") as kept:
            sender.send(WEIGHTS)
    assert not removed_but_mapped(store)
    assert kept.value.__traceback__ is not None


def end_without_closing(connection: Connection, store: Path) -> None:
    dbuffer.WeightSender(store).send({"a": torch.ones(1 << 22)}, wait=False)


def test_what_was_sent_last_is_published_though_the_process_ends(store):
    with Child(end_without_closing, store) as child:
        assert child.wait() == 0
    assert torch.equal(received(store)["a"], torch.ones(1 << 22))


def wait_for_the_end_of(pending: dbuffer.PendingPublication) -> None:
    until("it is over", lambda: pending.is_done)


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_failure_that_nothing_raised_is_logged_when_it_is_dropped(gate, store, caplog, is_raised):
    sender = dbuffer.WeightSender(store)
    gate.error = dbuffer.StoreFullError("no room")
    pending = sender.send(WEIGHTS, wait=False)
    gate.may_go_on.set()
    with pytest.raises(dbuffer.StoreFullError) if is_raised else contextlib.nullcontext():
        sender.close() if is_raised else wait_for_the_end_of(pending)
    del sender, pending
    gate.error = None  # it has the calls that it went through, and what these had

    def is_logged() -> bool:
        gc.collect()
        return "not published: no room" in caplog.text

    if is_raised:
        assert not is_logged()
    else:
        until("it is logged", is_logged)


def test_metrics_count_versions_and_deltas_and_how_far_receivers_are_behind(store):
    registry = CollectorRegistry()
    weights = {"weight": torch.zeros(1000)}

    def lag(receiver: str) -> list[float | None]:
        names = [f"dbuffer_receiver_lag_{unit}" for unit in ("versions", "steps")]
        return [registry.get_sample_value(name, {"receiver": receiver}) for name in names]

    with (
        dbuffer.WeightSender(store, delta=True) as sender,
        dbuffer.WeightReceiver(store, receiver_id="slow") as slow,
    ):
        collector = metrics.register(sender, registry)
        with pytest.raises(dbuffer.OptionError, match="unregister"):
            metrics.register(sender, registry)
        registry.unregister(collector)
        metrics.register(sender, registry)
        sender.send(weights, metadata={"step": 100})
        assert lag("slow") == [None, None]
        with slow.open():
            assert lag("slow") == [None, None]
        assert lag("slow") == [0, 0]
        weights["weight"][7] = 1
        published = sender.send(weights, metadata={"step": 120}, wait=False).wait()
        assert published.delta_bytes is not None
        assert sender.send_patches([], metadata={"step": 150}).delta_bytes is not None
        assert lag("slow") == [2, 50]
        slow.close()
        assert lag("slow") == [None, None]
        (store / "CURRENT").write_bytes(b"{")
        names = ("versions", "deltas", "bytes", "delta_bytes", "seconds")
        versions, deltas, num_bytes, delta_bytes, seconds = (
            registry.get_sample_value(f"dbuffer_sender_{name}_total") for name in names
        )
        assert (versions, deltas, num_bytes) == (3, 2, 12_000)
        assert delta_bytes == sender.stats["delta_bytes"] > published.delta_bytes
        assert seconds > 0
