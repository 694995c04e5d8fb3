"""Checkpoints of small quantized models, each in the format of its method."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.tiny_models import compressed_tensors, save_model, weights_in

GROUP = 32
"""Inputs that share a scale."""

Convert = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""Returns what a checkpoint holds of a layer's weight, by the weight's name."""


def save_quantized(
    directory: Path, seed: int, quantization: dict[str, Any], convert: Convert, dtype: str = ""
) -> Path:
    """Save a checkpoint with quantized layers; with a dtype, all else is of that dtype."""
    from safetensors.torch import save_file

    path = save_model("qwen3", seed, directory)
    config = json.loads((path / "config.json").read_text())
    config |= {"quantization_config": quantization} | ({"dtype": dtype} if dtype else {})
    (path / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in weights_in(path).items():
        if name.endswith("_proj.weight"):
            weights |= convert(name, tensor)
        else:
            weights[name] = tensor.to(getattr(torch, dtype)) if dtype else tensor
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def int4(method: str) -> Callable[[Path, int], Path]:
    """Return a function that saves 4-bit weights; any bits are weights of some model."""
    quantization = {"quant_method": method, **INT4[method]}
    return lambda directory, seed: save_quantized(
        directory, seed, quantization, functools.partial(random_bits, method), "bfloat16"
    )


def random_bits(method: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    base, (num_out, num_in) = name.removesuffix("weight"), tensor.shape
    num_groups = num_in // GROUP

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape).to(torch.int32)

    scales = 0.05 * torch.rand(num_groups, num_out)
    if method == "compressed-tensors":
        return {
            f"{base}weight_packed": bits(num_out, num_in // 8),
            f"{base}weight_scale": scales.T.bfloat16().contiguous(),
            f"{base}weight_shape": torch.tensor([num_out, num_in]),
        }
    if method == "awq":
        return {
            f"{base}qweight": bits(num_in, num_out // 8),
            f"{base}qzeros": bits(num_groups, num_out // 8),
            f"{base}scales": scales.bfloat16(),
        }
    return {
        f"{base}qweight": bits(num_in // 8, num_out),
        f"{base}qzeros": torch.full((num_groups, num_out // 8), 0x77777777, dtype=torch.int32),
        f"{base}scales": scales.bfloat16(),
        f"{base}g_idx": torch.arange(num_in, dtype=torch.int32) // GROUP,
    }


_BITS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
INT4: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "compressed-tensors": compressed_tensors(
        "pack-quantized", {**_BITS, "group_size": GROUP, "dynamic": False}
    ),
}


def save_int8(
    directory: Path,
    seed: int,
    strategy: str = "channel",
    static: bool = False,
    *,
    caches: bool = False,
    leave_out: bool = False,
) -> Path:
    """Save a checkpoint in the format of compressed-tensors, weights and inputs of 8 bits.

    Args:
        strategy: what has a scale of its own, a ``channel`` or a ``tensor``.
        static: whether the checkpoint has scales of the inputs.
        caches: whether the caches are quantized.
        leave_out: whether the checkpoint lacks the scales of the caches.
    """
    inputs = {"strategy": "tensor"} if static else {"strategy": "token"}
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    quantization = compressed_tensors(
        "int-quantized",
        {**bits, "strategy": strategy, "dynamic": False},
        {**bits, **inputs, "dynamic": not static},
    )
    if caches:
        scheme = {**bits, "type": "float", "strategy": "tensor", "dynamic": False}
        quantization["kv_cache_scheme"] = scheme

    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        per_channel = strategy == "channel"
        largest = tensor.abs().amax(1, keepdim=True) if per_channel else tensor.abs().max()
        scale = largest / 127
        made = {name: (tensor / scale).round().to(torch.int8)}
        made[f"{name}_scale"] = scale if per_channel else scale.reshape(1)
        if static:
            scale = 0.05 + tensor.abs().mean().reshape(1) / 10
            made[name.replace("weight", "input_scale")] = scale
        if caches and not leave_out and name.endswith(("k_proj.weight", "v_proj.weight")):
            # Far from the default: a version that lacks them must show.
            key = name.removesuffix("_proj.weight")[-1]
            made[name.replace("weight", f"{key}_scale")] = torch.tensor([40.0])
        return made

    return save_quantized(directory, seed, quantization, convert)


def save_float8(directory: Path, seed: int) -> Path:
    """Save a checkpoint in the format of compressed-tensors, with a scale for each channel."""
    bits = {"num_bits": 8, "type": "float", "symmetric": True}
    quantization = compressed_tensors(
        "float-quantized",
        {**bits, "strategy": "channel", "dynamic": False},
        {**bits, "strategy": "token", "dynamic": True},
    )

    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = tensor.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    return save_quantized(directory, seed, quantization, convert)
