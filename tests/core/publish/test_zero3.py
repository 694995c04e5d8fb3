"""DeepSpeed's ZeRO-3: parameters are gathered one by one, with a real DeepSpeed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dbuffer
from dbuffer import ShardedWeightSender, WeightSender
from dbuffer.publish.draft import Draft
from tests.support.patterns import assert_same, received
from tests.support.sharded import mixtral
from tests.support.soak import in_turn
from tests.support.ways import mounted
from tests.support.worlds import World
from tests.support.zero3 import counted_gathers, make_engine, start_deepspeed

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


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(33, 65), nn.Linear(65, 17), nn.BatchNorm1d(17)),
        *(nn.Linear(17, 700), nn.Linear(700, 900), nn.Linear(900, 33, bias=False)),
    )
    return model.append(nn.Linear(33, 900))


def publish(rank: int, store: Path, persisted: int, mount: str) -> None:
    engine = make_engine(persisted, make_model())
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
    engine = make_engine(0, make_model())
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
