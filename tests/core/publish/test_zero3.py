"""DeepSpeed's ZeRO-3: parameters are gathered one by one, with a real DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn

import dbuffer
from dbuffer import ShardedWeightSender, WeightSender
from dbuffer.publish.draft import Draft
from tests.support.patterns import assert_same, received
from tests.support.sharded import mixtral, mounted
from tests.support.soak import in_turn
from tests.support.worlds import World

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="there is no DeepSpeed here"
    ),
]


@pytest.fixture(scope="module")
def world(transformers_preloaded: None, tmp_path_factory: Any) -> Iterator[World]:
    """Three ranks, by which hardly a parameter divides."""
    with World(tmp_path_factory.mktemp("world"), 3) as world:
        world.run(start_deepspeed)
        yield world


def start_deepspeed(rank: int) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(distributed.get_world_size()),
    }
    import deepspeed

    # It would compile a way of its own to add up over shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(33, 65), nn.Linear(65, 17), nn.BatchNorm1d(17)),
        *(nn.Linear(17, 700), nn.Linear(700, 900), nn.Linear(900, 33, bias=False)),
    )
    return model.append(nn.Linear(33, 900))


def make_engine(persisted: int, model: nn.Module | None = None) -> Any:
    """An engine of it, that keeps parameters whole below so many elements."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persisted},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model or make_model(), config=config)[0]


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """How many parameters were whole at once, each time that one was gathered."""
    import deepspeed

    gather = deepspeed.zero.GatheredParameters
    counts, now = [], 0

    class Counting(gather):
        def __enter__(self) -> Any:
            nonlocal now
            now += len(self.params)
            counts.append(now)
            return super().__enter__()

        def __exit__(self, *exception: Any) -> Any:
            nonlocal now
            now -= len(self.params)
            return super().__exit__(*exception)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.zero, "GatheredParameters", Counting)
        yield counts


def publish(rank: int, store: Path, persisted: int, mount: str) -> None:
    engine = make_engine(persisted)
    if rank == 0:
        with WeightSender(store.with_name("alone")) as alone:
            with pytest.raises(dbuffer.InvalidWeightsError, match=r"dbuffer\.ShardedWeightSender"):
                alone.send(engine)
    with mounted(mount), counted_gathers() as counts:
        with ShardedWeightSender(store, dtype=torch.bfloat16) as sender:
            sender.send(engine)
            sender.send(engine.module)
    assert counts == [1] * (2 * len(list(engine.module.parameters())))
    # It trains on as before.
    loss = engine(torch.randn(4, 33)).square().mean()
    engine.backward(loss)
    engine.step()


def assert_published(store: Path, mount: str, model: nn.Module) -> None:
    state = model.state_dict()
    with mounted(mount):
        assert_same(
            received(store),
            {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()},
        )


@in_turn(("persisted", "mount"), [0, 10_000], ["local", "network"])
def test_parameters_are_gathered_one_at_a_time(world, store, persisted, mount):
    world.run(publish, store, persisted, mount)
    assert_published(store, mount, make_model())


def publish_experts(rank: int, store: Path, directory: Path) -> None:
    torch.manual_seed(0)
    model = mixtral()
    if rank == 0:
        model.save_pretrained(directory)
    num_parameters = len(list(model.parameters()))
    engine = make_engine(0, model)
    with counted_gathers() as counts, ShardedWeightSender(store) as sender:
        sender.send(engine)
    assert counts == [1] * num_parameters


def test_fused_experts_are_gathered_once_and_published_one_by_one(world, store, tmp_path):
    world.run(publish_experts, store, tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    assert_same(received(store), expected)


def publish_with_a_full_disk(rank: int, store: Path) -> str:
    """A write that fails on one rank in the middle of the gathers, once."""
    engine = make_engine(0)
    write, left = Draft.write, 2

    def fail(self: Any, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError("it went up in smoke")
        write(self, *arguments)

    with ShardedWeightSender(store) as sender:
        sender.send(engine)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Draft, "write", fail)
            with pytest.raises(dbuffer.RankFailedError) as caught:
                sender.send(engine)
        assert sender.send(engine).version == 2
    return str(caught.value)


def test_a_write_that_fails_on_one_rank_leaves_nobody_waiting(world, store):
    for message in world.run(publish_with_a_full_disk, store):
        assert "rank 1 could not gather and write: OSError: it went up in smoke" in message
