"""Repairs of what vLLM's layerwise reload leaves wrong."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from dbuffer.engine.plan.load_trace import tables_of
from dbuffer.integrations.vllm.packing import has_cpu_experts, has_cpu_kernel

Weights = Iterable[tuple[str, torch.Tensor]]

LayerTensors = tuple[torch.nn.Module, list[dict[str, Any]]]
"""A module, and its own parameters and buffers."""


def own_tensors(module: Any) -> list[dict[str, Any]]:
    """Return a module's own parameters and buffers."""
    return [dict(table) for table in tables_of(module)]


def restore_tensors(before: list[LayerTensors]) -> None:
    """Give each layer its own tensors again, after a load that failed; their content is a mix.

    The next load would complete half a layer with tensors of another version; and a layer that
    failed would stay on the meta device.
    """
    for module, tensors in before:
        get_layerwise_info(module).reset()
        for table, own in zip(tables_of(module), tensors, strict=True):
            table.clear()
            table.update(own)


@contextlib.contextmanager
def settled_registrations(before: list[LayerTensors], weights: Weights) -> Iterator[Weights]:
    """Yield the weights, and keep parameters in their places that a loader makes anew.

    A model's own ``load_weights`` does that with some biases. They stay where they were, since
    kernels read there, and get the new values. Such a loader may put the new one on the meta
    device, where reload has put the layer.
    """
    new: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def register(module: torch.nn.Module, own: Any, name: str, parameter: Any) -> None:
        torch.nn.Module.register_parameter(module, name, parameter)
        old = own.get(name) if name in SKIP_TENSORS else None
        if old is not None and parameter is not None and parameter is not old:
            new.append((module, name, old))

    def settling() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, tensor
            for module, own_name, old in new:
                table, _ = tables_of(module)
                made = table[own_name]
                old.data.copy_(tensor.view(old.shape) if made.is_meta else made.data)
                table[own_name] = old
            new.clear()

    modules = [(module, own) for module, (own, _) in before if own.keys() & SKIP_TENSORS]
    for module, own in modules:
        module.__dict__["register_parameter"] = functools.partial(register, module, own)
    try:
        yield settling()
    finally:
        for module, _own in modules:
            module.__dict__.pop("register_parameter", None)


def has_loaded(module: torch.nn.Module) -> bool:
    """Whether a layer has got tensors, between loading and the end of a reload."""
    info = get_layerwise_info(module)
    return not info.can_load() or info.load_numel > 0  # whole and done, or under way


def has_optional_scales(module: torch.nn.Module) -> bool:
    """Whether a layer loads the scales of its cache.

    vLLM does not require them of a checkpoint; missing ones get defaults after loading.
    """
    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


def finish_caches_without_scales(model: torch.nn.Module) -> None:
    """Let reload set missing scales to their defaults; it would keep the old version's."""
    for module in model.modules():
        if has_optional_scales(module) and not has_loaded(module):
            # Reload looks at nothing else, and begins with the defaults.
            get_layerwise_info(module).load_numel = 1


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings of reload that it found nothing for a layer.

    vLLM warns of layers that need nothing: of rotary embeddings, tied heads, layers that a partial
    version leaves out. A version that lacks more was refused before.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    logger = logging.getLogger(finalize_layerwise_reload.__module__)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def restore_absent_names(before: list[LayerTensors]) -> None:
    """Restore the names with None, of weights that a kernel keeps: reload drops them."""
    for module, tensors in before:
        for table, own in zip(tables_of(module), tensors, strict=True):
            for name, tensor in own.items():
                if tensor is None:
                    table.setdefault(name, None)


def repack_tied(model: torch.nn.Module, loaded: list[torch.nn.Module]) -> None:
    """Pack layers again whose weight is another layer's: reload skips them, and keeps the old one.

    A head tied to the embedding is such a layer. On a CPU vLLM packs most embeddings, too, which
    never multiply by it: that copy was just made anew, and is the one that the head needs.
    """
    owners = {id(weight): module for module in loaded for weight in module.parameters(False)}
    module: Any
    for module in model.modules():
        # Its own: a layer that wraps another for LoRA requests shows what that one has.
        owner = owners.get(id(tables_of(module)[0].get("weight")))
        if owner is None or owner is module or not has_cpu_kernel(module):
            continue
        if hasattr(owner, "cpu_linear") and getattr(module, "bias", None) is None:
            module.cpu_linear = owner.cpu_linear
        else:
            module.quant_method.process_weights_after_loading(module)


def repack_cpu_experts(loaded: list[torch.nn.Module]) -> None:
    """Pack experts again: on a CPU, reload leaves them as they were loaded.

    vLLM (0.28 to 0.33) packs them when it first makes their kernel, and not again. Experts that got
    nothing are still packed.
    """
    module: Any
    for module in loaded:
        if has_cpu_experts(module):
            places = {name: getattr(module, name) for name in ("w13_weight", "w2_weight")}
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
            for name, place in places.items():
                place.data.copy_(getattr(module, name))
                module.register_parameter(name, place)
