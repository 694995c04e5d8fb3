"""TorchRL's distributed collectors with a store as their weights' way to the nodes.

Names are those of TorchRL's own tests where there is one. Process groups and RPC are of a whole
process, so that each test trains in a process of its own; Ray's share one cluster.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.integrations.torchrl import parts
from tests.support import ROOT
from tests.support.children import Child
from tests.support.ports import free_port
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = pytest.mark.usefixtures("frameworks_preloaded")

FRAMES = 8

Collected = list[list[float]]


@pytest.fixture
def address(shm_path: Path) -> Path:
    return shm_path / "weights"


@pytest.fixture
def node(node_name: str) -> Any:
    return getattr(parts.collectors, node_name)


@pytest.fixture
def kind(kind_name: str) -> Any:
    return getattr(parts.distributed, kind_name)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    with (
        parts.start_method("forkserver"),
        Child(_call, parts.forkserver_address(), function, args) as child,
    ):
        result, error = child.receive(2 * TIMEOUT_S)
        assert error is None, error
        assert child.wait() == 0
    return result


def _call(
    connection: Connection, forkserver: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    parts.use_forkserver(forkserver)
    try:
        connection.send((function(*args), None))
    except BaseException:
        error = traceback.format_exc()
        for node in multiprocessing.active_children():
            node.kill()
        connection.send((None, error))
        os._exit(1)  # collectors that failed may wait for ever


def local(num_batches: int, **options: Any) -> dict[str, Any]:
    return {
        "launcher": "mp",
        "tcp_port": str(free_port()),
        "frames_per_batch": FRAMES,
        "total_frames": FRAMES * num_batches,
        "collector_kwargs": {"auto_register_policy_transforms": False},
        **options,
    }


def start(kind: Any, policy: Any, address: Path, num_batches: int, **options: Any) -> Any:
    options.setdefault("weight_sync_schemes", {"policy": parts.DoubleBufferSyncScheme(address)})
    envs = options.pop("envs", [parts.NodeEnv()] * 2)
    return kind(envs, policy, **local(num_batches), **options)


def actions(batch: Any) -> list[float]:
    assert batch.numel() == FRAMES
    values: list[float] = batch["action"].unique().tolist()
    return values


def end(collector: Any) -> None:
    """Shut it down when its nodes have taken what they were told last.

    TorchRL's nodes read an instruction and delete it then: one that comes in between is lost. If it
    was the end, ``DistributedCollector.shutdown`` fails after ten seconds (seen).
    """
    if isinstance(collector, parts.distributed.DistributedCollector):
        for rank in range(1, collector.num_workers + 1):
            told = [f"NODE_{rank}_in"]
            until("it is taken", lambda told=told: not collector._store.check(told), TIMEOUT_S)
    collector.shutdown()


def records(address: Path) -> dict[str, Any]:
    store = DoubleBuffer(address / "policy")
    return {record.receiver: record for record in store.receivers()}


def wait_for_end(pid: int, timeout_s: float = TIMEOUT_S) -> None:
    until(f"process {pid} has ended", lambda: not Path(f"/proc/{pid}").exists(), timeout_s)


def _update_by_itself(sync: bool, address: Path) -> tuple[dict[str, int | None], Collected]:
    policy = parts.ConstantPolicy(1.0)
    collector = start(
        parts.distributed.DistributedCollector,
        policy,
        address,
        8,
        envs=[parts.LateEnv()] * 2,
        policy_factory=parts.ConstantPolicy,
        sync=sync,
        update_interval=1,
    )
    applied = {worker: record.applied_version for worker, record in records(address).items()}
    seen = []
    for batch in collector:
        seen.append(actions(batch))
        if len(seen) == 1:
            policy.weight.data.add_(1)
    end(collector)
    return applied, seen


@pytest.mark.parametrize("sync", [False, True])
def test_update_interval(address, sync):
    """The collector sends by itself, to all nodes or to the one whose batch it has.

    It waits for its nodes before. Else it gives them ten seconds to be there, which some need to
    import what they run.
    """
    applied, seen = in_child(_update_by_itself, sync, address)
    assert applied == {"worker-0": 1, "worker-1": 1}
    assert seen[0] == [1.0]
    assert seen[-2:] == [[2.0], [2.0]]


def _update_one(kind: Any, node: Any, address: Path) -> Collected:
    policy = parts.ConstantPolicy(1.0)
    collector = start(kind, policy, address, 5, collector_class=node, sync=True)
    seen = []
    for worker_ids, batch in zip(([1], 0, [0, 1], None, None), collector, strict=True):
        seen.append(batch["action"].flatten().tolist())
        policy.weight.data.add_(1)
        collector.update_policy_weights_(worker_ids=worker_ids)
    end(collector)
    return seen


@pytest.mark.parametrize(
    ("kind_name", "node_name"),
    [
        ("DistributedCollector", "Collector"),
        ("DistributedCollector", "MultiSyncCollector"),
        ("RPCCollector", "Collector"),
        pytest.param("RPCCollector", "MultiSyncCollector", marks=IN_SOAKS_ALONE),
    ],
)
def test_worker_ids(address, kind, node):
    """Nodes are counted from 0, whatever their rank is. Weights of an earlier run are not used.

    Without a factory, multiprocessing hands the trainer's policy to the nodes; no memory is shared.
    RPC's workers come to the store before the trainer does.
    """
    address.mkdir(mode=0o700)
    with dbuffer.WeightSender(address / "policy") as sender:
        for value in (7.0, 8.0):
            sender.send(parts.ConstantPolicy(value))
    half = FRAMES // 2
    seen = in_child(_update_one, kind, node, address)
    expected = [[1.0, 1.0], [1.0, 2.0], [3.0, 2.0], [4.0, 4.0], [5.0, 5.0]]
    # RPCCollector puts the batch of whoever is ready first in the first place.
    if kind is parts.distributed.RPCCollector:
        seen, expected = [sorted(row) for row in seen], [sorted(pair) for pair in expected]
    assert seen == [[first] * half + [second] * half for first, second in expected]


# Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        # Its workers would give way to every other process, and tests run side by side.
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
    yield ray
    ray.shutdown()


def on_ray(num_batches: int, **options: Any) -> dict[str, Any]:
    return {
        "frames_per_batch": FRAMES,
        "total_frames": FRAMES * num_batches,
        "remote_configs": {"num_cpus": 1, "num_gpus": 0, "memory": 100 << 20},
        "collector_kwargs": {"auto_register_policy_transforms": False},
        **options,
    }


@IN_SOAKS_ALONE
def test_ray_collector_updatepolicy(cluster, address):
    policy = parts.ConstantPolicy(1.0)
    scheme = parts.DoubleBufferSyncScheme(address)
    collector = parts.distributed.RayCollector(
        [parts.NodeEnv()] * 2,
        policy,
        collector_class=parts.collectors.Collector,
        sync=True,
        weight_sync_schemes={"policy": scheme},
        **on_ray(100),
    )
    try:
        collector.update_policy_weights_()
        batches = iter(collector)
        assert actions(next(batches)) == [1.0]
        policy.weight.data.add_(1)
        collector.update_policy_weights_()
        assert actions(next(batches)) == [2.0]
        policy.weight.data.add_(1)
        collector.update_policy_weights_(worker_ids=1)
        assert actions(next(batches)) == [2.0, 3.0]
        collector.update_policy_weights_(parts.ConstantPolicy(5.0))
        assert actions(next(batches)) == [5.0]
        with pytest.raises(dbuffer.ReceiverFailedError, match="weight"):
            collector.update_policy_weights_({"weight": torch.zeros(3)})
        lost = records(address)["worker-0"].pid
        cluster.kill(collector.remote_collectors[0])
        wait_for_end(lost)
        started = time.monotonic()
        with pytest.raises(dbuffer.ReceiverFailedError, match="worker-0"):
            collector.update_policy_weights_(parts.ConstantPolicy(6.0))
        assert time.monotonic() - started < 10.0
    finally:
        collector.shutdown()
