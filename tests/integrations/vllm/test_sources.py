"""All senders take vLLM's own weight sources: a module on one rank, and sharded over several."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dbuffer
from dbuffer import ShardedWeightSender, WeightReceiver, WeightSender
from tests.support.children import preload
from tests.support.engines import preforked
from tests.support.worlds import World

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Iterator[World]:
    preload(preforked.LEAN_VLLM)
    with World(tmp_path_factory.mktemp("world"), 2) as world:
        yield world


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 30))


def send_source(rank: int, store: Path) -> list[int]:
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


class Client:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(weight_version)


def train(rank: int, store: Path) -> list[list[Any]]:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from dbuffer.integrations.vllm.trainer import DBufferTrainerInitInfo

    make_engine = WeightTransferTrainerFactory.trainer_init
    calls = []
    for name, source in (("whole", ModuleSource(made())), ("split", split_source(rank))):
        client, info = Client(), DBufferTrainerInitInfo(store=store / name, rank=rank)
        trainer = make_engine(info, client=client, source=source)
        assert (trainer.rank, trainer.is_sender) == (rank, rank == 0)
        trainer.send_weights()
        trainer.send_weights()
        calls.append(client.calls)
    with pytest.raises(dbuffer.OptionError, match="split between ranks"):
        trainer.send_weights([])
    trainer.shutdown()
    info = DBufferTrainerInitInfo(store=store / "sparse", rank=rank, sparse=True)
    with pytest.raises(dbuffer.OptionError, match=r"sparse: .* split between ranks"):
        make_engine(info, client=Client(), source=split_source(rank))
    return calls


def split_source(rank: int) -> Any:
    from vllm.distributed.weight_transfer import base

    state = made().state_dict()
    names = [name for name in state if name.startswith(f"{rank}.")]

    if not hasattr(base.WeightSource, "iter_full"):  # before vLLM 0.33

        class EarlierSplit(base.WeightSource):
            def metadata(self) -> Any:
                return [base.ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in state.items()]

            def held_names(self) -> Any:
                return names

            def __iter__(self) -> Any:
                return ((name, t if name in names else None) for name, t in state.items())

        return EarlierSplit()

    class Split(base.WeightSource):
        @functools.cached_property
        def metadata(self) -> Any:
            return [
                base.ParamMeta(name, one.dtype, tuple(one.shape), owners=(int(name[0]),))
                for name, one in state.items()
            ]

        def iter_full(self) -> Any:
            return ((name, state[name]) for name in self.owned_names(rank))

    return Split()


def test_trainers_half_publishes_what_all_ranks_have(two, store):
    updates = ["start", {"version": 1}, "1", "start", {"version": 2}, "2"]
    assert two.run(train, store) == [[["init", *updates]] * 2, [[], []]]
    for name in ("whole", "split"):
        with WeightReceiver(store / name) as receiver, receiver.open() as snapshot:
            expected = made().state_dict()
            assert snapshot.version == 2
            assert snapshot.tensors.keys() == expected.keys()
            assert all(torch.equal(snapshot.tensors[key], expected[key]) for key in expected)
