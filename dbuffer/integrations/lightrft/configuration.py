"""`Configuration`: settings for publishing, read from LightRFT's strategy and actor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
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
"""From a vision-language model of transformers to SGLang's, whatever its other parts are called."""

DEFAULTS: dict[str, Any] = {"fsdp": False, "zero_stage": 2, "bf16": True, "text_only": False}
"""LightRFT's defaults, for settings that a strategy does not have."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A trainer's settings for publishing."""

    engine_type: str
    is_fsdp: bool
    is_sharded: bool
    """Whether a rank holds only parts of the parameters."""
    dtype: torch.dtype | None
    """Dtype of published floating-point tensors, or None to keep each tensor's own."""
    names: NameMap | None
    """Names that an engine gives a vision-language model's tensors, if not transformers'."""

    @classmethod
    def of(cls, strategy: Any) -> Configuration:
        """Read ``engine_type`` of a strategy, and its settings in ``args`` or ``config``."""
        engine_type = strategy.engine_type
        if engine_type not in ENGINE_TYPES:
            raise UnsupportedError(
                f"invalid strategy.engine_type {engine_type!r}: use {' or '.join(ENGINE_TYPES)}"
            )
        is_fsdp, zero_stage = bool(_setting(strategy, "fsdp")), _setting(strategy, "zero_stage")
        if not is_fsdp and zero_stage not in ZERO_STAGES:
            raise UnsupportedError(
                f"invalid zero_stage {zero_stage!r}: use FSDP2, or a ZeRO stage of {ZERO_STAGES}"
            )
        has_other_names = engine_type == "sglang" and not _setting(strategy, "text_only")
        return cls(
            engine_type=engine_type,
            is_fsdp=is_fsdp,
            is_sharded=is_fsdp or zero_stage == _SHARDED_STAGE,
            dtype=_dtype(is_bf16=bool(_setting(strategy, "bf16")), is_fsdp=is_fsdp),
            names=SGLANG_NAMES if has_other_names else None,
        )

    def rename(self, actor: Any) -> NameMap | None:
        """Return the map of the actor's names, or None if they stay."""
        names = (name for name, _ in self._module(actor).named_parameters())
        return self.names if any("language_model." in name for name in names) else None

    def weights(self, actor: Any) -> Weights:
        """Return the weights to publish: the actor's module, with its adapters merged."""
        module = self._module(actor)
        if not _has_adapters(module):
            return module
        if self.is_sharded:
            raise UnsupportedError(
                "the actor has adapters (peft), which can be merged only where each rank holds "
                "whole weights: use a ZeRO stage below 3"
            )
        from dbuffer.integrations.peft import merged_weights

        return merged_weights(module)

    def _module(self, actor: Any) -> nn.Module:
        model = actor.model
        module = model if self.is_fsdp else getattr(model, "module", None)
        if not isinstance(module, nn.Module):
            raise UnsupportedError(
                f"actor.model is a {type(model).__name__}, not a DeepSpeed engine, although "
                "strategy.args.fsdp is not set"
            )
        if self.is_fsdp and not any(isinstance(part, FSDPModule) for part in module.modules()):
            raise UnsupportedError(
                f"strategy.args.fsdp is set, but nothing in actor.model ({type(model).__name__}) "
                "was sharded by fully_shard, which is FSDP2"
            )
        if getattr(model, "is_pipe_parallel", False):
            raise UnsupportedError(
                "actor.model is a DeepSpeed pipeline, which is not supported: use ZeRO"
            )
        return module


def _has_adapters(module: nn.Module) -> bool:
    """Whether a module has adapters of peft, of any method."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, PeftModel | BaseTunerLayer) for part in module.modules())


def _setting(strategy: Any, name: str) -> Any:
    """Find a setting as LightRFT does: ``args`` may lack it, or be None."""
    for holder in (getattr(strategy, "args", None), getattr(strategy, "config", None)):
        if hasattr(holder, name):
            return getattr(holder, name)
    return DEFAULTS[name]


def _dtype(*, is_bf16: bool, is_fsdp: bool) -> torch.dtype | None:
    """Return LightRFT's dtype: without ``bf16``, float16 for FSDP2, unchanged for DeepSpeed."""
    if is_bf16:
        return torch.bfloat16
    return torch.float16 if is_fsdp else None
