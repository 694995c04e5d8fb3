"""`CopyPlan`: how a switch fills each layer of a model, for versions of one layout.

A layout is the names, dtypes and shapes of a version's tensors. Most layers are filled by copies. A
layer is left to the engine's reload if its loader computes values, or if other values depend on the
layer. If a layer that must be reloaded shares published tensors with other layers, there is no
plan.

A layer whose weights the engine packs or quantizes is filled from an `Image`. Processing such a
layer changes the form of parameters, fills further parameters (scales), or fills a kernel's memory
that no copy can reach. So an image makes a second copy of the layer, its shadow, and loads and
processes the shadow while the layer serves. The switch gives the results to the layer.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch

from dbuffer.engine.plan.live_model import Places
from dbuffer.engine.plan.load_trace import (
    Copy,
    LoadTrace,
    TracedTensor,
    form_of,
    same_bytes,
    tables_of,
    unwrapped,
)
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import is_of_draft
from dbuffer.runtime.lazy import cached_property
from dbuffer.runtime.messages import listed

_HOLDING_TENSORS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.Size, enum.Enum)
"""Types of attributes that can be compared. Attributes of other types may hold anything."""


Tensors = Mapping[str, torch.Tensor]

MIN_COPIED = 0.5
"""Smallest share of all elements that copies must load. A reload walks the whole model even if it
loads only a part, so a plan with a smaller share of copies saves little time."""


class NotAloneError(Exception):
    """Error: only all ranks together can process a layer, so the engine's reload must do it."""


class Packing(Protocol):
    """An engine's way of packing layers: reordering or quantizing the weights that were loaded.

    A layer gets an image (is packed while it serves) only if packing changes nothing outside it.
    """

    def packs(self, layer: torch.nn.Module, *, is_as_loaded: bool) -> bool:
        """Whether the engine processes this layer after loading, so that copies are not enough.

        ``is_as_loaded``: whether the layer's parameters have the form that loaders fill.
        """
        ...

    def pack(self, shadow: Any, layer: torch.nn.Module) -> Sequence[tuple[Any, Any]]:
        """Process a shadow (second copy) of the layer, into which weights were loaded.

        Return the objects that processing changes besides the layer's tensors, in pairs: the
        layer's object, and the shadow's. Raise `NotAloneError` if processing needs other ranks.
        """
        ...

    def computed(self, layer: Any) -> torch.Tensor | None:
        """Return the layer's output for a fixed input, or None if the layer cannot be called."""
        ...


class PackedLayer(NamedTuple):
    name: str
    layer: torch.nn.Module
    packing: Packing
    loaded: Mapping[str, str]
    device: torch.device


class Image:
    """Shadow (second copy) of a layer, loaded with a version's weights and processed.

    A switch gives the shadow's tensors and attributes to the layer. If the layer is on a device,
    the shadow's tensors wait in page-locked main memory, because the device may not have room for
    all shadows.

    Raises:
        NotAloneError: processing needs other ranks. Any other error: processing failed.
    """

    def __init__(
        self,
        packed: PackedLayer,
        trace: Mapping[str, TracedTensor],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self.name = packed.name
        self._layer = layer = packed.layer
        self._packing = packed.packing
        shadow: torch.nn.Module = object.__new__(type(layer))
        shadow.__dict__.update(layer.__dict__)
        for table in _HOLDING_TENSORS:
            shadow.__dict__[table] = layer.__dict__[table].copy()
        parameters, buffers = tables_of(shadow)
        for name, traced_name in packed.loaded.items():
            filled = trace[traced_name].filled(tensors, packed.device)
            if name in buffers:
                buffers[name] = filled
            else:
                parameters[name] = torch.nn.Parameter(filled, requires_grad=False)
        changed = [(layer, shadow), *packed.packing.pack(shadow, layer)]
        self._tensors: list[_Changed] = []
        """Values to copy into the layer's tensors, which CUDA graphs read at fixed addresses."""
        self._attributes: list[_Changed] = []
        for change in _changed_by(changed):
            is_of_layer = (
                change.owner is layer and change.name in parameters.keys() | buffers.keys()
            )
            is_tensor = is_of_layer or change.is_copied()
            (self._tensors if is_tensor else self._attributes).append(change)
        self._tensors = [change._replace(value=_waiting(change.value)) for change in self._tensors]
        self._replaced: list[Any] = []
        """Old values of the layer's attributes, kept alive as long as this image."""
        self.copies()

    @property
    def replaced(self) -> set[tuple[int, str]]:
        changes = (*self._tensors, *self._attributes)
        return {(id(change.owner), change.name) for change in changes}

    def copies(self) -> list[Copy]:
        for change in self._tensors:
            if not change.is_copied():
                raise UnsupportedError(
                    f"{self.name}.{change.name} cannot be copied into: the engine's processing of "
                    "loaded weights changes its shape, dtype or strides, or it shares memory"
                )
        return [(change.live.detach(), change.value) for change in self._tensors]

    def matches(self) -> bool:
        """Whether the layer has the tensors of this image, and its attributes have the same effect.

        If the attributes' values cannot be compared, run the layer twice for the same input, with
        its own attributes and with the image's, and compare the two outputs.
        """
        if not all(same_bytes(*copy) for copy in self.copies()):
            return False
        if all(isinstance(change.value, _VALUES) for change in self._attributes):
            return all(change.live == change.value for change in self._attributes)
        before = [change._replace(value=change.live) for change in self._attributes]
        live = self._packing.computed(self._layer)
        try:
            _set_all(self._attributes)
            computed = self._packing.computed(self._layer)
        finally:
            _set_all(before)
        return live is not None and computed is not None and same_bytes(live, computed)

    def hand_over(self) -> None:
        """Give the layer the attributes of its processed copy. A second call does the same again.

        The layer's old attributes stay alive, and are freed with this image.
        """
        self._replaced = [change.live for change in self._attributes]
        _set_all(self._attributes)


class _Changed(NamedTuple):
    """Tensor or attribute of a layer that has another value in the layer's processed copy."""

    owner: Any
    name: str
    value: Any

    @property
    def live(self) -> Any:
        return getattr(self.owner, self.name, None)

    def is_copied(self) -> bool:
        """Whether the switch copies this value into the live tensor, or replaces the tensor.

        For a copy, value and live tensor must have equal shape, strides and dtype, and no other
        tensor may share the live tensor's memory.
        """
        live = self.live
        return (
            isinstance(live, torch.Tensor)
            and isinstance(self.value, torch.Tensor)
            and form_of(live) == form_of(self.value)
            and live.untyped_storage().nbytes() == live.nbytes
        )


def _set_all(attributes: Sequence[_Changed]) -> None:
    for change in attributes:
        vars(change.owner)[change.name] = change.value


def _changed_by(changed: Sequence[tuple[Any, Any]]) -> Iterator[_Changed]:
    """Yield tensors and attributes that differ in a pair of a live object and a processed copy."""
    copies = {id(copy) for _, copy in changed}
    layer, shadow = changed[0]
    for processed, live in zip(tables_of(shadow), tables_of(layer), strict=True):
        for name, tensor in processed.items():
            if tensor is not None and tensor.numel() and tensor is not live.get(name):
                yield _Changed(layer, name, tensor.detach())
    for owner, copy in changed:
        for name, value in list(vars(copy).items()):
            if isinstance(value, MethodType) and value.__self__ is copy:
                # Bind the method to the live object. A copy that has a method bound to itself stays
                # in memory until garbage collection.
                vars(copy)[name] = value = MethodType(value.__func__, owner)
            before = vars(owner).get(name)
            is_same = value is before or (isinstance(value, MethodType) and value == before)
            if not is_same and id(value) not in copies and name not in _HOLDING_TENSORS:
                yield _Changed(owner, name, value)


def _waiting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CUDA tensor in page-locked main memory, and any other tensor itself."""
    if not tensor.is_cuda:
        return tensor
    shape, stride, dtype = form_of(tensor)
    return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True).copy_(tensor)


def packed_layers(
    model: torch.nn.Module, packing: Packing, trace: LoadTrace, derived: Collection[str]
) -> dict[str, PackedLayer]:
    """Return the layers that loaders fill by copies only, and that the engine then processes.

    ``derived``: names of layers that a reload changes after it has copied tensors into them.
    """
    names = {
        id(parameter): unwrapped(name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if unwrapped(name) in trace.tensors
    }
    layers: dict[str, PackedLayer] = {}
    for path, layer in model.named_modules():
        tensors = dict(itertools.chain(*(table.items() for table in tables_of(layer))))
        loaded = {}
        for name, tensor in tensors.items():
            traced_name = unwrapped(f"{path}.{name}" if path else name)
            if traced_name not in trace.tensors:  # a tied tensor, under its other name
                traced_name = names.get(id(tensor), traced_name)
            if traced_name in trace.tensors:
                loaded[name] = traced_name
        if not loaded or not all(map(trace.is_copied, loaded.values())):
            continue
        live = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        forms = {name: form_of(tensor) for name, tensor in live.items()}
        is_as_loaded = forms == {name: trace.tensors[key].form for name, key in loaded.items()}
        layer_name = unwrapped(path)
        if packing.packs(layer, is_as_loaded=is_as_loaded and layer_name not in derived):
            device = next(iter([*live.values(), *model.parameters()])).device
            layers[layer_name] = PackedLayer(layer_name, layer, packing, loaded, device)
    return layers


@dataclass(eq=False)
class CopyPlan:
    """Copies that switch a model to any version of one layout (names, dtypes and shapes).

    :func:`plan_copies` makes a plan.
    """

    model: torch.nn.Module
    traced: Mapping[str, TracedTensor]
    """Traces of the parameters and buffers that copies fill, in the live model or in images
    (layers' packed weights), keyed by name."""
    parameters: Tensors
    """Tensors of the serving model that copies fill directly, keyed by their names in the trace."""
    packed: Mapping[str, PackedLayer]
    reloaded: Mapping[str, str]
    """Reasons why layers are left to the engine's reload, keyed by the layer's name."""
    reloaded_sources: Collection[str]
    verified_for: Mapping[str, int] | None = None
    """Digests of tensors, keyed by name, or None before the verification. A verification first
    loads other values. For these tensors no other values are safe, so the verification holds only
    for versions with equal digests."""
    places: Places = field(init=False)
    """The model's modules, and the addresses of the written tensors, when the plan was made."""

    def __post_init__(self) -> None:
        self.places = Places(self.model, self.written)

    @cached_property
    def written(self) -> Sequence[torch.Tensor]:
        """Tensors of the serving model that a switch writes, also in layers that have images."""
        layers = [packed.layer for packed in self.packed.values()]
        images = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
        return [*self.parameters.values(), *images]

    @cached_property
    def is_in_main_memory(self) -> bool:
        return all(tensor.device.type == "cpu" for tensor in self.written)

    @cached_property
    def all_layers(self) -> set[str]:
        return {*map(layer_of, self.parameters), *self.packed, *self.reloaded}

    @cached_property
    def copied_bytes(self) -> int:
        return sum(traced.copied_bytes for traced in self.traced.values())

    def copies_of(self, tensors: Tensors) -> dict[str, list[Copy]]:
        return {
            name: self.traced[name].bind(parameter, tensors)
            for name, parameter in self.parameters.items()
        }


def plan_copies(
    model: torch.nn.Module,
    trace: LoadTrace,
    check: ShapeCheck,
    *,
    packing: Packing | None,
    derived: Collection[str],
    reloaded: Mapping[str, str],
) -> CopyPlan:
    """Plan the copies that give a live model's parameters the result of a traced load.

    ``reloaded`` has the layers to leave to the engine's reload, each with the reason. To load only
    these layers, the plan has a trace of such a load, made with ``check``. ``derived``: layers that
    a reload changes after it has copied tensors into them. Raise :class:`UnsupportedError` if
    copies would load too little of the model.
    """
    live = {
        unwrapped(name): tensor
        for tensors in (model.named_parameters, model.named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    }
    packed = packed_layers(model, packing, trace, derived) if packing is not None else {}
    packed = {name: layer for name, layer in packed.items() if name not in reloaded}
    in_images = {name for layer in packed.values() for name in layer.loaded.values()}
    reloaded = {**_refused_layers(live, trace, without=in_images), **reloaded}
    traced = {name: t for name, t in trace.tensors.items() if layer_of(name) not in reloaded}
    sources = _sources_to_reload(trace, reloaded, check) if reloaded else ()
    if not in_images <= traced.keys():  # an image's layer is tied to a reloaded layer
        raise UnsupportedError(listed(list(reloaded.values()), "; "))
    parameters = {name: live[name] for name in traced if name not in in_images}
    plan = CopyPlan(model, traced, parameters, packed, reloaded, sources)
    _require_all_parameters(plan)
    return plan


def _refused_layers(live: Tensors, trace: LoadTrace, *, without: Collection[str]) -> dict[str, str]:
    refused = trace.refused
    for name, traced in trace.tensors.items():
        tensor = live.get(name)
        if name in without or name in refused:
            continue
        if tensor is None or form_of(tensor) != traced.form:
            refused[name] = "is stored in another form"
        elif tensor.untyped_storage().nbytes() != tensor.nbytes:
            refused[name] = "shares its memory with others"
    return {layer_of(name): f"{name} {reason}" for name, reason in refused.items()}


def _sources_to_reload(
    trace: LoadTrace, layers: Mapping[str, str], check: ShapeCheck
) -> Collection[str]:
    """Return the published tensors that the engine's own reload loads into these layers.

    Raise an error if one of these tensors is also loaded into another layer, or if the reload would
    load so much of the model that copies are not worthwhile.
    """
    reasons = listed(list(dict.fromkeys(layers.values())), "; ")
    reloaded = {name: t for name, t in trace.tensors.items() if layer_of(name) in layers}
    copied = [traced for name, traced in trace.tensors.items() if name not in reloaded]
    num_loaded = sum(traced.num_loaded for traced in trace.tensors.values())
    if sum(traced.num_loaded for traced in copied) < MIN_COPIED * num_loaded:
        raise UnsupportedError(reasons)
    sources = trace.offered - {op.source for traced in copied for op in traced.ops}
    try:
        alone = check.of_part(sources)
    except WeightsMismatchError as error:
        raise UnsupportedError(f"{reasons}; it cannot be loaded alone: {error}") from error
    if alone.tensors != reloaded or alone.offered != sources:
        raise UnsupportedError(f"{reasons}; these layers share published tensors with others")
    return sources


def _require_all_parameters(plan: CopyPlan) -> None:
    """Refuse a plan that leaves out a parameter which the engine's reload would fill."""
    # Include buffers: loaders may fill a parameter through a buffer that is a view of it.
    tensors = [*plan.model.named_parameters(), *plan.model.named_buffers()]
    loaded = {address_of(tensor) for tensor in plan.written} | {
        address_of(tensor) for name, tensor in tensors if layer_of(unwrapped(name)) in plan.reloaded
    }
    has_draft = any(is_of_draft(f"{layer}.") for layer in plan.all_layers)
    left_out = [
        f"{name} was not published"
        for name, parameter in plan.model.named_parameters()
        if parameter.nbytes and address_of(parameter) not in loaded
        if has_draft or not is_of_draft(name)
    ]
    if left_out:
        raise UnsupportedError(listed(left_out, "; "))


def layer_of(parameter: str) -> str:
    """Return the name of a parameter's layer."""
    return parameter.rpartition(".")[0]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
