"""Images of layers whose weights the engine processes after loading them: it packs or quantizes.

Loading such a layer is copying and then processing: into another form of the same parameters, into
further ones (scales), or into memory of a kernel that no copy can reach. A shadow of the layer is
loaded and processed while the layer serves, on its device, and the switch copies the result, or
puts it in the layer's place.
"""

from __future__ import annotations

import enum
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
"""Types of attributes that can be compared; others may hold anything."""


class NotAloneError(Exception):
    """An engine's ranks process layers together, which they can do in a reload only."""


class Packing(Protocol):
    """An engine's way of processing layers, for those where it touches nothing but the layer."""

    def packs(self, layer: torch.nn.Module, *, is_as_loaded: bool) -> bool:
        """Whether the engine processes this layer, so that copies of published tensors do not do.

        ``is_as_loaded``: whether its parameters have the form that loaders fill.
        """
        ...

    def pack(self, shadow: Any, layer: torch.nn.Module) -> Sequence[tuple[Any, Any]]:
        """Process a shadow of the layer, whose weights were loaded.

        Returns:
            Other objects of the layer that processing changes, and the shadow's copies of them.

        Raises:
            NotAloneError: it needs other ranks.
        """
        ...

    def computed(self, layer: Any) -> torch.Tensor | None:
        """Return the layer's output for a fixed input; None: its tensors are all that it has."""
        ...


class PackedLayer(NamedTuple):
    """A live layer whose weights are processed."""

    name: str
    layer: torch.nn.Module
    packing: Packing
    loaded: Mapping[str, str]
    """Names in the trace of its tensors that are loaded, by their names in the layer."""
    device: torch.device


class Image:
    """A processed shadow of a layer, whose tensors and attributes the layer takes over in a switch.

    The shadow is filled from published ``tensors``, as the ``trace`` says. On a device, its tensors
    wait in page-locked main memory: the device has room for one layer, and not for all.

    Raises:
        UnsupportedError: the layer stores a tensor in another form than processing gives it.
        NotAloneError: it is processed together with other ranks.
        Exception: it could not be processed.
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
        for own, full in packed.loaded.items():
            filled = trace[full].filled(tensors, packed.device)
            if own in buffers:
                buffers[own] = filled
            else:
                parameters[own] = torch.nn.Parameter(filled, requires_grad=False)
        changed = [(layer, shadow), *packed.packing.pack(shadow, layer)]
        self._tensors: list[_Changed] = []
        """Tensors that are copied into live ones, which captured graphs read where they are."""
        self._attributes: list[_Changed] = []
        """Attributes that take the place of live ones."""
        for each in _changed_by(changed):
            is_own = each.owner is layer and each.name in parameters.keys() | buffers.keys()
            (self._tensors if is_own or each.is_copied() else self._attributes).append(each)
        self._tensors = [each._replace(value=_waiting(each.value)) for each in self._tensors]
        self._replaced: list[Any] = []
        """Values that the attributes had before, to be released with this."""
        self.copies()

    @property
    def replaced(self) -> set[tuple[int, str]]:
        """Attributes that a switch changes: the identity of their object, and their name."""
        return {(id(each.owner), each.name) for each in (*self._tensors, *self._attributes)}

    def copies(self) -> list[Copy]:
        """Return the copies into the tensors that the layer does not share with the shadow."""
        for each in self._tensors:
            if not each.is_copied():
                raise UnsupportedError(
                    f"{self.name}.{each.name} is stored in another form than when it is processed"
                )
        return [(each.live.detach(), each.value) for each in self._tensors]

    def matches(self) -> bool:
        """Whether the layer has what it would take over, as far as can be observed."""
        if not all(same_bytes(*copy) for copy in self.copies()):
            return False
        if all(isinstance(each.value, _VALUES) for each in self._attributes):
            return all(each.live == each.value for each in self._attributes)
        before = [each._replace(value=each.live) for each in self._attributes]
        live = self._packing.computed(self._layer)
        try:
            _set_all(self._attributes)
            mine = self._packing.computed(self._layer)
        finally:
            _set_all(before)
        return live is not None and mine is not None and same_bytes(live, mine)

    def hand_over(self) -> None:
        """Give the layer the attributes, also a second time; its old ones stay here until then."""
        self._replaced = [each.live for each in self._attributes]
        _set_all(self._attributes)


class _Changed(NamedTuple):
    """Tensor or attribute of a live object that differs in its processed copy."""

    owner: Any
    name: str
    value: Any

    @property
    def live(self) -> Any:
        return getattr(self.owner, self.name, None)

    def is_copied(self) -> bool:
        """Whether the live object has a tensor of the same form, in memory of its own."""
        live = self.live
        return (
            isinstance(live, torch.Tensor)
            and isinstance(self.value, torch.Tensor)
            and form_of(live) == form_of(self.value)
            and live.untyped_storage().nbytes() == live.nbytes
        )


def _set_all(attributes: Sequence[_Changed]) -> None:
    for each in attributes:
        vars(each.owner)[each.name] = each.value


def _changed_by(changed: Sequence[tuple[Any, Any]]) -> Iterator[_Changed]:
    """Yield the differences of live objects from their processed copies."""
    copies = {id(copy) for _, copy in changed}
    layer, shadow = changed[0]
    for mine, live in zip(tables_of(shadow), tables_of(layer), strict=True):
        for name, tensor in mine.items():
            if tensor is not None and tensor.numel() and tensor is not live.get(name):
                yield _Changed(layer, name, tensor.detach())
    for owner, copy in changed:
        for name, value in list(vars(copy).items()):
            if isinstance(value, MethodType) and value.__self__ is copy:
                # Else the copy would keep itself, and memory, until garbage is collected.
                vars(copy)[name] = value = MethodType(value.__func__, owner)
            before = vars(owner).get(name)
            is_same = value is before or (isinstance(value, MethodType) and value == before)
            if not is_same and id(value) not in copies and name not in _HOLDING_TENSORS:
                yield _Changed(owner, name, value)


def _waiting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor where it can wait for a switch: one on a device is copied to main memory."""
    if not tensor.is_cuda:
        return tensor
    shape, stride, dtype = form_of(tensor)
    return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True).copy_(tensor)


def packed_layers(
    model: torch.nn.Module, packing: Packing, trace: LoadTrace, derived: Collection[str]
) -> dict[str, PackedLayer]:
    """Return the layers of a model whose weights are processed once the trace's copies load them.

    ``derived``: names of layers that a reload does more to than copy.
    """
    names = {
        id(parameter): unwrapped(name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if unwrapped(name) in trace.tensors
    }
    layers: dict[str, PackedLayer] = {}
    for path, layer in model.named_modules():
        own_tensors = {name: each for table in tables_of(layer) for name, each in table.items()}
        loaded = {}
        for own, tensor in own_tensors.items():
            full = unwrapped(f"{path}.{own}" if path else own)
            full = full if full in trace.tensors else names.get(id(tensor), full)  # a tied one
            if full in trace.tensors:
                loaded[own] = full
        name = unwrapped(path)
        if not loaded or not all(map(trace.is_copied, loaded.values())):
            continue
        live = {own: tensor for own, tensor in own_tensors.items() if tensor is not None}
        forms = {own: form_of(tensor) for own, tensor in live.items()}
        is_as_loaded = forms == {own: trace.tensors[full].form for own, full in loaded.items()}
        if packing.packs(layer, is_as_loaded=is_as_loaded and name not in derived):
            device = next(iter([*live.values(), *model.parameters()])).device
            layers[name] = PackedLayer(name, layer, packing, loaded, device)
    return layers
