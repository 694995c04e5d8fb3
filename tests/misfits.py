"""What keeps weights from fitting a tiny Qwen of two layers, whichever engine has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
MISFITS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "one part of a fused parameter missing": lambda weights: weights.pop(K_PROJ),
    "embedding missing": lambda weights: weights.pop("model.embed_tokens.weight"),
    "unknown name": lambda weights: weights.update({"model.layers.0.bogus": torch.ones(2)}),
    "layer too many": lambda weights: weights.update(
        {K_PROJ.replace("layers.1", "layers.2"): weights[K_PROJ].clone()}
    ),
    "too many rows": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].repeat(2, 1)}),
    "too few columns": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ][:, :-1]}),
    "wrong length": lambda weights: weights.update({NORM: weights[NORM][:-1]}),
    "integers": lambda weights: weights.update({NORM: weights[NORM].long()}),
}
