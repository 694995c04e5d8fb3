"""Settings for publishing, read from the strategy and actor of LightRFT's trainer."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dbuffer.errors import UnsupportedError
from dbuffer.weights.names import NameMap
from dbuffer.weights.sources import Weights

ENGINE_TYPES = ("vllm", "sglang")
ZERO_STAGES = (0, 1, 2, 3)
_SHARDED_STAGE = 3

SGLANG_NAMES = (
    NameMap()
    .pattern(r"model\.((?!(?:layers|embed_tokens|norm|language_model)\.).*)", r"\1")
    .pattern(r"(?:model\.)?language_model\.(lm_head.*)", r"\1")
    .pattern(r"(?:model\.)?language_model\.(?:model\.)?(.*)", r"model.\1")
)
"""Map from transformers' names of a vision-language model's tensors to SGLang's names."""

DEFAULTS: dict[str, Any] = {"fsdp": False, "zero_stage": 2, "bf16": True, "text_only": False}


def engine_type_of(strategy: Any) -> str:
    """Return a strategy's ``engine_type``; refuse a value outside of :data:`ENGINE_TYPES`."""
    engine_type: str = strategy.engine_type
    if engine_type not in ENGINE_TYPES:
        raise UnsupportedError(
            f"invalid strategy.engine_type {engine_type!r}: use {' or '.join(ENGINE_TYPES)}"
        )
    return engine_type


def dtype_of(strategy: Any) -> torch.dtype | None:
    """Return the dtype of published floating-point tensors, or None to keep each tensor's dtype.

    The rule is LightRFT's: bfloat16 if ``bf16`` is set. Otherwise float16 for FSDP2, and None for
    DeepSpeed.
    """
    if _setting(strategy, "bf16"):
        return torch.bfloat16
    return torch.float16 if _setting(strategy, "fsdp") else None


def names_of(strategy: Any, actor: Any) -> NameMap | None:
    """Return the map from the actor's tensor names to the engine's, or None if they are equal."""
    if engine_type_of(strategy) != "sglang" or _setting(strategy, "text_only"):
        return None
    names = (name for name, _ in _module(strategy, actor).named_parameters())
    return SGLANG_NAMES if any("language_model." in name for name in names) else None


def weights_of(strategy: Any, actor: Any) -> Weights:
    """Return the weights to publish: the actor's module, with adapters merged into it."""
    engine_type_of(strategy)
    module = _module(strategy, actor)
    if not _has_adapters(module):
        return module
    if _setting(strategy, "fsdp") or _setting(strategy, "zero_stage") == _SHARDED_STAGE:
        raise UnsupportedError(
            "the actor has adapters (peft), which dbuffer can merge only if each rank has all "
            "weights: use DeepSpeed with a ZeRO stage below 3"
        )
    from dbuffer.integrations.peft import merged_weights

    return merged_weights(module)


def _module(strategy: Any, actor: Any) -> nn.Module:
    is_fsdp, zero_stage = _setting(strategy, "fsdp"), _setting(strategy, "zero_stage")
    if not is_fsdp and zero_stage not in ZERO_STAGES:
        raise UnsupportedError(
            f"invalid zero_stage {zero_stage!r}: use FSDP2, or a ZeRO stage of {ZERO_STAGES}"
        )
    model = actor.model
    module = model if is_fsdp else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise UnsupportedError(
            f"actor.model is a {type(model).__name__}, not a DeepSpeed engine: pass "
            "a DeepSpeed engine, or set strategy.args.fsdp for an FSDP2 model"
        )
    if is_fsdp and not any(isinstance(part, FSDPModule) for part in module.modules()):
        raise UnsupportedError(
            f"strategy.args.fsdp is set, but no module in actor.model ({type(model).__name__}) "
            "is sharded by FSDP2: call fully_shard() on the model"
        )
    if getattr(model, "is_pipe_parallel", False):
        raise UnsupportedError(
            "actor.model is a DeepSpeed pipeline, which is not supported: use ZeRO"
        )
    return module


def _has_adapters(module: nn.Module) -> bool:
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, PeftModel | BaseTunerLayer) for part in module.modules())


def _setting(strategy: Any, name: str) -> Any:
    """Return a setting from the strategy's ``args`` or ``config``, or LightRFT's default."""
    for holder in (getattr(strategy, "args", None), getattr(strategy, "config", None)):
        if hasattr(holder, name):
            return getattr(holder, name)
    return DEFAULTS[name]
