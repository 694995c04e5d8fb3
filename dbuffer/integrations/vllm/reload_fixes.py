"""Repairs of faults in vLLM's layerwise reload, which loads new weights into a serving model."""

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
    """Return each layer of a model with its current parameters and buffers."""
    return [(module, [dict(table) for table in tables_of(module)]) for module in model.modules()]


def restore_tensors(before: list[LayerTensors]) -> None:
    """Put the tensors from before a failed load back into their layers.

    The tensors then have values of two versions. But the layers can be loaded again: without this
    function, some layers would stay on the meta device, or be half loaded at the start of the next
    load.
    """
    for module, tensors in before:
        get_layerwise_info(module).reset()
        for table, table_before in zip(tables_of(module), tensors, strict=True):
            table.clear()
            table.update(table_before)


@contextlib.contextmanager
def parameters_stay_in_place(before: list[LayerTensors], weights: Weights) -> Iterator[Weights]:
    """Yield the weights to load, and keep each parameter at its address.

    The ``load_weights`` method of some models replaces biases by new parameters, but kernels read
    the old addresses. After such a replacement, the new values are copied into the old parameter,
    and the old parameter is put back. A new parameter on the meta device has no values. In this
    case the published tensor is copied.
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
    """Whether vLLM's running reload has loaded a tensor into a layer."""
    info = get_layerwise_info(module)
    return not info.can_load() or info.load_numel > 0  # the layer is finished, or has begun


def has_optional_scales(module: torch.nn.Module) -> bool:
    """Whether a layer has scales of a KV cache, which are optional in a checkpoint."""
    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


def finish_caches_without_scales(model: torch.nn.Module) -> None:
    """Make vLLM's reload set missing scales of KV caches to their defaults, as at the start."""
    for module in model.modules():
        if has_optional_scales(module) and not has_loaded(module):
            # vLLM's reload sets the defaults when it finishes a layer, which needs a loaded
            # element.
            get_layerwise_info(module).load_numel = 1


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress vLLM's warnings about layers that got no weights during a reload.

    Rotary embeddings and tied heads need no weights, and a partial load omits layers. dbuffer has
    checked before that the version has all required weights.
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
    """Restore parameters that are None, which vLLM's reload removes from their layers.

    A parameter is None if a kernel holds its weights.
    """
    for module, tensors in before:
        for table, table_before in zip(tables_of(module), tensors, strict=True):
            for name, tensor in table_before.items():
                if tensor is None:
                    table.setdefault(name, None)


def repack_tied(model: torch.nn.Module, loaded: list[torch.nn.Module]) -> None:
    """Pack layers that share the weight of another layer, such as a head tied to the embedding.

    vLLM's reload skips such layers, so a tied head would compute with its old packed copy. If vLLM
    has packed the embedding too, the head uses the embedding's packed copy.
    """
    owners = {id(weight): module for module in loaded for weight in module.parameters(False)}
    module: Any
    for module in model.modules():
        # Not ``module.weight``, because a LoRA wrapper returns the weight of its inner layer.
        owner = owners.get(id(tables_of(module)[0].get("weight")))
        if owner is None or owner is module or not has_cpu_kernel(module):
            continue
        if hasattr(owner, "cpu_linear") and getattr(module, "bias", None) is None:
            module.cpu_linear = owner.cpu_linear
        else:
            module.quant_method.process_weights_after_loading(module)


def repack_cpu_experts(loaded: list[torch.nn.Module]) -> None:
    """Pack newly loaded experts on a CPU, which vLLM's reload (0.28 to 0.33) does not do.

    vLLM packs experts only when it makes their kernel, at the engine's start.
    """
    module: Any
    for module in loaded:
        if has_cpu_experts(module):
            places = {name: getattr(module, name) for name in ("w13_weight", "w2_weight")}
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
            for name, place in places.items():
                place.data.copy_(getattr(module, name))
                module.register_parameter(name, place)
