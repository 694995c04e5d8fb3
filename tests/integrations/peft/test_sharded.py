"""Adapters of models that FSDP2 or DeepSpeed's ZeRO-3 has sharded over ranks."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.support.patterns import assert_same
from tests.support.peft_parts import NEEDS_PEFT, make
from tests.support.worlds import World
from tests.support.zero3 import counted_gathers, make_engine, start_deepspeed

pytestmark = [
    *NEEDS_PEFT,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]


@pytest.fixture(scope="module")
def world(frameworks_preloaded: None, tmp_path_factory: Any) -> Iterator[World]:
    """Three ranks: neither the adapter's rows nor the base model's divide by that number."""
    with World(tmp_path_factory.mktemp("world"), 3) as world:
        world.run(start_deepspeed)
        yield world


def make_model() -> Any:
    from peft import LoraConfig

    targets = ["q_proj", "down_proj"]
    return make("qwen3", LoraConfig(r=4, target_modules=targets, use_dora=True))


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.clone() for name, tensor in state.items()}


@contextlib.contextmanager
def counted_elements() -> Iterator[list[int]]:
    """Elements of each tensor that ranks of FSDP2 gather."""
    from torch.distributed.tensor import DTensor

    full_tensor, counts = DTensor.full_tensor, []

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(tensor.numel())
        return full_tensor(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", counting)
        yield counts


def publish(rank: int, store: Path, kind: str) -> list[int]:
    """Publish the adapter of a sharded model; return the number of tensors at each gather."""
    from dbuffer.integrations.peft import send_adapter  # imports peft

    model = make_model()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = make_engine(0, model).module
    gathers = counted_elements() if kind == "fsdp" else counted_gathers()
    with dbuffer.ShardedWeightSender(store) as sender, gathers as counts:
        send_adapter(sender, model, metadata={"step": 7})
    return counts


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_ranks_publish_an_adapter_and_gather_nothing_else(world, store, kind):
    counts = world.run(publish, store, kind)
    expected = adapter_of(make_model())
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert_same(dict(snapshot.tensors), expected)
        assert snapshot.metadata["step"] == 7
        assert snapshot.metadata["adapter_config"]["r"] == 4
    assert counts == [[1] * len(expected) if kind == "zero" else []] * 3
