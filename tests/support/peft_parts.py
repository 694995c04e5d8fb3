"""peft models of tiny base models, and all that publishing one could change."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support import patterns
from tests.support.engines.tiny_models import make_model

LINEAR = ["q_proj", "v_proj", "down_proj"]
NEEDS_PEFT = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    for name in ("peft", "transformers")
]


def config(kind: str, **options: Any) -> Any:
    """Return a configuration of peft's class with this name."""
    import peft  # takes seconds, and processes import this file to collect tests

    return getattr(peft, kind)(**options)


def lora(**options: Any) -> Any:
    return config("LoraConfig", **{"r": 4, "lora_alpha": 16, "target_modules": LINEAR} | options)


def make(family: str, config: Any, seed: int = 0) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(make_model(family, seed), copy.deepcopy(config))
    train(model, seed)
    return model


def train(model: Any, seed: int) -> None:
    """Let every trainable tensor be something else than what it began with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def reference(model: Any, adapters: list[str] | None = None) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = copy.deepcopy(model).merge_and_unload(adapter_names=adapters)
    return dict(merged.state_dict())


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: patterns.bits(tensor) for name, tensor in tensors.items()}


def everything_in(model: Any) -> dict[str, Any]:
    """All that publishing could change: bytes, places, names, which adapters are merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    layers = {
        name: (list(module.active_adapters), list(module.merged_adapters), module.disable_adapters)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    return {
        "bits": bits(tensors),
        "places": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "gradients": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "names": list(model.state_dict()),
        "modules": {name: id(module) for name, module in model.named_modules()},
        "layers": layers,
        "configuration": repr(model.peft_config),
    }
