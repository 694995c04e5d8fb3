"""Names and shapes of real models' tensors, scaled to fit the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]

DTYPE = torch.bfloat16


def qwen2_0_5b(*, width: float = 1.0) -> Shapes:
    """Return the shapes of Qwen2.5-0.5B, with tied embeddings. ``width`` scales each layer."""
    hidden, intermediate, key_value = int(896 * width), int(4864 * width), int(128 * width)
    layer: Shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.k_proj.bias": (key_value,),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.v_proj.bias": (key_value,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {
        "model.embed_tokens.weight": (151_936, hidden),
        **_repeat(layer, layers=24),
        "model.norm.weight": (hidden,),
    }


def qwen3_30b_a3b(*, narrowing: int, layers: int = 48, head: int = 128) -> Shapes:
    """Return the shapes of Qwen3-30B-A3B (128 experts per layer), divided by ``narrowing``.

    ``head`` is the width of an attention head. An engine needs at least one head of keys and
    values.
    """
    hidden, expert = 2048 // narrowing, 768 // narrowing
    query, key_value = 4096 // narrowing, 512 // narrowing
    vocabulary = 151_936
    layer: Shapes = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (128, hidden),
    }
    for index in range(128):
        layer[f"mlp.experts.{index}.gate_proj.weight"] = (expert, hidden)
        layer[f"mlp.experts.{index}.up_proj.weight"] = (expert, hidden)
        layer[f"mlp.experts.{index}.down_proj.weight"] = (hidden, expert)
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        **_repeat(layer, layers=layers),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def tiny() -> Shapes:
    """Return shapes so small that a publish takes hardly longer than the flip of the pointer."""
    return {f"layers.{index}.weight": (64, 64) for index in range(4)}


def _repeat(layer: Mapping[str, tuple[int, ...]], *, layers: int) -> Shapes:
    return {
        f"model.layers.{index}.{name}": shape
        for index in range(layers)
        for name, shape in layer.items()
    }


def num_bytes(shapes: Shapes) -> int:
    """Return the size of all tensors together."""
    return DTYPE.itemsize * sum(math.prod(shape) for shape in shapes.values())


def random_weights(shapes: Shapes) -> Weights:
    """Return different random tensors, each in its own allocation, as parameters are."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    noise = torch.empty(max(sizes) + len(sizes), dtype=DTYPE).uniform_(-1, 1)
    return {
        name: noise[index : index + size].view(shape).clone()
        for index, ((name, shape), size) in enumerate(zip(shapes.items(), sizes, strict=True))
    }


def nudged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with 1 % of the elements changed by one unit in the last place."""
    bits = tensor.clone().view(torch.int16)
    chance = torch.rand(bits.shape)
    bits += (chance < 0.005).short() - (chance > 0.995).short()
    return bits.view(torch.bfloat16)


def warm_destination(shapes: Shapes) -> Weights:
    """Return tensors to receive into. All their pages have been touched."""
    return {name: torch.zeros(shape, dtype=DTYPE).fill_(0) for name, shape in shapes.items()}
