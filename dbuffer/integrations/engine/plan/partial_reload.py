"""`PartialReload`: layers that stay with the engine's reload, where all others are copied to.

A layer whose loader computes, or from which something is derived, is loaded in each switch by the
engine's own reload, of that layer alone. Which published tensors that takes is found out as all
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
"""What a model's loaders do with these published tensors alone."""

MIN_COPIED = 0.5
"""Of all elements. Reloading a part walks the whole model, too: below this, it saves little."""

_MODULES = re.compile(r"(?:\._modules\['[^']*'\])*")


class NotPlannableError(Exception):
    """Why a layout's switches stay with the reload."""


@dataclass(frozen=True, slots=True)
class PartialReload:
    """What of a layout is not copied."""

    layers: Mapping[str, str]
    """By the names of layers: why."""
    sources: frozenset[str] = frozenset()
    """The published tensors that they are loaded from."""


def without_reloaded(
    trace: LoadTrace, layers: Mapping[str, str], trace_part: TracePart | None
) -> tuple[LoadTrace, PartialReload]:
    """What of a trace is to be copied, and what is reloaded.

    Args:
        trace: of the whole layout.
        layers: those to be reloaded, by name, and why.
        trace_part: None: the engine cannot reload a part.

    Raises:
        NotPlannableError: too little is left to be copied, or what the layers are loaded from
            cannot be told from what others are.
    """
    if not layers:
        return trace, PartialReload({})
    why = listed(list(dict.fromkeys(layers.values())), "; ")
    reloaded = _part(trace, lambda name: layer_of(name) in layers)
    copied = _part(trace, lambda name: layer_of(name) not in layers)
    num_copied, num_loaded = (sum(r.num_loaded.values()) for r in (copied, trace))
    if trace_part is None or num_copied < MIN_COPIED * num_loaded:
        raise NotPlannableError(why)
    sources = trace.offered - {s.source for steps in copied.steps.values() for s in steps}
    try:
        alone = trace_part(sources)
    # What a model's loaders refuse, they refuse in their own ways.
    except WeightsMismatchError as error:
        raise NotPlannableError(f"{why}; not to be loaded alone: {error}") from error
    if alone != replace(reloaded, offered=sources):
        raise NotPlannableError(f"{why}; the tensors of these layers are those of others, too")
    return copied, PartialReload(layers, sources)


def _part(trace: LoadTrace, is_in: Callable[[str], bool]) -> LoadTrace:
    """What a trace says of some parameters."""
    return replace(
        trace,
        steps={name: steps for name, steps in trace.steps.items() if is_in(name)},
        places={name: place for name, place in trace.places.items() if is_in(name)},
        refused={name: why for name, why in trace.refused.items() if is_in(name)},
        num_loaded={name: num for name, num in trace.num_loaded.items() if is_in(name)},
    )


def layer_of(parameter: str) -> str:
    """The name of the layer that has a parameter of this name."""
    return parameter.rpartition(".")[0]


def layers_at(place: str, layers: Collection[str], unwrapped: Unwrapped) -> Collection[str]:
    """Those of some layers that are at a place of a :class:`ModelFingerprint`, or around it.

    What is derived in a layer that is not loaded itself comes from those beside it.
    """
    matched = _MODULES.match(place)
    path = re.findall(r"\['([^']*)'\]", matched[0]) if matched else []
    for length in range(len(path), 0, -1):
        above = unwrapped(".".join(path[:length]))
        if found := [layer for layer in layers if f"{layer}.".startswith(f"{above}.")]:
            return found
    return layers
