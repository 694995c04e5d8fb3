"""`PartialReload`: the layers that stay with the engine's reload, where all others are copied to.

A layer whose loader computes, or from which something is derived, is loaded in each switch by the
engine's own reload, of that layer alone. The published tensors that this takes are learned as all
else is: by loaders that run without data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from dbuffer.errors import WeightsMismatchError
from dbuffer.integrations.engine.plan.load_trace import LoadTrace, Unwrapped
from dbuffer.runtime.messages import listed

TracePart = Callable[[Collection[str]], LoadTrace]
"""Traces a load of these published tensors alone."""

MIN_COPIED = 0.5
"""Least share of all elements that copies must load. Reloading a part walks the whole model, too:
below this, it saves little."""

_MODULES = re.compile(r"(?:\._modules\['[^']*'\])*")


class NotPlannableError(Exception):
    """Reason why switches of a layout stay with the reload."""


@dataclass(frozen=True, slots=True)
class PartialReload:
    """The part of a layout that is not copied."""

    layers: Mapping[str, str]
    """Reasons, by the names of layers."""
    sources: frozenset[str] = frozenset()
    """Published tensors that these layers are loaded from."""


def split_off_reload(
    trace: LoadTrace, layers: Mapping[str, str], trace_part: TracePart | None
) -> tuple[LoadTrace, PartialReload]:
    """Split a trace into what is copied, and what is reloaded.

    Args:
        trace: of the whole layout.
        layers: those to be reloaded, by name, and why.
        trace_part: None: the engine cannot reload a part.

    Raises:
        NotPlannableError: too little is left to be copied, or these layers share published tensors
            with others.
    """
    if not layers:
        return trace, PartialReload({})
    why = listed(list(dict.fromkeys(layers.values())), "; ")
    reloaded = _part(trace, lambda name: layer_of(name) in layers)
    copied = _part(trace, lambda name: layer_of(name) not in layers)
    num_copied, num_loaded = (sum(each.num_loaded.values()) for each in (copied, trace))
    if trace_part is None or num_copied < MIN_COPIED * num_loaded:
        raise NotPlannableError(why)
    sources = trace.offered - {op.source for ops in copied.ops.values() for op in ops}
    try:
        alone = trace_part(sources)
    except WeightsMismatchError as error:
        raise NotPlannableError(f"{why}; not to be loaded alone: {error}") from error
    if alone != replace(reloaded, offered=sources):
        raise NotPlannableError(f"{why}; the tensors of these layers are those of others, too")
    return copied, PartialReload(layers, sources)


def _part(trace: LoadTrace, is_in: Callable[[str], bool]) -> LoadTrace:
    """Return the trace of some parameters."""
    return replace(
        trace,
        ops={name: ops for name, ops in trace.ops.items() if is_in(name)},
        metas={name: meta for name, meta in trace.metas.items() if is_in(name)},
        refused={name: why for name, why in trace.refused.items() if is_in(name)},
        num_loaded={name: num for name, num in trace.num_loaded.items() if is_in(name)},
    )


def layer_of(parameter: str) -> str:
    """Return the name of the layer that has a parameter of this name."""
    return parameter.rpartition(".")[0]


def layers_at(place: str, layers: Collection[str], unwrapped: Unwrapped) -> Collection[str]:
    """Select the layers at a place of a :class:`ModelFingerprint`, or around it.

    A value derived in a layer that is not loaded itself comes from the layers beside it.
    """
    matched = _MODULES.match(place)
    path = re.findall(r"\['([^']*)'\]", matched[0]) if matched else []
    for length in range(len(path), 0, -1):
        above = unwrapped(".".join(path[:length]))
        if near := [layer for layer in layers if f"{layer}.".startswith(f"{above}.")]:
            return near
    return layers
