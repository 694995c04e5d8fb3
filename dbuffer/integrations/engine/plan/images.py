"""Images of layers that pack their weights, for CPU engines: packed while the engine serves.

Loading such a layer is copying and then packing: into another form of the same parameter, or into
memory of a kernel that no copy can reach. A shadow of the layer is loaded and packed beside it, and
the switch copies the result, or puts it in the layer's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dbuffer.integrations.engine.plan.load_trace import LoadTrace, TensorMeta, Unwrapped, tables_of

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


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A live layer that packs its weights, and how they are loaded before that."""

    name: str
    layer: torch.nn.Module
    packing: Packing
    trace: LoadTrace
    loaded: Mapping[str, str]
    """Names in the trace of the parameters that are loaded, by their names in the layer."""

    def image(self, tensors: Mapping[str, torch.Tensor]) -> Image:
        """Load published tensors into a shadow of the layer, and pack it."""
        shadow: torch.nn.Module = object.__new__(type(self.layer))
        shadow.__dict__.update(self.layer.__dict__)
        for table in _HOLDING_TENSORS:
            shadow.__dict__[table] = dict(self.layer.__dict__[table])
        for own, name in self.loaded.items():
            meta, device = self.trace.metas[name], self.layer.get_parameter(own).device
            data = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
            for op in self.trace.ops[name]:
                op.to.in_(data).copy_(op.content(tensors, data.dtype))
            shadow.__dict__["_parameters"][own] = torch.nn.Parameter(data, requires_grad=False)
        self.packing.pack(shadow)
        return Image(self, shadow)


class Image:
    """A packed shadow, whose tensors and attributes its layer takes over in a switch."""

    def __init__(self, of: PackedLayer, shadow: torch.nn.Module) -> None:
        self.of = of
        self.shadow = shadow
        live = of.layer.__dict__
        self._attributes = {
            name: value
            for name, value in shadow.__dict__.items()
            if name not in _HOLDING_TENSORS and value is not live.get(name)
        }

    @property
    def changes(self) -> set[tuple[int, str]]:
        """Attributes that it replaces: the layer's identity, and the name."""
        return {(id(self.of.layer), name) for name in self._attributes}

    @property
    def mismatch(self) -> str | None:
        """Reason why the layer cannot take it over; None: it can."""
        for name, live, tensor in self._tensors():
            if (
                live is None
                or TensorMeta.of(live) != TensorMeta.of(tensor)
                or live.untyped_storage().nbytes() != live.nbytes
            ):
                return f"{self.of.name}.{name} is stored in another form than when it is packed"
        return None

    def matches(self) -> bool:
        """Whether the layer has what it would take over, as far as can be observed."""
        for _, live, tensor in self._tensors():
            if live is None or not torch.equal(_bytes(live), _bytes(tensor)):
                return False
        if not self._attributes:
            return True
        packing = self.of.packing
        mine, live = packing.computed(self.shadow), packing.computed(self.of.layer)
        return mine is not None and live is not None and torch.equal(_bytes(mine), _bytes(live))

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies into the layer's tensors: the target, and the source."""
        for _, live, tensor in self._tensors():
            assert live is not None  # noqa: S101 - it has no mismatch
            yield live.detach(), tensor.detach()

    def hand_over(self) -> None:
        """Give the layer the attributes; its old ones stay here, to be released later."""
        live = self.of.layer.__dict__
        for name, value in self._attributes.items():
            live[name], self._attributes[name] = value, live.get(name)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """Yield the tensors that the layer does not share: the name, the layer's, and its own."""
        parameters, buffers = tables_of(self.of.layer)
        for table in tables_of(self.shadow):
            for name, tensor in table.items():
                live = parameters.get(name, buffers.get(name))
                if tensor is not None and tensor is not live and tensor.numel():
                    yield name, live, tensor


def packed_layers(
    model: torch.nn.Module, packing: Packing, trace: LoadTrace, unwrapped: Unwrapped
) -> list[PackedLayer]:
    """Return the layers of a model that pack parameters which the trace copies into."""
    traced = {
        id(tensor): unwrapped(name)
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if unwrapped(name) in trace.ops
    }
    layers = []
    for path, layer in filter(lambda each: packing.packs(each[1]), model.named_modules()):
        loaded = {}
        for own, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            full = unwrapped(f"{path}.{own}" if path else own)
            name = full if full in trace.ops else traced.get(id(parameter))
            if name is not None:
                loaded[own] = name
        if loaded:
            layers.append(PackedLayer(unwrapped(path), layer, packing, trace, loaded))
    return layers


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
