"""Receivers of engines, and senders that wait for engines.

Engines are stand-ins, in other processes and in this one. What vLLM's engines make of them:
`tests/integrations/torchrl/test_vllm.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.engine.follower import Follower
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.integrations.torchrl import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightReceiver,
    VLLMWeightSyncScheme,
    vllm_collective,
    vllm_double_buffer,
)
from dbuffer.receive.stager import Stager
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.engines import FakeEngine
from dbuffer.testing.waiting import until
from tests.support.children import Child
from tests.support.light_engines import WAIT_S, options
from tests.support.patterns import SMALL
from tests.support.waiting import Gate

pytestmark = pytest.mark.usefixtures("frameworks_preloaded")

SOON_S = 0.1


def scheme_of(store: Path, **more: Any) -> VLLMWeightSyncScheme:
    settings = {"timeout_s": WAIT_S, "poll_interval_s": 0.05} | more
    return VLLMWeightSyncScheme(remote_addr=store, **settings)


def take_light_engines(replace: Callable[..., None] = setattr) -> None:
    replace(vllm_double_buffer, "vllm_engine_of", lambda engine: engine)
    for module in (vllm_double_buffer, vllm_collective):
        replace(module, "engine_in", lambda engine: engine)


def follow(connection: Connection, store: Path, name: str) -> None:
    take_light_engines()
    engine = FakeEngine(instance_id=name)
    if name == "slow":
        engine.rank.on_load = lambda: time.sleep(0.2)
    receiver = VLLMWeightReceiver(scheme_of(store), engine)
    connection.send("following")
    connection.recv()
    receiver.shutdown()
    connection.send("left")


def test_update_returns_when_all_replicas_have_the_weights(mount, tmp_path):
    store = tmp_path / "store"
    sender = scheme_of(store, num_replicas=2).create_sender()
    weights = SMALL.weights(1)
    with Child(follow, store, "slow") as one, Child(follow, store, "quick") as other:
        assert [one.receive(), other.receive()] == ["following"] * 2
        sender.update_weights(weights)  # nothing is waited for yet
        sender.init_all_workers_group({"weight": (torch.float32, torch.Size([2]))})
        for version in (2, 3):
            sender.update_weights(weights)
            engines = [r for r in DoubleBuffer(store).receivers() if r.receiver == "engine"]
            assert [record.applied_version for record in engines] == [version] * 2
        one.send()
        assert one.receive() == "left"
    sender.shutdown()
    sender = scheme_of(store, timeout_s=SOON_S).create_sender()
    sender.init_all_workers_group({})
    with pytest.raises(dbuffer.WaitTimeoutError, match="0 of 1 receivers applied version 4"):
        sender.update_weights(weights)
    sender.shutdown()


# With engines of this process.


@pytest.fixture
def light_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    take_light_engines(monkeypatch.setattr)


@pytest.mark.parametrize("scheme_class", [VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme])
def test_poll_that_waits_ends_when_its_receiver_is_shut_down(light_engines, tmp_path, scheme_class):
    engine, store = FakeEngine(), tmp_path / "light"
    with dbuffer.WeightSender(store) as sender, ThreadPoolExecutor(1) as pool:
        sender.send(SMALL.weights(1))
        receiver = scheme_class(remote_addr=store).create_receiver(engine)
        until("it is served", lambda: receiver.poll_and_apply(0) or engine.version == 1, WAIT_S)
        polling = pool.submit(receiver.poll_and_apply, WAIT_S)
        time.sleep(SOON_S)  # it waits
        started = time.monotonic()
        receiver.shutdown()
        for poll in (polling.result, receiver.poll_and_apply):
            with pytest.raises(dbuffer.ClosedError, match="this receiver was shut down"):
                poll(WAIT_S)
        assert time.monotonic() - started < WAIT_S / 2
        assert engine.endpoint.receiver is None, "the engine follows on"
    assert engine.serves == (1, "1")


@pytest.mark.parametrize("scheme_class", [VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme])
def test_names_of_older_documents(light_engines, tmp_path, scheme_class):
    """A worker registers its engine by a path in its collector, and the way to its weights."""
    first, second = FakeEngine(), FakeEngine()
    model = torch.nn.Module()
    trainer, worker = (scheme_class(remote_addr=tmp_path / "light") for _ in range(2))
    trainer.init_on_sender("policy", SimpleNamespace(policy=model))
    trainer.create_transport(object()).close()

    def serve(engine: FakeEngine, value: int) -> None:
        trainer.get_sender().update_weights(SMALL.weights(value))
        until("it is served", lambda: receiver.receive() or engine.version == value, WAIT_S)

    worker.init_on_worker("policy", SimpleNamespace(policy=first))
    receiver = worker.get_receiver()
    serve(first, 1)
    receiver.set_context(SimpleNamespace(inner=SimpleNamespace(policy=second)))
    receiver.register_model("inner.policy")
    receiver.register_worker_transport(object())
    serve(second, 2)
    assert first.serves == (1, "1"), "the engine before is updated no longer"
    with pytest.raises(dbuffer.OptionError, match="policy"):
        receiver.register_model("policy")
    receiver.register_model(first)
    serve(first, 3)
    receiver.shutdown()
    worker.shutdown()
    trainer.shutdown()


@pytest.mark.parametrize("comes_late", [False, True])
def test_the_address_that_has_weights_is_followed(light_engines, tmp_path, comes_late):
    """Another host knows the store by another name, or sees it later."""
    engine, there, empty = FakeEngine(), tmp_path / "there", tmp_path / "empty"
    empty.mkdir()
    with dbuffer.WeightSender(there / "store") as sender:
        sender.send(SMALL.weights(1))
        local = empty / "memory" if comes_late else there / "store"
        receiver = VLLMDoubleBufferSyncScheme(empty / "store", local).create_receiver(engine)
        if comes_late:
            assert receiver.poll_and_apply(0) is False
            (empty / "store").symlink_to(there / "store")
        assert receiver.poll_and_apply(WAIT_S) is True
        assert engine.serves == (1, "1")
        assert (empty / "memory").exists() == comes_late, "a mirror, if both are there"
        receiver.shutdown()


@contextlib.contextmanager
def shutting_down_in_a_poll(
    engine: FakeEngine, store: Path, gate: Gate
) -> Iterator[tuple[Future[bool], Future[None]]]:
    """A poll that is held up at a gate, and the shutdown that has begun meanwhile."""
    receiver = VLLMDoubleBufferSyncScheme(store).create_receiver(engine)
    with dbuffer.WeightSender(store) as sender, ThreadPoolExecutor(2) as pool:
        sender.send(SMALL.weights(1))
        polling = pool.submit(receiver.poll_and_apply, WAIT_S)
        assert gate.is_there.wait(WAIT_S)
        try:
            yield polling, pool.submit(receiver.shutdown)
        finally:
            gate.may_go_on.set()


def test_shutdown_ends_a_poll_whose_version_is_being_staged(light_engines, tmp_path, monkeypatch):
    engine, store = FakeEngine(), tmp_path / "light"
    gate, stage = Gate(), Stager._stage

    def stage_slowly(stager: Stager, *arguments: Any, **more: Any) -> None:
        gate.hold_up(WAIT_S)
        stage(stager, *arguments, **more)

    monkeypatch.setattr(Stager, "_stage", stage_slowly)
    with shutting_down_in_a_poll(engine, store, gate) as (polling, closing):
        with pytest.raises(dbuffer.ClosedError, match="following was stopped"):
            polling.result(WAIT_S)
        gate.may_go_on.set()
        closing.result(WAIT_S)
    assert engine.version == 0


def test_shutdown_waits_for_a_switch_that_is_under_way(light_engines, tmp_path):
    engine, store, gate = FakeEngine(), tmp_path / "light", Gate()
    engine.rank.on_load = lambda: gate.hold_up(WAIT_S)
    with shutting_down_in_a_poll(engine, store, gate) as (polling, closing):
        time.sleep(SOON_S)
        assert not closing.done()
        gate.may_go_on.set()
        closing.result(WAIT_S)
        assert polling.result(WAIT_S) is True
    assert engine.serves == (1, "1")
    assert engine.endpoint.receiver is None, "the engine follows on"


def test_the_worst_error_of_several_engines_is_raised(tmp_path, monkeypatch):
    store = tmp_path / "light"
    monkeypatch.setattr(vllm_double_buffer, "followers_of", lambda followers, _: followers)
    engines = [FakeEngine(instance_id=name) for name in ("busy", "broken", "well")]
    followers = [Follower(one, options(store, one.rank.instance_id)) for one in engines]
    for follower in followers:
        follower.start()
    engines[0].error = lambda: dbuffer.EngineBusyError("it is generating")
    engines[1].rank.failing_loads = 100
    receiver = VLLMDoubleBufferSyncScheme(store).create_receiver(followers)
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        with pytest.raises(dbuffer.EngineBrokenError, match="it is generating; half-loaded"):
            receiver.poll_and_apply()
    assert engines[2].version == 1
    receiver.shutdown()


class WithoutValueHead(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        unused = LoadTrace({}, frozenset(SMALL.names), unused=("value_head",))
        self.rank.make_check = lambda: lambda *_: unused  # type: ignore[method-assign]


@pytest.mark.parametrize("treatment", ["warn", "refuse"])
def test_metadata_may_name_unused_tensors_before_the_first_version(
    light_engines, tmp_path, treatment
):
    scheme = scheme_of(tmp_path / "light", unused_tensors=treatment)
    receiver = scheme.create_receiver(WithoutValueHead())
    refused = pytest.raises(dbuffer.WeightsMismatchError)
    with contextlib.nullcontext() if treatment == "warn" else refused:
        receiver.init_all_workers_group({"value_head": (torch.float32, torch.Size([3]))})
    receiver.shutdown()
