"""`Packing` for vLLM: processes a layer's weights beside the engine, with vLLM's own functions.

After vLLM has loaded a layer, it calls ``process_weights_after_loading`` of the layer's
quantization method, which packs or quantizes the weights. This module calls that method for a
shadow, a copy of the layer that serves no requests. The results are images, which a switch copies
into the serving layer (`engine/plan/copy_plan.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from dbuffer.engine.plan.copy_plan import NotAloneError
from dbuffer.engine.plan.load_trace import tables_of
from dbuffer.errors import UnsupportedError

_HOOK = "process_weights_after_loading"


def packs(layer: torch.nn.Module, *, is_as_loaded: bool) -> bool:
    """Whether vLLM packs or quantizes the weights of a layer after loading them."""
    method = getattr(layer, "quant_method", None)
    # vLLM processes the scales of KV caches later, together with the attention layers.
    if isinstance(method, (UnquantizedFusedMoEMethod, BaseKVCacheMethod)):
        return has_cpu_experts(layer)
    if not isinstance(method, QuantizeMethodBase):
        return False
    has_hook = getattr(type(method), _HOOK) is not getattr(QuantizeMethodBase, _HOOK)
    return has_hook and (not is_as_loaded or has_cpu_kernel(layer))


def pack(shadow: Any, layer: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Pack or quantize the weights of a shadow (a copy of a layer), as vLLM does after loading."""
    _restore_form(shadow, layer)
    copies: dict[int, tuple[Any, Any]] = {}
    _copy_hooks(shadow, copies)
    vars(shadow).pop("_already_called_process_weights_after_loading", None)
    method = shadow.quant_method
    alone = _WithoutOtherRanks()  # type: ignore[no-untyped-call]
    with alone, onednn_kernels_keep_scales(_dtype_of(shadow)):
        if isinstance(method, UnquantizedFusedMoEMethod):
            # vLLM packs experts when it makes their kernel, and the kernel keeps nothing from
            # packing.
            copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(shadow)
        else:
            method.process_weights_after_loading(shadow)
    return list(copies.values())


def computed(layer: Any) -> torch.Tensor | None:
    """Return a layer's output for a fixed input, or None if the layer's input width is unknown."""
    widths = ("embedding_dim", "input_size_per_partition", "input_size")
    width = next((getattr(layer, name) for name in widths if hasattr(layer, name)), None)
    if width is None:
        return None
    tensors = (tensor for table in tables_of(layer) for tensor in table.values())
    device = next(tensor.device for tensor in tensors if tensor is not None)
    numbers = torch.arange(4 * width, dtype=torch.float32).mul_(12.9898).sin_()
    rows = numbers.view(4, width).to(device, _dtype_of(layer))
    result: torch.Tensor = layer.quant_method.apply(layer, rows)
    return result


def has_cpu_kernel(layer: torch.nn.Module) -> bool:
    """Whether a layer computes from a packed copy of its weight, on a CPU.

    Other layers on a CPU compute from the weight itself.
    """
    return bool(getattr(getattr(layer, "cpu_linear", None), "__closure__", None))


def has_cpu_experts(layer: Any) -> bool:
    """Whether a layer has unquantized experts in main memory, which vLLM packs for the CPU."""
    method = getattr(layer, "quant_method", None)
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.moe_kernel is not None
        and layer.w13_weight.device.type == "cpu"
    )


def has_optional_scales(module: torch.nn.Module) -> bool:
    """Whether a layer has scales of a KV cache, which are optional in a checkpoint."""
    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


@contextlib.contextmanager
def onednn_kernels_keep_scales(dtype: torch.dtype) -> Iterator[None]:
    """Make vLLM create int8 CPU kernels that keep their scales alive and compute in ``dtype``.

    oneDNN keeps only the address of the scales. vLLM's reload (0.28 to 0.33) frees the scales after
    a copy, so the kernel would read memory that was reused. vLLM's own kernels compute in torch's
    default dtype, which this thread must not set, because it would change for the engine too.
    """
    make = _custom_ops.create_onednn_scaled_mm

    def make_and_keep(weight: Any, scales: Any, _default_dtype: Any, *args: Any) -> Any:
        kernel = make(weight, scales, dtype, *args)
        kernel.scales = scales
        return kernel

    _custom_ops.create_onednn_scaled_mm = make_and_keep
    try:
        yield
    finally:
        _custom_ops.create_onednn_scaled_mm = make


class _WithoutOtherRanks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that refuses collectives in this thread, because other ranks may not join them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise NotAloneError("all ranks quantize a layer with the same scales")
        return func(*args, **(kwargs or {}))


def _dtype_of(layer: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return dtype


def _restore_form(shadow: Any, layer: Any) -> None:
    """Give the tensors of a shadow the form that vLLM's loaders expect.

    Tensors that packing added are removed, and the original classes of parameters are restored.
    """
    made_of = get_layerwise_info(layer).restore_metadata
    for table, live, made in zip(tables_of(shadow), tables_of(layer), made_of, strict=True):
        for name, tensor in live.items():
            if table[name] is tensor and tensor is not None and name not in SKIP_TENSORS:
                del table[name]
        for name, form in made.items():
            tensor = table.get(name)
            if tensor is None:
                raise UnsupportedError(f"{name} is not loaded")
            tensor.__class__ = form.__class__
            tensor.__dict__.update(form.__dict__)


def _copy_hooks(owner: Any, copies: dict[int, tuple[Any, Any]]) -> None:
    for name, value in list(vars(owner).items()):
        if not hasattr(type(value), _HOOK) or isinstance(value, torch.nn.Module):
            continue
        if id(value) not in copies:
            copies[id(value)] = value, copy.copy(value)
            _copy_hooks(copies[id(value)][1], copies)
        vars(owner)[name] = copies[id(value)][1]
