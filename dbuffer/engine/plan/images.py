"""`Image`: the next weights of a layer whose weights the engine packs or quantizes.

Processing such a layer changes the form of parameters, fills further parameters (scales), or fills
a kernel's memory that no copy can reach. So a second copy of the layer, its shadow, is loaded and
processed while the layer serves. The switch copies the shadow's tensors and attributes into the
layer.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch

from dbuffer.engine.plan.attestation import same_bytes
from dbuffer.engine.plan.load_trace import (
    Copy,
    LoadTrace,
    TracedTensor,
    form_of,
    tables_of,
    unwrapped,
)
from dbuffer.errors import UnsupportedError

_HOLDING_TENSORS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.Size, enum.Enum)
"""Types of attributes that can be compared. Attributes of other types may hold anything."""


class NotAloneError(Exception):
    """Only all ranks together can process a layer, in the engine's reload."""


class Packing(Protocol):
    """An engine's way of packing layers: reordering or quantizing the weights that were loaded.

    Layers are packed in this way only if packing changes nothing but the layer itself.
    """

    def packs(self, layer: torch.nn.Module, *, is_as_loaded: bool) -> bool:
        """Whether the engine processes this layer after loading, so that copies are not enough.

        ``is_as_loaded``: whether the layer's parameters have the form that loaders fill.
        """
        ...

    def pack(self, shadow: Any, layer: torch.nn.Module) -> Sequence[tuple[Any, Any]]:
        """Process a shadow (second copy) of the layer, into which weights were loaded.

        Return pairs of an object of the layer that processing also changes, and the shadow's
        processed copy of this object. Raise `NotAloneError` if processing needs other ranks.
        """
        ...

    def computed(self, layer: Any) -> torch.Tensor | None:
        """Return the layer's output for a fixed input, or None if comparing tensors is enough."""
        ...


class PackedLayer(NamedTuple):
    name: str
    layer: torch.nn.Module
    packing: Packing
    loaded: Mapping[str, str]
    device: torch.device


class Image:
    """Processed shadow (second copy) of a layer, whose contents a switch gives to the layer.

    If the layer is on a device, the shadow's tensors wait in page-locked main memory, because the
    device may not have room for all shadows.

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
                    f"{self.name}.{change.name} has another form in the layer than after processing"
                )
        return [(change.live.detach(), change.value) for change in self._tensors]

    def matches(self) -> bool:
        """Whether layer and shadow have equal bytes and values, or give equal outputs."""
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
        """Set the shadow's attributes on the layer, and keep the old ones.

        Calling it twice is safe.
        """
        self._replaced = [change.live for change in self._attributes]
        _set_all(self._attributes)


class _Changed(NamedTuple):
    """Tensor or attribute of a layer that differs in the layer's image (its processed copy)."""

    owner: Any
    name: str
    value: Any

    @property
    def live(self) -> Any:
        return getattr(self.owner, self.name, None)

    def is_copied(self) -> bool:
        """Whether the value can be copied into the live tensor: equal forms, and its own memory."""
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
    """Yield the tensors and attributes that differ between live objects and processed copies."""
    copies = {id(copy) for _, copy in changed}
    layer, shadow = changed[0]
    for processed, live in zip(tables_of(shadow), tables_of(layer), strict=True):
        for name, tensor in processed.items():
            if tensor is not None and tensor.numel() and tensor is not live.get(name):
                yield _Changed(layer, name, tensor.detach())
    for owner, copy in changed:
        for name, value in list(vars(copy).items()):
            if isinstance(value, MethodType) and value.__self__ is copy:
                # Bind the method to the live object: else the copy would refer to itself, and its
                # memory would be freed only by garbage collection.
                vars(copy)[name] = value = MethodType(value.__func__, owner)
            before = vars(owner).get(name)
            is_same = value is before or (isinstance(value, MethodType) and value == before)
            if not is_same and id(value) not in copies and name not in _HOLDING_TENSORS:
                yield _Changed(owner, name, value)


def _waiting(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; if it is on a device, return a copy in page-locked main memory."""
    if not tensor.is_cuda:
        return tensor
    shape, stride, dtype = form_of(tensor)
    return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True).copy_(tensor)


def packed_layers(
    model: torch.nn.Module, packing: Packing, trace: LoadTrace, derived: Collection[str]
) -> dict[str, PackedLayer]:
    """Return the layers that the engine processes after loading, and that copies can load.

    ``derived``: names of layers that the engine's reload changes further after copying.
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
