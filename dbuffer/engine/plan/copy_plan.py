"""`CopyPlan`: how a switch fills each layer of a model, for versions of one layout.

A layout is the names, dtypes and shapes of a version's tensors. Most layers are filled by copies. A
layer whose weights the engine packs or quantizes is filled from an image: the layer's packed
weights, made while the engine serves. A layer is left to the engine's reload if its loader computes
values, or if other values depend on the layer. If such a layer shares published tensors with other
layers, there is no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dbuffer.engine.plan.images import PackedLayer, Packing, packed_layers
from dbuffer.engine.plan.load_trace import (
    Copy,
    Form,
    LoadTrace,
    TracedTensor,
    form_of,
    unwrapped,
)
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import is_of_draft
from dbuffer.runtime.lazy import cached_property
from dbuffer.runtime.messages import listed

Tensors = Mapping[str, torch.Tensor]

MIN_COPIED = 0.5
"""Smallest share of all elements that copies must load. A reload walks the whole model even if it
loads only a part, so a plan with a smaller share of copies saves little time."""


class _Place(NamedTuple):
    """Place of a submodule or tensor in a model: the parent module, and the parent's dictionary."""

    module: torch.nn.Module
    table: str
    name: str
    thing: torch.nn.Module | torch.Tensor
    address: int
    form: Form | None

    def __str__(self) -> str:
        return f"{self.name} of a {type(self.module).__name__}"

    def is_as_planned(self) -> bool:
        """Whether the module still has the planned submodule or tensor, so that copies reach it."""
        thing = self.module.__dict__[self.table].get(self.name)
        if not isinstance(self.thing, torch.Tensor):
            return thing is self.thing
        # Do not compare identities: some layers wrap the same memory in a new tensor at each load.
        # Compare forms: ``param.data = param.data.t()`` changes strides at the same address.
        return (
            thing is not None
            and form_of(thing) == self.form
            and bool(thing.data_ptr() == self.address)
        )


@dataclass(eq=False)
class CopyPlan:
    """Copies that switch a model to any version of one layout (names, dtypes and shapes).

    :func:`plan_copies` makes a plan.
    """

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
    """Digests of the published tensors that the verification could not vary, keyed by name. The
    plan is verified for versions with equal digests. None before the verification."""
    places: Sequence[_Place] = ()

    @cached_property
    def written(self) -> Sequence[torch.Tensor]:
        """Tensors of the serving model that a switch writes, also in layers that have images."""
        layers = [packed.layer for packed in self.packed.values()]
        images = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
        return [*self.parameters.values(), *images]

    def replaced(self) -> str | None:
        """Return the name of a module or tensor that other code has replaced or moved, or None."""
        return next((str(place) for place in self.places if not place.is_as_planned()), None)

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
    """Make the plan of a trace, for the live parameters of a model.

    ``reloaded`` names the layers to leave to the engine's reload, with the reasons, and ``check``
    traces how these layers are loaded alone. ``derived`` names layers that a reload changes further
    after copying. Raise :class:`UnsupportedError` if copies would load too little of the model.
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
    plan = CopyPlan(traced, parameters, packed, reloaded, sources)
    plan.places = _places_of(model, plan.written)
    _require_all_parameters(model, plan)
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
    """Return the published tensors that are loaded into these layers, and into no others.

    Raise an error if the layers cannot be loaded from these tensors alone, or if the other layers
    have too few elements.
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


def _require_all_parameters(model: torch.nn.Module, plan: CopyPlan) -> None:
    """Refuse a plan that leaves out a parameter which the engine's reload would fill."""
    # A buffer may be a view of a parameter.
    tensors = [*model.named_parameters(), *model.named_buffers()]
    loaded = {address_of(tensor) for tensor in plan.written} | {
        address_of(tensor) for name, tensor in tensors if layer_of(unwrapped(name)) in plan.reloaded
    }
    has_draft = any(is_of_draft(f"{layer}.") for layer in plan.all_layers)
    left_out = [
        f"{name} was not published"
        for name, parameter in model.named_parameters()
        if parameter.nbytes and address_of(parameter) not in loaded
        if has_draft or not is_of_draft(name)
    ]
    if left_out:
        raise UnsupportedError(listed(left_out, "; "))


def _places_of(model: torch.nn.Module, written: Sequence[torch.Tensor]) -> list[_Place]:
    places = {id(tensor): (tensor.data_ptr(), form_of(tensor)) for tensor in written}
    return [
        _Place(module, table, name, thing, *places.get(id(thing), (0, None)))
        for module in model.modules()
        for table in ("_modules", "_parameters", "_buffers")
        for name, thing in module.__dict__[table].items()
        if id(thing) in places or isinstance(thing, torch.nn.Module)
    ]


def layer_of(parameter: str) -> str:
    """Return the name of a parameter's layer."""
    return parameter.rpartition(".")[0]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
