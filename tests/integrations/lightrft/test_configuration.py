"""What LightRFT's strategy says: read right, or refused before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dbuffer
from dbuffer.integrations import default_store
from dbuffer.integrations.lightrft import BroadcastManager, manager
from dbuffer.integrations.lightrft.configuration import (
    SGLANG_NAMES,
    dtype_of,
    names_of,
    weights_of,
)
from dbuffer.integrations.lightrft.manager import engine_of_rank
from dbuffer.publish.publisher import SenderKeywords
from tests.support.engines.vllm_engines import NEEDS_VLLM
from tests.support.lightrft_parts import Actor, strategy_for
from tests.support.patterns import received
from tests.support.worlds import World


@pytest.fixture(scope="module")
def world(frameworks_preloaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world"), 2) as world:
        yield world


@pytest.mark.parametrize(
    ("name", "of_sglang"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("model.multi_modal_projector.linear_1.bias", "multi_modal_projector.linear_1.bias"),
        ("model.vision_tower.encoder.norm.weight", "vision_tower.encoder.norm.weight"),
        ("model.audio_tower.conv1.weight", "audio_tower.conv1.weight"),
        ("model.image_newline", "image_newline"),
        ("language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("visual.merger.mlp.0.weight", "visual.merger.mlp.0.weight"),
        # A language model's own are right as they are.
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_for_sglang(name, of_sglang):
    assert SGLANG_NAMES(name) == of_sglang


@pytest.mark.parametrize(
    ("trainer", "dtype"),
    [
        ("fsdp2 bf16", torch.bfloat16),
        ("fsdp2", torch.float16),
        ("zero-3 bf16", torch.bfloat16),
        ("zero-1", None),
    ],
)
def test_dtype_is_lightrfts(trainer, dtype):
    assert dtype_of(strategy_for(trainer)) is dtype


def test_only_sglang_has_other_names_and_not_for_a_trainer_of_text_only():
    actor = actor_with("language_model.layers.0.weight")
    assert names_of(strategy_for("zero-2"), actor) is None
    strategy = strategy_for("zero-2", "sglang")
    for text_only, rename in ((None, SGLANG_NAMES), (True, None), (False, SGLANG_NAMES)):
        if text_only is not None:
            strategy.args.text_only = text_only
        assert names_of(strategy, actor) is rename


def actor_with(*names: str) -> SimpleNamespace:
    model = nn.Module()
    for name in names:
        *path, last = name.split(".")
        inner = model
        for part in path:
            inner.register_module(part, getattr(inner, part, nn.Module()))
            inner = getattr(inner, part)
        inner.register_parameter(last, nn.Parameter(torch.ones(1)))
    return SimpleNamespace(model=SimpleNamespace(module=model))


@pytest.mark.parametrize("part", ["language_model.layers", "layers"])
def test_only_names_of_vision_language_models_are_other_ones(part):
    """Phi has a tensor that such a map would take for one."""
    actor = actor_with(f"model.{part}.0.weight", "model.final_layernorm.weight")
    expected = SGLANG_NAMES if part.startswith("language") else None
    assert names_of(strategy_for("zero-2", "sglang"), actor) is expected


def test_what_a_strategy_does_not_say_is_in_its_config_or_lightrfts_default():
    strategy = strategy_for("fsdp2 bf16")
    del strategy.args.bf16
    assert dtype_of(strategy) is torch.bfloat16
    strategy.config = SimpleNamespace(bf16=False)
    assert dtype_of(strategy) is torch.float16
    silent = SimpleNamespace(engine_type="vllm", args=None)
    assert dtype_of(silent) is torch.bfloat16
    actor = actor_with("weight")
    assert weights_of(silent, actor) is actor.model.module, "by DeepSpeed"


def refuse(rank: int, place: Path, trainer: str, engine_type: str, model: str) -> str:
    default_store._SHARED_MEMORY = place
    strategy = strategy_for(trainer, engine_type)
    actor = Actor(MODELS[model]())
    with pytest.raises(NotImplementedError) as caught:
        BroadcastManager(actor, strategy, "http://127.0.0.1:1")
    assert isinstance(caught.value, dbuffer.DBufferError)
    return str(caught.value)


def plain() -> nn.Module:
    return nn.Linear(2, 2)


def sharded(module: nn.Module | None = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    whole: nn.Module = fully_shard(module or plain())
    return whole


def flattened() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))


def wrapped(module: nn.Module | None = None) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module or plain())


def pipeline() -> nn.Module:
    model = wrapped()
    model.is_pipe_parallel = True
    return model


IA3 = {"feedforward_modules": []}


def adapted(method: str, **options: Any) -> nn.Module:
    import peft  # takes 3 s

    config = peft.get_peft_config({"peft_type": method, "target_modules": ["0"], **options})
    model: nn.Module = peft.get_peft_model(nn.Sequential(plain()), config)
    return model


MODELS = {
    "plain": plain,
    "sharded": sharded,
    "flattened": flattened,
    "wrapped": wrapped,
    "pipeline": pipeline,
    "adapted": lambda: wrapped(adapted("LORA")),
    "adapted, sharded": lambda: sharded(adapted("IA3", **IA3)),
}


@pytest.mark.parametrize(
    ("trainer", "engine_type", "model", "why"),
    [
        ("fsdp2", "tgi", "sharded", "'tgi'"),
        ("zero-4", "vllm", "wrapped", "zero_stage 4"),
        ("fsdp2", "vllm", "plain", "fully_shard"),
        ("fsdp2", "vllm", "flattened", "fully_shard"),
        ("zero-1", "vllm", "plain", "not a DeepSpeed engine"),
        ("zero-1", "vllm", "pipeline", "pipeline"),
        ("zero-3", "vllm", "adapted", "has adapters"),
        ("fsdp2", "sglang", "adapted, sharded", "has adapters"),
    ],
)
def test_what_is_not_known_is_refused_on_all_ranks(
    world, tmp_path, trainer, engine_type, model, why
):
    for message in world.run(refuse, tmp_path, trainer, engine_type, model):
        assert why in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "options"),
    [("LORA", {}), ("LOHA", {}), ("OFT", {"r": 2, "oft_block_size": 0}), ("IA3", IA3)],
)
def test_adapters_of_any_method_are_merged(method, options):
    actor = Actor(SimpleNamespace(module=adapted(method, **options)))
    weights = weights_of(strategy_for("zero-2"), actor)
    assert list(weights) == ["0.weight", "0.bias"]


def fail(rank: int, place: Path, engines: list[Any]) -> str:
    default_store._SHARED_MEMORY = place
    with pytest.raises(dbuffer.DBufferError) as caught:
        BroadcastManager(Actor(sharded()), strategy_for("fsdp2"), engines[rank])
    return type(caught.value).__name__


@pytest.mark.parametrize(
    ("engines", "kind"),
    [
        ([None, None], "OptionError"),
        pytest.param([None, 5], "UnsupportedError", marks=NEEDS_VLLM),
        (["http://127.0.0.1:1"] * 2, "UnsupportedError"),
    ],
)
def test_no_usable_engine_is_an_error_on_all_ranks_and_publishes_nothing(
    world, tmp_path, engines, kind
):
    assert world.run(fail, tmp_path, engines) == [kind] * 2
    assert list(tmp_path.glob("*/CURRENT")) == []


class SGLangWrapper:
    tp_group_cpu = "a group"

    def __init__(self, tp_rank: int) -> None:
        self._tp_rank = tp_rank
        self._engine = ["the engine", tp_rank]


def test_the_engine_of_a_rank():
    assert [engine_of_rank(5), engine_of_rank(None)] == [5, None]
    assert engine_of_rank(SGLangWrapper(0)) == ["the engine", 0]
    assert engine_of_rank(SGLangWrapper(1)) is None


def names_for_sglang(rank: int, place: Path, options: SenderKeywords) -> list[str]:
    default_store._SHARED_MEMORY = place
    model = nn.Module()
    model.language_model = nn.Linear(2, 2)
    with mock.patch.object(manager, "start_follower"):
        actor, strategy = Actor(sharded(model)), strategy_for("fsdp2", "sglang")
        with BroadcastManager(actor, strategy, "an engine", **options) as broadcasts:
            broadcasts.broadcast_to_engine()
            return sorted(received(broadcasts.store))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["model.bias", "model.weight"]),
        ({"rename": None}, ["language_model.bias", "language_model.weight"]),
        ({"rename": {"language_model.bias": "b"}}, ["b", "language_model.weight"]),
    ],
)
def test_rename_replaces_the_names_of_lightrft(world, tmp_path, options, names):
    assert world.run(names_for_sglang, tmp_path, options) == [names, names]
