"""`Reloaded`: layers that stay with the engine's reload, where all others are copied to.

A layer whose loader computes, or from which something is derived, is loaded in each switch by the
engine's own reload, of that layer alone. Which published tensors that takes is found out as all
else is: by loaders that run without data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from dbuffer.errors import WeightsMismatchError
from dbuffer.integrations.engine.plan.recording import Recording, Unwrapped
from dbuffer.runtime.messages import listed

RecordPart = Callable[[Collection[str]], Recording]
"""What a model's loaders do with these published tensors alone."""

MIN_COPIED = 0.5
"""Of all elements. Reloading a part walks the whole model, too: below this, it saves little."""

_MODULES = re.compile(r"(?:\._modules\['[^']*'\])*")


class NotPlannableError(Exception):
    """Why a layout's switches stay with the reload."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What of a layout is not copied."""

    layers: Mapping[str, str]
    """By the names of layers: why."""
    sources: frozenset[str] = frozenset()
    """The published tensors that they are loaded from."""


def without_reloaded(
    recording: Recording, layers: Mapping[str, str], record_part: RecordPart | None
) -> tuple[Recording, Reloaded]:
    """What of a recording is to be copied, and what is reloaded.

    Args:
        recording: of the whole layout.
        layers: those to be reloaded, by name, and why.
        record_part: None: the engine cannot reload a part.

    Raises:
        NotPlannableError: too little is left to be copied, or what the layers are loaded from
            cannot be told from what others are.
    """
    if not layers:
        return recording, Reloaded({})
    why = listed(list(dict.fromkeys(layers.values())), "; ")
    reloaded = _part(recording, lambda name: layer_of(name) in layers)
    copied = _part(recording, lambda name: layer_of(name) not in layers)
    num_copied, num_loaded = (sum(r.num_loaded.values()) for r in (copied, recording))
    if record_part is None or num_copied < MIN_COPIED * num_loaded:
        raise NotPlannableError(why)
    sources = recording.offered - {s.source for steps in copied.steps.values() for s in steps}
    try:
        alone = record_part(sources)
    # What a model's loaders refuse, they refuse in their own ways.
    except WeightsMismatchError as error:
        raise NotPlannableError(f"{why}; not to be loaded alone: {error}") from error
    if alone != replace(reloaded, offered=sources):
        raise NotPlannableError(f"{why}; the tensors of these layers are those of others, too")
    return copied, Reloaded(layers, sources)


def _part(recording: Recording, is_in: Callable[[str], bool]) -> Recording:
    """What a recording says of some parameters."""
    return replace(
        recording,
        steps={name: steps for name, steps in recording.steps.items() if is_in(name)},
        places={name: place for name, place in recording.places.items() if is_in(name)},
        refused={name: why for name, why in recording.refused.items() if is_in(name)},
        num_loaded={name: num for name, num in recording.num_loaded.items() if is_in(name)},
    )


def layer_of(parameter: str) -> str:
    """The name of the layer that has a parameter of this name."""
    return parameter.rpartition(".")[0]


def layers_at(place: str, layers: Collection[str], unwrapped: Unwrapped) -> Collection[str]:
    """Those of some layers that are at a place of a :class:`State`, or around it.

    What is derived in a layer that is not loaded itself comes from those beside it.
    """
    matched = _MODULES.match(place)
    path = re.findall(r"\['([^']*)'\]", matched[0]) if matched else []
    for length in range(len(path), 0, -1):
        above = unwrapped(".".join(path[:length]))
        if found := [layer for layer in layers if f"{layer}.".startswith(f"{above}.")]:
            return found
    return layers
