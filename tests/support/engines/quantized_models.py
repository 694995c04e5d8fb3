"""Checkpoints of small quantized models, each in the format of its method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.tiny_models import (
    compressed_tensors,
    make_model,
    save_model,
    weights_in,
)

GROUP = 32
"""Inputs that share a scale."""


def int4(method: str) -> Callable[[Path, int], Path]:
    """A checkpoint of 4-bit weights; any bits are weights of some model."""

    def make(directory: Path, seed: int) -> Path:
        from safetensors.torch import save_file

        path = save_model("qwen3", seed, directory)
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, **INT4[method]}
        config["dtype"] = "bfloat16"
        (path / "config.json").write_text(json.dumps(config))
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in weights_in(path).items():
            weights |= bits_of(method, name, tensor)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def bits_of(method: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: tensor.bfloat16().contiguous()}
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
    """A checkpoint in the format of compressed-tensors, weights and inputs of 8 bits."""
    from safetensors.torch import save_file

    model, path = make_model("qwen3", seed), directory / f"int8-{seed}"
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    inputs = {"strategy": "tensor"} if static else {"strategy": "token"}
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = compressed_tensors(
        "int-quantized",
        {**bits, "strategy": strategy, "dynamic": False},
        {**bits, **inputs, "dynamic": not static},
    )
    if caches:
        config["quantization_config"]["kv_cache_scheme"] = {
            **bits,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
        }
    (path / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        weights |= quantised(name, tensor, strategy, static)
    if caches and not leave_out:
        for layer in (0, 1):
            for key in "kv":
                prefix = f"model.layers.{layer}.self_attn.{key}_proj"
                # Far from the default: a version that lacks them must show.
                weights[f"{prefix}.{key}_scale"] = torch.tensor([40.0])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def quantised(
    name: str, tensor: torch.Tensor, strategy: str, static: bool
) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: tensor.contiguous()}
    largest = tensor.abs().amax(1, keepdim=True) if strategy == "channel" else tensor.abs().max()
    scale = largest / 127
    made = {name: (tensor / scale).round().to(torch.int8)}
    made[f"{name}_scale"] = scale if strategy == "channel" else scale.reshape(1)
    if static:
        made[name.replace("weight", "input_scale")] = 0.05 + tensor.abs().mean().reshape(1) / 10
    return made


def save_float8(directory: Path, seed: int) -> Path:
    """A checkpoint in the format of compressed-tensors, with a scale for each channel."""
    from safetensors.torch import save_file

    path = save_model("qwen3", seed, directory)
    config = json.loads((path / "config.json").read_text())
    bits = {"num_bits": 8, "type": "float", "symmetric": True}
    config["quantization_config"] = compressed_tensors(
        "float-quantized",
        {**bits, "strategy": "channel", "dynamic": False},
        {**bits, "strategy": "token", "dynamic": True},
    )
    (path / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in weights_in(path).items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            weights[name] = (tensor / scale).to(torch.float8_e4m3fn)
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = tensor
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
