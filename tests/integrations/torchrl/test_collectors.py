"""TorchRL's collectors on one machine, with a store as their weights' way to the workers.

The first part asks of our scheme what TorchRL's own tests ask of its schemes, under the names that
those tests have there. The second part is about what may go wrong.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import nn

import dbuffer
from dbuffer.format.places import POINTER_FILE
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.writer import BufferWriter
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.integrations.torchrl import parts
from tests.support.children import Child
from tests.support.soak import in_turn, is_soak
from tests.support.stores import begin_watching, remove_store

pytestmark = pytest.mark.usefixtures("frameworks_preloaded")

MULTI_CLASSES = ("MultiSyncCollector", "MultiAsyncCollector")
MULTI = pytest.mark.parametrize("class_name", MULTI_CLASSES)
STRATEGIES = pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])


@pytest.fixture
def collector_class(class_name: str) -> Any:
    return getattr(parts.collectors, class_name)


PATIENCE_S = 0.5
ENOUGH_WEIGHTS = 300 if is_soak() else 30


@pytest.fixture(autouse=True)
def forkserver() -> Iterator[None]:
    """Workers that start in a moment; the tests that say so use TorchRL's default instead."""
    with parts.start_method("forkserver"):
        yield


@pytest.fixture
def address(shm_path: Path) -> Path:
    return shm_path / "weights"


@pytest.fixture
def scheme(address: Path) -> Iterator[parts.DoubleBufferSyncScheme]:
    scheme = parts.DoubleBufferSyncScheme(address)
    yield scheme
    scheme.shutdown()


@pytest.fixture
def policy() -> parts.ConstantPolicy:
    return parts.ConstantPolicy(1.0)


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def update(collector: Any, policy: nn.Module, value: float, **how: Any) -> None:
    fill(policy, value)
    collector.update_policy_weights_(**how)


def weights_of(value: float) -> parts.TensorDict:
    return parts.TensorDict.from_module(parts.ConstantPolicy(value)).data


def states(collector: Any) -> list[float]:
    workers = range(collector.num_workers)
    return [float(parts.worker_state(collector, worker)["weight"]) for worker in workers]


def come_to(collector: Any, value: float) -> None:
    """Wait until all workers act by this number; a batch may begin with an older one."""
    until(
        f"the workers act by {value}",
        lambda: {action for row in parts.actions(collector) for action in row} == {value},
        TIMEOUT_S,
    )


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)


# What TorchRL asks of a scheme.


@MULTI
def test_update_weights(scheme, collector_class):
    """Tied, non-contiguous, frozen, empty, without dimensions; buffers; bfloat16 and others."""
    policy = parts.AwkwardModel(1)
    devices = {"device": ["cpu"] * 3, "storing_device": ["cpu"] * 3}
    with parts.collecting(
        policy, scheme, collector_class=collector_class, num_workers=3, **devices
    ) as collector:
        for seed in (2, 3, 4):
            for worker in range(3):
                parts.assert_same_state(parts.worker_state(collector, worker), policy.state_dict())
            policy.load_state_dict(parts.AwkwardModel(seed).state_dict())
            policy.unsaved.fill_(seed)
            collector.update_policy_weights_(policy if seed == 3 else None)
            if (
                collector_class is parts.collectors.MultiSyncCollector
            ):  # the other may hang after this
                assert parts.acts(collector) == [policy(torch.zeros(())).item()] * 3


def test_workers_read_a_local_copy(address, shm_path, policy):
    """Stores on a network mount are read once a node, by a mirror in one of the workers."""
    local = shm_path / "local"
    scheme = parts.DoubleBufferSyncScheme(address, local, poll_interval_s=0.05)
    with parts.collecting(policy, scheme) as collector:
        for value in (2.0, 3.0):
            update(collector, policy, value)  # returns when both have said so, in their copy
            assert states(collector) == [value, value]
        collector.update_policy_weights_({"weight": torch.tensor(7.0)}, worker_ids=[1])
        assert states(collector) == [3.0, 7.0]
        remote, copy = DoubleBuffer(address / "policy"), DoubleBuffer(local / "policy")
        assert copy.pointer().version == remote.pointer().version
        assert copy.manifest(copy.pointer().buffer).is_copy
        readers = {record.receiver for record in remote.receivers()}
        assert readers >= {"worker-0", "worker-1"}
        assert len([name for name in readers if name.startswith("mirror-")]) == 1


def _bare() -> tuple[nn.Module, dict[str, Any]]:
    """A module that the workers alone wrap (TorchRL's ``test_auto_wrap_modules``)."""
    return parts.BarePolicy(1.0), {}


def _not_picklable() -> tuple[nn.Module, dict[str, Any]]:
    """As in ``test_nonserializable_policy_with_factory_and_weight_sync``."""
    from torchrl.testing import modules

    keys = {"in_keys": ["observation"], "out_keys": ["action"]}
    policy = parts.TensorDictModule(modules.NonSerializableBiasModule(1.0), **keys)
    factory = lambda: parts.TensorDictModule(modules.BiasModule(0.0), **keys)  # noqa: E731
    return policy, {"policy_factory": factory}


def _on_another_device() -> tuple[nn.Module, dict[str, Any]]:
    """As in ``test_weight_update_after_device_cast``: the worker's collector runs a copy.

    To PyTorch ``cpu`` and ``cpu:0`` are two devices, so that it copies here as it does for a GPU.
    """
    return parts.linear_policy(1.0), {"policy_device": "cpu:0"}


@in_turn(("make", "class_name"), [_bare, _not_picklable, _on_another_device], MULTI_CLASSES)
def test_workers_run_another_object_than_the_trainer_has(scheme, collector_class, make):
    policy, options = make()
    with parts.collecting(policy, scheme, collector_class=collector_class, **options) as collector:
        assert (collector.next()["action"] == 1.0).all()
        update(collector, policy, 0.0)
        parts.comes_to(collector, lambda batch: batch["action"].unique().tolist(), [0.0])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"policy_device": "cpu:0"},
        {"policy_device": "cpu:0", "policy_factory": "StatefulPolicy"},
    ],
    ids=["same object", "copy", "copy from a factory"],
)
def test_a_collector_without_workers_acts_by_what_is_sent(scheme, given):
    policy = parts.StatefulPolicy(1.0)
    if "policy_factory" in given:
        given = given | {"policy_factory": getattr(parts, given["policy_factory"])}
    collector = parts.collectors.Collector(
        parts.ProbeEnv,
        None if "policy_factory" in given else policy,
        frames_per_batch=4,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        auto_register_policy_transforms=False,
        **given,
    )
    try:
        fill(policy, 2.0)
        policy.offset = torch.tensor(0.5)
        collector.update_policy_weights_(*([policy] if "policy_factory" in given else []))
        assert collector.next()["action"].unique().tolist() == [2.5]
        collector.update_policy_weights_(parts.StatefulPolicy(3.0, offset=0.25))
        assert collector.next()["action"].unique().tolist() == [3.25]
        with pytest.raises(dbuffer.WeightsMismatchError, match="wieght"):
            collector.update_policy_weights_({"wieght": torch.tensor(4.0)})
        assert collector.next()["action"].unique().tolist() == [3.25]
    finally:
        collector.shutdown()


def _awkward(seed: int, *more: nn.Module) -> nn.Module:
    model = parts.TensorDictModule(parts.AwkwardModel(seed), in_keys=["a"], out_keys=["b"])
    return TensorDictSequential(model, *more) if more else model


@pytest.mark.parametrize("has_extra_state", [False, True])
def test_a_buffer_that_no_state_dict_has_reaches_a_wrapped_model(scheme, has_extra_state):
    """Such as a rotary embedding's. Names are published without a wrapper's ``module.``."""
    more = [parts.StatefulPolicy()] if has_extra_state else []
    model = _awkward(0, *more)
    with following(scheme, model, _awkward(1, *more)):
        [unsaved] = [buffer for name, buffer in model.named_buffers() if "unsaved" in name]
        assert unsaved.item() == 1.0
        scheme.send(_awkward(2, *more))
        assert unsaved.item() == 2.0


def test_weights_for_all_workers_or_for_some(scheme):
    """With distinct factories, as `test_multi_collector_with_distinct_policy_factories`, too."""
    factories = [parts.constant_factory(value) for value in (0.0, 1.0, 2.0)]
    with parts.collecting(None, scheme, policy_factory=factories, num_workers=3) as collector:
        assert parts.acts(collector) == [0.0, 1.0, 2.0]
        for weights, worker_ids, expected in (
            ({0: weights_of(10.0)}, None, [10.0, 1.0, 2.0]),
            ({i: weights_of(100.0 * (i + 1)) for i in range(3)}, None, [100.0, 200.0, 300.0]),
            (weights_of(7.0), None, [7.0, 7.0, 7.0]),
            ({2: weights_of(8.0), 1: weights_of(9.0)}, None, [7.0, 9.0, 8.0]),
            (weights_of(2.0), [1], [7.0, 2.0, 8.0]),
            (weights_of(3.0), 0, [3.0, 2.0, 8.0]),
            (weights_of(4.0), (2, 1, 2), [3.0, 4.0, 4.0]),
            (weights_of(5.0), [], [3.0, 4.0, 4.0]),
        ):
            collector.update_policy_weights_(weights, worker_ids=worker_ids)
            assert parts.acts(collector) == expected
        with pytest.raises(ValueError, match="3"):
            collector.update_policy_weights_(weights_of(6.0), worker_ids=[0, 3])
        assert parts.acts(collector) == [3.0, 4.0, 4.0]


def scheme_of(address: Path, strategy: str) -> parts.DoubleBufferSyncScheme:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "state_dict strategy is experimental")
        return parts.DoubleBufferSyncScheme(address, strategy=strategy)


@STRATEGIES
def test_weights_in_every_form(address, strategy):
    policy = parts.linear_policy(0.0)
    with parts.collecting(policy, scheme_of(address, strategy)) as collector:

        def nested(value: float) -> parts.TensorDict:
            return parts.TensorDict.from_module(parts.linear_policy(value))

        for value, given in enumerate(
            (
                {"policy_or_weights": parts.linear_policy(1.0)},
                {"policy_or_weights": nested(2.0)},
                {"policy_or_weights": nested(3.0).data.lock_()},
                {"policy_or_weights": parts.linear_policy(4.0).state_dict()},
                {"policy_or_weights": dict(nested(5.0).flatten_keys(".").items())},
                {"policy_or_weights": nested(6.0).flatten_keys(".")},
                {"policy": parts.linear_policy(7.0)},
                {"weights": nested(8.0), "model_id": "policy"},
                {"weights_dict": {"policy": nested(9.0)}},
            ),
            start=1,
        ):
            collector.update_policy_weights_(**given)
            assert parts.acts(collector) == [float(value)] * 2, given
        with torch.no_grad():
            policy.module.bias.fill_(10.0)
        collector.update_policy_weights_()
        assert parts.acts(collector) == [10.0, 10.0]


def test_multi_model_updates(address, policy):
    """A policy and a network of the workers' environments; the trainer's collector has no env."""
    value = nn.Linear(1, 1, bias=False)
    schemes = {
        "policy": parts.DoubleBufferSyncScheme(address),
        "env.value_net": parts.DoubleBufferSyncScheme(address),
    }
    with parts.collecting(policy, schemes, env=parts.ValuedEnv) as collector:
        batch = collector.next()
        assert (batch["action"] == 1.0).all()
        assert (batch["next", "reward"] == 0.0).all()
        fill(policy, 2.0)
        fill(value, 5.0)
        collector.update_policy_weights_(weights_dict={"policy": policy, "env.value_net": value})
        batch = collector.next()
        assert (batch["action"] == 2.0).all()
        assert (batch["next", "reward"] == 5.0).all()
        fill(value, 6.0)
        collector.update_policy_weights_(value, model_id="env.value_net", worker_ids=[1])
        assert collector.next()["next", "reward"].mean(dim=(1, 2)).tolist() == [5.0, 6.0]
        with pytest.raises(KeyError, match="critic"):
            collector.update_policy_weights_(value, model_id="critic")
    assert len([path for path in address.iterdir() if "worker" not in path.name]) == 2


@STRATEGIES
def test_extra_state_travels(address, strategy):
    """Of modules inside the policy, too; and in TorchRL's form, or in a state dict's."""
    policy = TensorDictSequential(parts.StatefulPolicy(1.0, offset=0.5))
    inner = policy[0]
    with parts.collecting(policy, scheme_of(address, strategy)) as collector:
        assert parts.acts(collector) == [1.5, 1.5]
        inner.offset, inner.names = torch.tensor(0.25), ["c"]
        collector.update_policy_weights_()
        assert parts.acts(collector) == [1.25, 1.25]
        state = parts.worker_state(collector, 1)
        assert state["module.0._extra_state"]["names"] == ["c"]
        inner.offset = torch.tensor(0.75)
        collector.update_policy_weights_(policy.state_dict())
        assert parts.acts(collector) == [1.75, 1.75]


# Schemes by hand, without a collector on one side or on both.


def begin(scheme: Any, model: nn.Module | None = None, num_workers: int = 1) -> None:
    model = parts.ConstantPolicy(1.0) if model is None else model
    scheme.init_on_sender(model_id="policy", model=model, num_workers=num_workers)


def receiving(scheme: Any, model: nn.Module) -> Any:
    """Return a copy of a scheme, for a worker in this process; it is not connected."""
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    return worker


@contextlib.contextmanager
def following(scheme: Any, model: nn.Module, source: nn.Module | None = None) -> Iterator[Any]:
    """A worker in this process, which is connected and keeps its model on the newest weights."""
    begin(scheme, source)
    worker = receiving(scheme, model)
    scheme.connect()
    worker.connect(worker_idx=0)
    yield worker
    worker.shutdown()


def _follow(
    connection: Connection,
    scheme: parts.DoubleBufferSyncScheme,
    worker_idx: int,
    model: parts.ConstantPolicy | None = None,
) -> None:
    model = model or parts.ConstantPolicy(-5.0)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker_idx)
    scheme.connect(worker_idx=worker_idx)
    connection.send(model.weight.item())
    while connection.recv() is not None:
        connection.send(model.weight.item())
    scheme.shutdown()
    connection.send("down")


def let_go(*workers: Child) -> None:
    for worker in workers:
        worker.send(None)
        assert worker.receive() == "down"
        assert worker.wait() == 0


def ask(*workers: Child) -> list[float]:
    for worker in workers:
        worker.send("weight")
    return [worker.receive() for worker in workers]


def test_extra_state_comes_with_tensors_of_the_schemes_model(scheme):
    """RayCollector sends these tensors, without the extra state of modules inside the policy."""
    source = TensorDictSequential(parts.StatefulPolicy(1.0, offset=0.5))
    model = TensorDictSequential(parts.StatefulPolicy(1.0, offset=0.0))
    with following(scheme, model, source):
        fill(source, 2.0)
        source[0].offset = torch.tensor(0.25)
        scheme.send(parts.TensorDict.from_module(source))
        assert (model[0].weight.item(), model[0].offset.item()) == (2.0, 0.25)


def test_tensors_of_the_schemes_model_keep_names_that_were_given(scheme, address):
    source = nn.ModuleDict({"actor": nn.Linear(1, 1)})
    begin(scheme, source, num_workers=0)
    scheme.connect()
    scheme.send(parts.TensorDict.from_module(source["actor"]))
    with dbuffer.WeightReceiver(address / "policy") as receiver, receiver.open() as snapshot:
        assert snapshot.tensors.keys() == {"weight", "bias"}


def test_a_send_that_failed_as_it_flipped_the_pointer_can_be_repeated(scheme, address, monkeypatch):
    put = BufferWriter._put

    def fill_the_disk(writer: BufferWriter, path: Path, record: Any) -> None:
        if path.name == POINTER_FILE:
            raise dbuffer.StoreFullError("no room is left")
        put(writer, path, record)

    begin(scheme, num_workers=0)
    scheme.connect()
    with monkeypatch.context() as patch:
        patch.setattr(BufferWriter, "_put", fill_the_disk)
        with pytest.raises(dbuffer.StoreFullError):
            scheme.send()
    scheme.send()
    assert DoubleBuffer(address / "policy").pointer().version == 3


def test_a_worker_does_not_miss_its_own_store(scheme, caplog):
    """The store for one worker does not exist before weights are sent to that worker alone."""
    model = parts.ConstantPolicy(-5.0)
    with following(scheme, model):
        assert not caplog.messages
        scheme.send(weights_of(2.0), worker_ids=[0])
        assert model.weight.item() == 2.0


def test_receiver_receive_method(scheme):
    scheme.sync = False
    model = parts.ConstantPolicy(-5.0)
    with following(scheme, model) as worker:
        assert worker.receive(timeout=0.001) is None, "there was nothing new"
        scheme.send(weights_of(2.0))
        started = time.monotonic()
        received = worker.receive(timeout=TIMEOUT_S)  # the background thread may have been faster
        assert time.monotonic() - started < TIMEOUT_S / 2, "receive waited for what had come"
        assert received["weight"].item() == model.weight.item() == 2.0


def test_receive_that_waits_ends_when_the_scheme_is_shut_down(scheme):
    with following(scheme, parts.ConstantPolicy(-5.0)) as worker, ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(worker.receive, TIMEOUT_S)
        time.sleep(0.1)  # it waits
        started = time.monotonic()
        worker.shutdown()
        with pytest.raises(dbuffer.ClosedError, match="this receiver was shut down"):
            receiving.result()
        assert time.monotonic() - started < TIMEOUT_S / 2


RECEIVING = {"worker_idx": 0, "total_frames": -1, "auto_register_policy_transforms": False}


def test_collector_receives(address):
    """`weight_recv_schemes` and `register_scheme_receiver` of a single collector."""
    sender = parts.DoubleBufferSyncScheme(address)
    begin(sender)
    first, second = pickle.loads(pickle.dumps((sender, sender)))
    sender.connect()
    collector = parts.collectors.Collector(
        parts.ProbeEnv,
        parts.ConstantPolicy(-5.0),
        frames_per_batch=4,
        weight_recv_schemes={"policy": first},
        track_policy_version=True,
        **RECEIVING,
    )
    try:

        def next_batch() -> tuple[list[float], list[int]]:
            batch = collector.next()
            versions = batch["next", "policy_version"]
            return batch["action"].unique().tolist(), versions.unique().tolist()

        assert next_batch() == ([1.0], [0])
        sender.send(parts.ConstantPolicy(2.0))
        assert next_batch() == ([2.0], [1])
        collector.register_scheme_receiver({"policy": second})  # in the place of the first
        assert next_batch()[0] == [2.0]
        sender.send(parts.ConstantPolicy(3.0))
        assert next_batch()[0] == [3.0]
        sender.sync = False
        sender.send(parts.ConstantPolicy(4.0))
        collector.receive_weights()
        assert next_batch()[0] == [4.0]
    finally:
        for part in (collector, first, second, sender):
            part.shutdown()


def test_a_model_that_came_by_shared_memory(scheme, policy):
    """What multiprocessing hands to a worker is the trainer's own memory, until someone copies.

    A distributed collector's nodes get their policy so. Neither side may see the other's writes.
    """
    begin(scheme, policy)
    with Child(_follow, scheme, 0, policy) as worker:
        scheme.connect()
        assert worker.receive() == 1.0
        assert policy.weight.is_shared(), "else this test is about nothing"
        fill(policy, 2.0)
        assert ask(worker) == [1.0], "the worker has weights that were never sent"
        scheme.send(parts.ConstantPolicy(3.0))
        assert ask(worker) == [3.0]
        assert policy.weight.item() == 2.0, "the worker wrote into the trainer's weights"
        let_go(worker)


def test_a_policy_in_shared_memory_for_forked_processes(policy):
    from dbuffer.integrations.torchrl import loading

    policy.share_memory()
    with parts.start_method("fork"):
        handed_out = loading.unshared(policy)
    assert policy.weight.is_shared()
    assert not handed_out.weight.is_shared()
    assert handed_out.weight.item() == policy.weight.item()


def _follow_late(connection: Connection, address: Path, worker_idx: int) -> None:
    _follow(connection, parts.DoubleBufferSyncScheme(address), worker_idx)


def _train_until_killed(connection: Connection, address: Path, first: float) -> None:
    scheme = parts.DoubleBufferSyncScheme(address, sync=False)
    begin(scheme, parts.ConstantPolicy(first))
    scheme.connect()
    connection.send("published")
    while True:
        scheme.send(parts.ConstantPolicy(connection.recv()))
        connection.send("published")


def test_a_trainer_that_was_killed_and_restarted_is_followed(address):
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(Child(_train_until_killed, address, 0.5))
        trainer.receive()
        trainer.send(1.0)
        trainer.receive()
        worker = stack.enter_context(Child(_follow_late, address, 0))
        assert worker.receive() == 1.0
        trainer.kill()
        assert ask(worker) == [1.0]
        successor = stack.enter_context(Child(_train_until_killed, address, 2.0))
        successor.receive()
        until("the trainer is followed", lambda: ask(worker) == [2.0], TIMEOUT_S)
        successor.send(3.0)
        successor.receive()
        until("the trainer is followed", lambda: ask(worker) == [3.0], TIMEOUT_S)


# What may go wrong.


@pytest.mark.parametrize("sync", [True, False])
def test_no_forward_call_sees_weights_of_two_versions(address, sync):
    """Guarantee 1 for a policy that runs: constant sends, slow forward calls."""
    policy = parts.WholePolicy(0.0)
    scheme = parts.DoubleBufferSyncScheme(address, sync=sync)
    stop = threading.Event()
    rows: list[list[float]] = [[], []]

    def send(collector: Any) -> None:
        mine = copy.deepcopy(policy)
        value = 0.0
        while not stop.is_set():
            value += 1.0
            mine.say(value)
            collector.update_policy_weights_(mine)

    def collect(collector: Any) -> bool:
        for row, new in zip(rows, parts.actions(collector), strict=True):
            row.extend(new)
        return all(len(set(row)) > ENOUGH_WEIGHTS for row in rows)

    with parts.collecting(policy, scheme, frames=20) as collector, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, collector)
        try:
            until("weights come while the policy runs", lambda: collect(collector), TIMEOUT_S)
        finally:
            stop.set()
        sending.result(TIMEOUT_S)
    for row in rows:
        assert parts.TORN not in row, "a forward call saw weights of two versions"
        assert row == sorted(row), "a worker went back"


def test_a_worker_that_was_killed(address, scheme, policy):
    with parts.collecting(policy, scheme) as collector:
        kill(collector.procs[1])
        started = time.monotonic()
        with pytest.raises(dbuffer.ReceiverFailedError, match="worker-1"):
            update(collector, policy, 2.0)
        assert time.monotonic() - started < scheme.timeout_s / 2, "nobody waits for the dead"
        update(collector, policy, 3.0, worker_ids=[0])
        scheme.sync = False
        update(collector, policy, 4.0)
        with dbuffer.WeightReceiver(address / "policy", receiver_id="test") as receiver:
            with receiver.open() as snapshot:
                assert float(snapshot.tensors["weight"]) == 4.0


def test_weights_that_do_not_fit(scheme):
    """The error names worker and tensor, reaches `send`, and leaves the workers as they were."""
    policy = parts.StatefulPolicy(1.0, offset=0.0)
    wrong: dict[str, Any] = {
        "wieght": {"wieght": torch.tensor(2.0)},
        "surplus": {"weight": torch.tensor(2.0), "surplus": torch.zeros(3)},
        "weight": {"weight": torch.zeros(2)},
        "float64": {"weight": torch.tensor(2.0, dtype=torch.float64)},
    }
    with parts.collecting(policy, scheme) as collector:
        for value, (name, weights) in enumerate(wrong.items()):
            with pytest.raises(dbuffer.ReceiverFailedError, match=name) as caught:
                collector.update_policy_weights_(weights)
            assert "worker-" in str(caught.value)
            assert parts.acts(collector) == [1.0 + value] * 2
            update(collector, policy, 2.0 + value)
            assert parts.acts(collector) == [2.0 + value] * 2
        # What a model's own code raises comes as late as it can, and is told as well.
        policy.offset = torch.tensor(13.0)
        with pytest.raises(dbuffer.ReceiverFailedError, match="13 is not a number that I take"):
            collector.update_policy_weights_()
        policy.offset = torch.tensor(0.5)
        collector.update_policy_weights_()
        assert parts.acts(collector) == [5.5, 5.5]


def test_first_weights_that_do_not_fit(scheme):
    begin(scheme, nn.Linear(2, 1))
    started = time.monotonic()
    with (
        pytest.raises(Exception, match=r"bias.*weight|weight.*bias"),
        parts.collecting(None, scheme, policy_factory=parts.ConstantPolicy, num_workers=1),
    ):
        pass
    assert time.monotonic() - started < scheme.timeout_s / 2, "the worker says so, without a wait"


def test_sends_that_overtake_each_other(scheme, policy):
    """Without waiting, all but the last may be skipped, and nobody goes back."""
    scheme.sync = False
    with parts.collecting(policy, scheme) as collector:
        rows: list[list[float]] = [[], []]
        for step in range(2, 301):
            update(collector, policy, step, worker_ids=None if step % 3 else [step % 2])
            if step % 20 == 0:
                for row, new in zip(rows, parts.actions(collector), strict=True):
                    row.extend(new)
        update(collector, policy, 1000.0)
        come_to(collector, 1000.0)
        for row in rows:
            assert row == sorted(row)


def test_first_weights_that_never_come(address):
    scheme = parts.DoubleBufferSyncScheme(address, timeout_s=PATIENCE_S)
    begin(scheme)
    model = parts.ConstantPolicy(-5.0)
    worker = receiving(scheme, model)
    with pytest.raises(TimeoutError):
        worker.connect(worker_idx=0)
    scheme.timeout_s = worker.timeout_s = TIMEOUT_S
    scheme.connect()
    worker.connect(worker_idx=0)  # again, when they are there
    assert model.weight.item() == 1.0
    worker.shutdown()
    scheme.shutdown()


@pytest.mark.parametrize("leftover", ["weights", "other layout", "for one worker", "scheme"])
def test_weights_of_an_earlier_run_are_not_used(address, policy, leftover):
    old = parts.ConstantPolicy(7.0)
    if leftover == "scheme":
        with parts.collecting(old, parts.DoubleBufferSyncScheme(address)) as collector:
            assert parts.acts(collector) == [7.0, 7.0]
            collector.update_policy_weights_(worker_ids=[1])
    else:
        name = "policy~worker-1" if leftover == "for one worker" else "policy"
        address.mkdir(mode=0o700)
        with dbuffer.WeightSender(address / name) as sender:
            for _ in range(3):
                weights = {"other": torch.zeros(5)} if leftover == "other layout" else old
                sender.send(weights)
    with parts.collecting(policy, parts.DoubleBufferSyncScheme(address)) as collector:
        assert parts.acts(collector) == [1.0, 1.0]
        update(collector, policy, 2.0, worker_ids=[1])
        assert parts.acts(collector) == [1.0, 2.0]
        update(collector, policy, 3.0)
        assert parts.acts(collector) == [3.0, 3.0]
    factories = [parts.constant_factory(4.0), parts.constant_factory(5.0)]
    with parts.collecting(
        None, parts.DoubleBufferSyncScheme(address), policy_factory=factories
    ) as collector:
        assert parts.acts(collector) == [4.0, 5.0]


def test_a_policy_without_weights(scheme):
    policy = parts.TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["action"])
    with parts.collecting(policy, scheme) as collector:
        assert parts.acts(collector) == [0.0, 0.0]
        collector.update_policy_weights_()
        collector.update_policy_weights_(worker_ids=[1])
        assert parts.acts(collector) == [0.0, 0.0]


def test_nothing_is_left_behind(address, scheme, policy):
    """No thread in the trainer, no process, no lock; and the stores are whole."""
    begin_watching(address.parent)
    threads = set(threading.enumerate())
    with parts.collecting(policy, scheme, env=parts.SlowEnv) as collector:
        processes = list(collector.procs)
        collector.update_policy_weights_()
        parts.acts(collector)
        collector.shutdown()
        exit_codes = [process.exitcode for process in processes]
        assert exit_codes == [0, 0], "a worker that does not end by itself is terminated"
    until("threads have ended", lambda: set(threading.enumerate()) <= threads, TIMEOUT_S)
    with dbuffer.WeightSender(address / "policy") as sender:
        sender.send(policy)
    remove_store(address)
