"""What a strategy and an actor of LightRFT say of what is to be published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dbuffer.errors import EngineUnsupportedError, TrainerUnsupportedError
from dbuffer.names import NameMap, Prefix, Rename
from dbuffer.sources import Weights

ENGINE_TYPES = ("vllm", "sglang")
ZERO_STAGES = (0, 1, 2, 3)
_SHARDED_STAGE = 3

SGLANG_NAMES = NameMap(
    [
        Prefix("model.visual.", "visual."),
        Prefix("model.language_model.lm_head.", "lm_head."),
        Prefix("model.language_model.", "model."),
    ]
)
"""From a vision-language model of transformers to SGLang's; a language model's names stay."""

_LORA_PART = ".lora_"


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a trainer publishes."""

    engine_type: str
    is_fsdp: bool
    is_sharded: bool
    """Whether a rank holds only parts of the parameters."""
    dtype: torch.dtype | None
    """Of all floating-point tensors; None: each in its own."""
    rename: Rename | None

    @classmethod
    def of(cls, strategy: Any) -> Configuration:
        """From a strategy's ``engine_type``, ``args.fsdp``, ``args.zero_stage``, ``args.bf16``.

        Raises:
            EngineUnsupportedError, TrainerUnsupportedError: (both ``NotImplementedError``) one of
                them is not known here.
        """
        engine_type, args = strategy.engine_type, strategy.args
        if engine_type not in ENGINE_TYPES:
            raise EngineUnsupportedError(
                f"strategy.engine_type is {engine_type!r}, and may be {' or '.join(ENGINE_TYPES)}"
            )
        is_fsdp = bool(args.fsdp)
        if not is_fsdp and args.zero_stage not in ZERO_STAGES:
            raise TrainerUnsupportedError(
                f"strategy.args has no fsdp and zero_stage {args.zero_stage!r}: use FSDP2, or a "
                f"ZeRO stage of {ZERO_STAGES}"
            )
        return cls(
            engine_type=engine_type,
            is_fsdp=is_fsdp,
            is_sharded=is_fsdp or args.zero_stage == _SHARDED_STAGE,
            dtype=_dtype(args, is_fsdp=is_fsdp),
            rename=SGLANG_NAMES if engine_type == "sglang" else None,
        )

    def weights(self, actor: Any) -> Weights:
        """What is published of an actor: its module, or the one that adapters in it make of it.

        Raises:
            TrainerUnsupportedError: (a ``NotImplementedError``) it is not what the strategy says,
                or has adapters and is sharded.
            InvalidWeightsError: its adapters cannot be merged.
        """
        module = self._module(actor)
        adapted = [name for name, _ in module.named_parameters() if _LORA_PART in name]
        if not adapted:
            return module
        if self.is_sharded:
            raise TrainerUnsupportedError(
                f"the actor has adapters in it ({adapted[0]!r} and so on), which are merged into "
                "weights that are whole on each rank only: use a ZeRO stage below 3"
            )
        from dbuffer.integrations.peft import merged_weights

        return merged_weights(module)

    def _module(self, actor: Any) -> nn.Module:
        model = actor.model
        module = model if self.is_fsdp else getattr(model, "module", None)
        if not isinstance(module, nn.Module):
            raise TrainerUnsupportedError(
                f"actor.model is a {type(model).__name__} and no engine of DeepSpeed's, though "
                "strategy.args.fsdp is not set"
            )
        if self.is_fsdp and not any(isinstance(part, FSDPModule) for part in module.modules()):
            raise TrainerUnsupportedError(
                f"strategy.args.fsdp is set, and nothing in actor.model ({type(model).__name__}) "
                "was sharded by fully_shard, which is FSDP2"
            )
        if getattr(model, "is_pipe_parallel", False):
            raise TrainerUnsupportedError("actor.model is a pipeline of DeepSpeed's: use ZeRO")
        return module


def _dtype(args: Any, *, is_fsdp: bool) -> torch.dtype | None:
    """As LightRFT has it: without ``bf16`` its FSDP2 sends float16, its DeepSpeed what it holds."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if is_fsdp else None
