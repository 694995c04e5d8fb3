"""`CpuPacking`: vLLM's packing of layers on a CPU, where it touches nothing but the layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_NUM_ROWS = 4


class CpuPacking:
    """Packing of vLLM's layers on a CPU, for images of them (`engine/plan/images.py`).

    Linear layers and heads are packed into memory of a kernel, experts into another form of their
    parameters.
    """

    def packs(self, layer: torch.nn.Module) -> bool:
        method: Any = getattr(layer, "quant_method", None)
        if type(method) is UnquantizedFusedMoEMethod:
            return method.moe_kernel is not None
        # A kernel that holds nothing computes from the weights as they were loaded.
        kernel = getattr(layer, "cpu_linear", None)
        is_linear = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return is_linear and bool(getattr(kernel, "__closure__", None))

    def pack(self, layer: Any) -> None:
        method = layer.quant_method
        if isinstance(method, UnquantizedFusedMoEMethod):
            # vLLM does it once, when it makes the kernel, which keeps nothing of the layer.
            copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(layer)
        else:
            method.process_weights_after_loading(layer)

    def computed(self, layer: Any) -> torch.Tensor | None:
        method = layer.quant_method
        if isinstance(method, UnquantizedFusedMoEMethod):
            return None
        width = next(
            getattr(layer, name)
            for name in ("embedding_dim", "input_size_per_partition", "input_size")
            if hasattr(layer, name)
        )
        numbers = torch.arange(_NUM_ROWS * width, dtype=torch.float32).mul_(12.9898).sin_()
        rows = numbers.view(_NUM_ROWS, width).to(layer.weight.dtype)
        result: torch.Tensor = method.apply(layer, rows)
        return result
