"""All senders take vLLM's own weight sources: a module on one rank, and sharded over several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dbuffer import ShardedWeightSender, WeightReceiver, WeightSender
from tests.support.engines import preforked
from tests.support.worlds import World

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Iterator[World]:
    with preforked.preloaded("vllm.distributed.weight_transfer.base"):
        with World(tmp_path_factory.mktemp("world"), 2) as world:
            yield world


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def send_source(rank: int, store: Path) -> list[int]:
    """Send a source of vLLM's, and one of a class of its own; how often each has gathered."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    class OwnSource(ModuleSource):
        pass

    model = made()
    if rank == 0:
        with WeightSender(store / "whole", delta=True) as sender:
            sender.send(ModuleSource(model))
            with torch.no_grad():
                model[0].bias[0] += 1.0
            assert sender.send(ModuleSource(model)).delta_bytes is not None
            model = made()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    num_gathers = []
    for kind in (ModuleSource, OwnSource):
        with counted_gathers() as gathers, ShardedWeightSender(store / kind.__name__) as sender:
            sender.send(kind(model))
        num_gathers.append(len(gathers))
    return num_gathers


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[DTensor]]:
    gather, gathered = DTensor.full_tensor, []

    def full_tensor(self: DTensor, **how: Any) -> torch.Tensor:
        gathered.append(self)
        return gather(self, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", full_tensor)
        yield gathered


def test_senders_take_the_source_of_a_module(two, store):
    """A sharded sender gathers nothing, unless a class of the user's may yield other tensors."""
    assert two.run(send_source, store) == [[0, 4]] * 2
    for name, difference in (("whole", 1.0), ("ModuleSource", 0.0), ("OwnSource", 0.0)):
        with WeightReceiver(store / name) as receiver, receiver.open() as snapshot:
            expected = made().state_dict()
            expected["0.bias"][0] += difference
            assert snapshot.tensors.keys() == expected.keys()
            assert all(torch.equal(snapshot.tensors[key], expected[key]) for key in expected)
