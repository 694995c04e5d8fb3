"""`Image`: what becomes of a layer that packs its weights, made while the engine serves.

Loading such a layer is copying and then packing: into another form of the same parameter, or into
memory of a kernel that no copy can reach. So it is packed beside the layer that serves, in a shadow
of it, and the switch copies the outcome, or puts it in the layer's place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dbuffer.integrations.engine.plan.load_trace import TensorMeta, Unwrapped, tables_of

_HOLDING_TENSORS = ("_parameters", "_buffers", "_modules")


class Packing(Protocol):
    """How an engine's layers pack their weights, where that touches nothing but the layer."""

    def packs(self, layer: torch.nn.Module) -> bool:
        """Whether this is such a layer."""
        ...

    def pack(self, layer: Any) -> None:
        """Do what is done with it when its weights are loaded."""
        ...

    def computed(self, layer: Any) -> torch.Tensor | None:
        """What it makes of a fixed input; None: its tensors are all that it has."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer that packs its weights, and what they were before."""

    name: str
    layer: torch.nn.Module
    loaded: Mapping[str, str]
    """Its own names of the parameters that are loaded, and the names that they have in a
    trace."""

    def shadow(self, places: Mapping[str, TensorMeta]) -> torch.nn.Module:
        """One more such layer, whose parameters are as they are before they are loaded."""
        shadow: torch.nn.Module = object.__new__(type(self.layer))
        shadow.__dict__.update(self.layer.__dict__)
        for table in _HOLDING_TENSORS:
            shadow.__dict__[table] = dict(self.layer.__dict__[table])
        for own, name in self.loaded.items():
            place = places[name]
            data = torch.empty_strided(
                place.shape,
                place.stride,
                dtype=place.dtype,
                device=self.layer.get_parameter(own).device,
            )
            shadow.__dict__["_parameters"][own] = torch.nn.Parameter(data, requires_grad=False)
        return shadow

    def tensors_of(self, shadow: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The parameters of a shadow that are loaded, by their names in a trace."""
        return {name: shadow.get_parameter(own).data for own, name in self.loaded.items()}


class Image:
    """A packed shadow, for its layer to take over.

    Args:
        of: the layer.
        shadow: with its weights in it; they are packed.
    """

    def __init__(self, of: PackedLayer, shadow: torch.nn.Module, packing: Packing) -> None:
        self.of = of
        self.shadow = shadow
        self._packing = packing
        packing.pack(shadow)
        live = of.layer.__dict__
        self._attributes = {
            name: value
            for name, value in shadow.__dict__.items()
            if name not in _HOLDING_TENSORS and value is not live.get(name)
        }

    @property
    def changes(self) -> set[tuple[int, str]]:
        """The attributes that it replaces: the layer's identity, and the name."""
        return {(id(self.of.layer), name) for name in self._attributes}

    @property
    def mismatch(self) -> str | None:
        """Why its layer cannot take it over; None: it can."""
        for name, live, tensor in self._tensors():
            if live is None or TensorMeta.of(live) != TensorMeta.of(tensor) or not _is_alone(live):
                return f"{self.of.name}.{name} is stored in another form than when it is packed"
        return None

    def is_there(self) -> bool:
        """Whether its layer has just what it would take over, for all that can be told."""
        for _, live, tensor in self._tensors():
            if live is None or not torch.equal(_bytes(live), _bytes(tensor)):
                return False
        if not self._attributes:
            return True
        mine, live = self._packing.computed(self.shadow), self._packing.computed(self.of.layer)
        return mine is not None and live is not None and torch.equal(_bytes(mine), _bytes(live))

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is to be copied into the layer: the target, and the source."""
        for _, live, tensor in self._tensors():
            assert live is not None  # noqa: S101 - it fits
            yield live.detach(), tensor.detach()

    def hand_over(self) -> None:
        """Give the layer the attributes; what it had is kept here, to be let go of later."""
        live = self.of.layer.__dict__
        for name, value in self._attributes.items():
            live[name], self._attributes[name] = value, live.get(name)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """Those that its layer does not share: the name, the layer's, and its own."""
        for table in ("_parameters", "_buffers"):
            for name, tensor in self.shadow.__dict__[table].items():
                live = self.of.layer.__dict__[table].get(name)
                if tensor is not None and tensor is not live and tensor.numel():
                    yield name, _own(self.of.layer, name), tensor


def packed_layers(
    model: torch.nn.Module, packing: Packing, recorded: Collection[str], unwrapped: Unwrapped
) -> list[PackedLayer]:
    """The layers of a model that pack parameters which were recorded."""
    names = {
        id(tensor): unwrapped(name)
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if unwrapped(name) in recorded
    }
    found = []
    for path, layer in model.named_modules():
        if not packing.packs(layer):
            continue
        loaded = {}
        for own, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            full = unwrapped(f"{path}.{own}" if path else own)
            name = full if full in recorded else names.get(id(parameter))
            if name is not None:
                loaded[own] = name
        if loaded:
            found.append(PackedLayer(unwrapped(path), layer, loaded))
    return found


def _own(layer: torch.nn.Module, name: str) -> torch.Tensor | None:
    parameters, buffers = tables_of(layer)
    found: torch.Tensor | None = parameters.get(name, buffers.get(name))
    return found


def _is_alone(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
