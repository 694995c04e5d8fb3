"""What keeps weights from fitting a tiny Qwen of two layers, whichever engine has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
BIAS = "model.layers.0.self_attn.o_proj.bias"
"""Which the model has not, and whose name loaders pass over."""


def layer_too_many(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A third layer, each of whose tensors is one of the second."""
    second = {name: tensor for name, tensor in weights.items() if "layers.1." in name}
    return {name.replace("layers.1.", "layers.2."): tensor for name, tensor in second.items()}


MISFITS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "one part of a fused parameter missing": lambda weights: weights.pop(K_PROJ),
    "embedding missing": lambda weights: weights.pop(EMBEDDING),
    "unknown name": lambda weights: weights.update({"model.layers.0.bogus": torch.ones(2)}),
    "layer too many": lambda weights: weights.update(
        {K_PROJ.replace("layers.1", "layers.2"): weights[K_PROJ].clone()}
    ),
    "layer too many, tied to another": lambda weights: weights.update(layer_too_many(weights)),
    "bias": lambda weights: weights.update({BIAS: torch.ones(64)}),
    "padded vocabulary": lambda weights: weights.update({EMBEDDING: torch.ones(512, 64)}),
    "too many rows": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].repeat(2, 1)}),
    "too few columns": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ][:, :-1]}),
    "wrong length": lambda weights: weights.update({NORM: weights[NORM][:-1]}),
    "integers": lambda weights: weights.update({NORM: weights[NORM].long()}),
}
