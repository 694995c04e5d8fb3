"""All senders take vLLM's own weight sources: a module on one rank, and sharded over several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

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


def send_source(rank: int, store: Path) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

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
    with ShardedWeightSender(store / "sharded") as sender:
        sender.send(ModuleSource(fully_shard(model)))


def test_senders_take_the_source_of_a_module(two, store):
    two.run(send_source, store)
    for name, difference in (("whole", 1.0), ("sharded", 0.0)):
        with WeightReceiver(store / name) as receiver, receiver.open() as snapshot:
            expected = made().state_dict()
            expected["0.bias"][0] += difference
            assert snapshot.tensors.keys() == expected.keys()
            assert all(torch.equal(snapshot.tensors[key], expected[key]) for key in expected)
