"""Images of layers that pack their weights, for CPU engines: packed while the engine serves.

Loading such a layer is copying and then packing: into another form of the same parameter, or into
memory of a kernel that no copy can reach. A shadow of the layer is loaded and packed beside it, and
the switch copies the result, or puts it in the layer's place.
"""

from __future__ import annotations

from collections.abc import Mapping
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

_HOLDING_TENSORS = ("_parameters", "_buffers", "_modules")


class Packing(Protocol):
    """An engine's way of packing layers, for those where it touches nothing but the layer."""

    def packs(self, layer: torch.nn.Module) -> bool:
        """Whether this layer is packed."""
        ...

    def pack(self, layer: Any) -> None:
        """Pack a layer whose weights were loaded."""
        ...

    def computed(self, layer: Any) -> torch.Tensor | None:
        """Return the layer's output for a fixed input; None: its tensors are all that it has."""
        ...


class PackedLayer(NamedTuple):
    """A live layer that packs its weights."""

    name: str
    layer: torch.nn.Module
    packing: Packing
    loaded: Mapping[str, str]
    """Names in the trace of its parameters that are loaded, by their names in the layer."""


class Image:
    """A packed shadow of a layer, whose tensors and attributes the layer takes over in a switch.

    The shadow is filled from published ``tensors``, as the ``trace`` says.

    Raises:
        UnsupportedError: the layer stores a tensor in another form than packing gives it.
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
        self._shadow: torch.nn.Module = object.__new__(type(layer))
        self._shadow.__dict__.update(layer.__dict__)
        for table in _HOLDING_TENSORS:
            self._shadow.__dict__[table] = dict(layer.__dict__[table])
        for own, full in packed.loaded.items():
            filled = trace[full].filled(tensors, layer.get_parameter(own).device)
            parameter = torch.nn.Parameter(filled, requires_grad=False)
            self._shadow.__dict__["_parameters"][own] = parameter
        packed.packing.pack(self._shadow)
        self._attributes = {
            name: value
            for name, value in self._shadow.__dict__.items()
            if name not in _HOLDING_TENSORS and value is not layer.__dict__.get(name)
        }
        self._replaced: dict[str, Any] = {}
        """Attributes that the layer had before, to be released with this."""
        self.copies()

    @property
    def replaced(self) -> set[tuple[int, str]]:
        """Attributes that it replaces: the layer's identity, and the name."""
        return {(id(self._layer), name) for name in self._attributes}

    def copies(self) -> list[Copy]:
        """Return the copies into the tensors that the layer does not share with the shadow."""
        copies = []
        parameters, buffers = tables_of(self._layer)
        for table in tables_of(self._shadow):
            for name, tensor in table.items():
                live = parameters.get(name, buffers.get(name))
                if tensor is None or tensor is live or not tensor.numel():
                    continue
                if (
                    live is None
                    or form_of(live) != form_of(tensor)
                    or live.untyped_storage().nbytes() != live.nbytes
                ):
                    raise UnsupportedError(
                        f"{self.name}.{name} is stored in another form than when it is packed"
                    )
                copies.append((live.detach(), tensor.detach()))
        return copies

    def matches(self) -> bool:
        """Whether the layer has what it would take over, as far as can be observed."""
        if not all(same_bytes(*copy) for copy in self.copies()):
            return False
        if not self._attributes:
            return True
        live, mine = (self._packing.computed(each) for each in (self._layer, self._shadow))
        return live is not None and mine is not None and same_bytes(live, mine)

    def hand_over(self) -> None:
        """Give the layer the attributes, also a second time; its old ones stay here until then."""
        live = self._layer.__dict__
        self._replaced = {name: live.get(name) for name in self._attributes}
        live.update(self._attributes)


def packed_layers(
    model: torch.nn.Module, packing: Packing, trace: LoadTrace
) -> dict[str, PackedLayer]:
    """Return the layers of a model that pack parameters which the trace copies, by name."""
    names = {
        id(parameter): unwrapped(name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if trace.is_copied(unwrapped(name))
    }
    layers: dict[str, PackedLayer] = {}
    for path, layer in filter(lambda each: packing.packs(each[1]), model.named_modules()):
        loaded = {}
        for own, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            full = unwrapped(f"{path}.{own}" if path else own)
            if id(parameter) in names:
                loaded[own] = full if trace.is_copied(full) else names[id(parameter)]
        if loaded:
            layers[unwrapped(path)] = PackedLayer(unwrapped(path), layer, packing, loaded)
    return layers
