"""Repairs of faults of vLLM's layerwise reload."""

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


def tensors_of_layers(model: torch.nn.Module) -> list[LayerTensors]:
    """Return each layer with its present tensors."""
    return [(module, [dict(table) for table in tables_of(module)]) for module in model.modules()]


def restore_tensors(before: list[LayerTensors]) -> None:
    """After a failed load, put the earlier tensors back into their layers. Their values are a mix.

    Otherwise the next load would fill up a half-loaded layer with tensors of another version, and
    some layers would stay on the meta device.
    """
    for module, tensors in before:
        get_layerwise_info(module).reset()
        for table, table_before in zip(tables_of(module), tensors, strict=True):
            table.clear()
            table.update(table_before)


@contextlib.contextmanager
def parameters_stay_in_place(before: list[LayerTensors], weights: Weights) -> Iterator[Weights]:
    """Yield the weights. If a loader replaces a parameter, put the old one back with new values.

    Some models' ``load_weights`` replaces biases, but kernels read at the old addresses. The new
    parameter has no values if the loader makes it on the meta device, where reload has put the
    layer; then the published tensor is copied.
    """
    made: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def register(module: torch.nn.Module, parameters: Any, name: str, parameter: Any) -> None:
        torch.nn.Module.register_parameter(module, name, parameter)
        old = parameters.get(name) if name in SKIP_TENSORS else None
        if old is not None and parameter is not None and parameter is not old:
            made.append((module, name, old))

    def settling() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, tensor
            for module, parameter_name, old in made:
                table, _ = tables_of(module)
                new = table[parameter_name]
                old.data.copy_(tensor.view(old.shape) if new.is_meta else new.data)
                table[parameter_name] = old
            made.clear()

    for module, (parameters, _) in before:
        if parameters.keys() & SKIP_TENSORS:
            module.__dict__["register_parameter"] = functools.partial(register, module, parameters)
    try:
        yield settling()
    finally:
        for module, _tensors in before:
            module.__dict__.pop("register_parameter", None)


def has_loaded(module: torch.nn.Module) -> bool:
    """Whether vLLM has loaded a tensor into a layer, in a reload that has not ended."""
    info = get_layerwise_info(module)
    return not info.can_load() or info.load_numel > 0  # finished, or begun


def has_optional_scales(module: torch.nn.Module) -> bool:
    """Whether a layer loads scales of its KV cache, which a checkpoint need not have."""
    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


def finish_caches_without_scales(model: torch.nn.Module) -> None:
    """Let the reload set scales that the version lacks to their defaults, as a start does."""
    for module in model.modules():
        if has_optional_scales(module) and not has_loaded(module):
            # A reload finishes only layers with loaded elements, and finishing sets the defaults.
            get_layerwise_info(module).load_numel = 1


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress vLLM's warnings about layers that got no weights.

    Rotary embeddings and tied heads need none, and a partial load leaves layers out. A version that
    lacks required weights was refused before.
    """

    def is_logged(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    logger = logging.getLogger(finalize_layerwise_reload.__module__)
    logger.addFilter(is_logged)
    try:
        yield
    finally:
        logger.removeFilter(is_logged)


def restore_absent_names(before: list[LayerTensors]) -> None:
    """Restore names whose parameter is None, which reload drops: a kernel holds their weights."""
    for module, tensors in before:
        for table, table_before in zip(tables_of(module), tensors, strict=True):
            for name, tensor in table_before.items():
                if tensor is None:
                    table.setdefault(name, None)


def repack_tied(model: torch.nn.Module, loaded: list[torch.nn.Module]) -> None:
    """Pack layers that share the weight of another layer, such as a head tied to the embedding.

    vLLM's reload skips them, so they would compute with the old packed copy. On a CPU vLLM packs
    most embeddings too, and does not use that copy: the head takes it over.
    """
    owners = {id(weight): module for module in loaded for weight in module.parameters(False)}
    module: Any
    for module in model.modules():
        # Not ``module.weight``: a LoRA wrapper returns the weight of the layer that it wraps.
        owner = owners.get(id(tables_of(module)[0].get("weight")))
        if owner is None or owner is module or not has_cpu_kernel(module):
            continue
        if hasattr(owner, "cpu_linear") and getattr(module, "bias", None) is None:
            module.cpu_linear = owner.cpu_linear
        else:
            module.quant_method.process_weights_after_loading(module)


def repack_cpu_experts(loaded: list[torch.nn.Module]) -> None:
    """Pack the loaded experts on a CPU, which vLLM's reload (0.28 to 0.33) does not do.

    vLLM packs experts only when it makes their kernel. Experts that were not loaded are packed.
    """
    module: Any
    for module in loaded:
        if has_cpu_experts(module):
            places = {name: getattr(module, name) for name in ("w13_weight", "w2_weight")}
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
            for name, place in places.items():
                place.data.copy_(getattr(module, name))
                module.register_parameter(name, place)
