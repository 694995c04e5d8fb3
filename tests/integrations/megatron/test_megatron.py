"""Megatron-Core over a store: models split by tensors, stages and experts, exported by mbridge."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dbuffer
from tests.support.children import preload
from tests.support.later import Later
from tests.support.worlds import World

transformers = Later("transformers")
preload("tests.support.megatron_parts")  # skipped where there is no mbridge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mbridge") is None, reason="needs mbridge: python3 dev.py megatron"
    ),
]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    match family:
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, head_dim=16))
        case "qwen2, tied":
            sizes = SIZES | {"tie_word_embeddings": True}
            return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        case "qwen3-moe":
            config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16)
            return transformers.Qwen3MoeForCausalLM(config)
    raise AssertionError(family)


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world"), 4) as world:
        yield world


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "split"),
    [("llama", (2, 2, 1)), ("qwen2, tied", (2, 2, 1)), ("qwen3-moe", (1, 2, 2))],
)
def test_a_megatron_model_is_published_as_its_checkpoint(
    world: World, family: str, split: tuple[int, int, int], tmp_path: Path, shm_path: Path
) -> None:
    model_of(family).save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    num_held = world.run(publish_twice, tmp_path, shm_path / "store", split)
    assert max(num_held) < sum(tensor.numel() for tensor in checkpoint.values())
    with dbuffer.WeightReceiver(shm_path / "store") as receiver, receiver.open() as snapshot:
        assert (snapshot.version, snapshot.metadata) == (2, {"step": 2})
        assert snapshot.tensors.keys() == checkpoint.keys()
        for name, tensor in snapshot.tensors.items():
            norm = name.endswith("norm.weight")
            assert torch.equal(tensor, checkpoint[name] / 2 if norm else checkpoint[name]), name


def publish_twice(rank: int, checkpoint: Path, store: Path, split: tuple[int, int, int]) -> int:
    """Publish the checkpoint, and then halved norms; return how many weights this rank holds."""
    from tests.support.megatron_parts import Export, load_model, start_megatron

    start_megatron(*split)
    bridge, model = load_model(checkpoint)
    source = Export(bridge, [model])
    with dbuffer.ShardedWeightSender(store, delta=True) as sender:
        sender.send(source, metadata={"step": 1})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.div_(2)
        assert sender.send(source, metadata={"step": 2}).delta_bytes
    return sum(parameter.numel() for parameter in model.parameters())
