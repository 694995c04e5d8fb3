"""`merged_weights`: a peft model's merged weights, computed layer by layer during a publish.

peft merges a model in place, so dbuffer lets peft merge copies. First, peft merges a copy of the
model that has shapes but no data. This merge shows the names of the merged tensors, and whether
peft can merge the model. Later, to publish a tensor, peft merges a full copy of the tensor's layer.
The copy is freed after the tensor is published.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from dbuffer.errors import InvalidWeightsError
from dbuffer.runtime.messages import described
from dbuffer.weights.conversion import as_checkpoint as tensors_as_saved
from dbuffer.weights.lazy_tensor import LazyTensor
from dbuffer.weights.named_tensors import only_tensors, own_tensors


def merged_weights(
    peft_model: PeftModel, *, as_checkpoint: bool = True
) -> dict[str, torch.Tensor | LazyTensor]:
    """Return the merged weights of a peft model, to pass to `WeightSender.send`.

    The active adapters, which ``set_adapter()`` selects, are merged. Names and values are as in the
    checkpoint that ``save_pretrained`` writes for the merged transformers model. If the model is
    not a transformers model, or if ``as_checkpoint`` is False, names and values are as in
    ``copy.deepcopy(peft_model).merge_and_unload().state_dict()``. The model itself is not changed:
    temporary copies are merged, of one layer at a time, or of all tied layers together.

    Each publish merges again, so you can send the same dictionary after every training step. Do
    not train during a send.

    Raises:
        InvalidWeightsError: peft cannot merge the adapters, the base model is quantized or sharded
            or has non-tensors in its state, adapters are disabled, or ``merge_adapter()`` has
            merged an adapter that is not active.
    """
    _check(peft_model)
    stand_ins = {id(tensor): _without_data(tensor) for tensor in own_tensors(peft_model)}
    real_of = {id(stand_ins[id(tensor)]): tensor for tensor in own_tensors(peft_model)}
    merged = _merge_whole(copy.deepcopy(peft_model, dict(stand_ins)))
    state = only_tensors(merged.state_dict(keep_vars=True))
    published = [real_of[id(tensor)] for tensor in state.values() if id(tensor) in real_of]
    layers = _Layers(peft_model.get_base_model(), published)
    weights = {
        name: layers.weight(name, to_be, real_of.get(id(to_be))) for name, to_be in state.items()
    }
    return dict(tensors_as_saved(merged, weights)) if as_checkpoint else weights


def _check(peft_model: Any) -> None:
    tuner = peft_model.base_model if isinstance(peft_model, PeftModel) else None
    if not isinstance(tuner, BaseTuner):
        raise InvalidWeightsError(
            f"a {type(peft_model).__name__} has no adapters that can be merged: pass a PeftModel "
            "(without wrappers around it) with a method that changes weights, such as LoRA"
        )
    if getattr(tuner.model, "quantization_method", None) is not None:
        raise InvalidWeightsError(
            "the base model is quantized, and adapters cannot be merged into quantized "
            "weights: publish the adapter (send_adapter), or train on a base that is not quantized"
        )
    for name, tensor in (*peft_model.named_parameters(), *peft_model.named_buffers()):
        if type(tensor) not in (torch.Tensor, nn.Parameter) or hasattr(tensor, "ds_shape"):
            raise InvalidWeightsError(
                f"tensor {name!r} is a {type(tensor).__name__}, quantized or sharded: adapters can "
                "be merged only into plain, unsharded tensors; publish the adapter (send_adapter)"
            )
        if tensor.is_meta:
            raise InvalidWeightsError(f"tensor {name!r} is on the meta device and has no values")
    for name, layer in peft_model.named_modules():
        if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            _check_layer(name, layer)


def _check_layer(name: str, layer: Any) -> None:
    if layer.disable_adapters:
        raise InvalidWeightsError(
            f"the adapters of {name} are disabled, but peft would merge them: enable them, "
            "or publish the base model"
        )
    if idle := [name for name in layer.merged_adapters if name not in layer.active_adapters]:
        raise InvalidWeightsError(
            f"{name} has inactive adapters merged into it, {', '.join(map(repr, idle))}: "
            "call unmerge_adapter() first, or activate all merged adapters with set_adapter()"
        )


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _merge_whole(peft_model: PeftModel) -> nn.Module:
    try:
        merged: nn.Module = peft_model.merge_and_unload()
    # Which error peft raises depends on the adapters' type, such as LoRA.
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise InvalidWeightsError(
            f"peft cannot merge these adapters: {described(error)}"
        ) from error
    for name, module in merged.named_modules():
        if isinstance(module, BaseTunerLayer):
            raise InvalidWeightsError(
                f"the layer {name} is in the model several times, but peft merges it only once"
            )
    return merged


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or -id(tensor)


class _Layers:
    """Layers that a merge changes. Tied layers (with a common tensor) are merged together."""

    def __init__(self, model: nn.Module, published: list[torch.Tensor]) -> None:
        self._layers = dict(_layers_of(model))
        self._keys_at: dict[int, list[str]] = {}
        for key, layer in self._layers.items():
            for place in {_place(tensor) for tensor in own_tensors(layer)}:
                self._keys_at.setdefault(place, []).append(key)
        shared = (self._keys_at.get(_place(tensor), []) for tensor in published)
        tied = {key for keys in shared if len(keys) > 1 for key in keys}
        # Merge tied layers in the model's order, as peft does.
        together = [key for key in self._layers if key in tied]
        self._merged_with = {key: together if key in tied else [key] for key in self._layers}

    def weight(
        self, name: str, to_be: torch.Tensor, tensor: torch.Tensor | None
    ) -> torch.Tensor | LazyTensor:
        """Return the tensor to publish under a name: ``tensor`` itself, or a lazy tensor.

        ``tensor`` is the unmerged model's tensor, or None if the merge makes a new tensor.
        The result is lazy (computed during the publish) if a merge can change the tensor: it is in
        a layer with adapters, or tied to a tensor of such a layer. ``to_be`` has the merged
        tensor's shape and dtype, without data.
        """
        parts = name.split(".")
        modules = (".".join(parts[:end]) for end in range(1, len(parts)))
        key = owner = next((module for module in modules if module in self._layers), None)
        if owner is None:
            assert tensor is not None  # noqa: S101 - peft makes new tensors only in its layers
            owner = next(iter(self._keys_at.get(_place(tensor), ())), None)
            if owner is None:
                return tensor.detach()
        keys = self._merged_with[owner]
        state = self._state_of(keys)

        @torch.no_grad()
        def fetch() -> torch.Tensor:
            if self._state_of(keys) != state:
                raise InvalidWeightsError(
                    "adapters were switched, merged or disabled since merged_weights() was called: "
                    "call merged_weights() again"
                )
            # Copy the layers and the tensor in one deepcopy: if they are tied, their copies are
            # tied too, and merging a layer's copy also changes the tensor's copy.
            layers, tied_copy = copy.deepcopy(({key: self._layers[key] for key in keys}, tensor))
            merged = {key: _merge_layer(layer) for key, layer in layers.items()}
            if key is None:
                return cast("torch.Tensor", tied_copy).detach()
            weight: torch.Tensor = merged[key].state_dict()[name.removeprefix(f"{key}.")]
            return weight

        identity = 0 if tensor is None else -id(tensor)
        return LazyTensor(to_be.dtype, tuple(to_be.shape), fetch, identity)

    def _state_of(self, keys: list[str]) -> list[tuple[Any, ...]]:
        return [
            (list(module.active_adapters), list(module.merged_adapters), module.disable_adapters)
            for key in keys
            for module in self._layers[key].modules()
            if isinstance(module, BaseTunerLayer)
        ]


def _merge_layer(layer: Any) -> nn.Module:
    if hasattr(layer, "unload_and_optionally_merge_module"):
        merged = layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    else:
        layer.merge()
        merged = layer.get_base_layer()
    assert isinstance(merged, nn.Module)  # noqa: S101 - peft's replacement for the layer
    return merged


def _layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that a merge changes, with names. Skip layers inside another peft layer."""
    inside: str | None = None
    for key, module in model.named_modules():
        if inside is not None and key.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inside = f"{key}."
            # Skip an AuxiliaryTrainingWrapper without adapter layers: its module was trained in
            # full, and merging does not change it.
            if any(isinstance(part, BaseTunerLayer) for part in module.modules()):
                yield key, module
