"""Samples: random elements of every parameter, by which a model is known to hold a version.

An engine that slept may have lost its weights, and something else may have loaded others. Before a
version is patched, a few elements of each parameter are compared: other ones after each switch,
and always some of those that were patched last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from dbuffer.format.lineage import VersionId
from dbuffer.integrations.engine.plan.load_trace import Copy, View
from dbuffer.integrations.engine.plan.patching import Patch, flat, values_for

T = TypeVar("T")

_NUM_ELEMENTS = 8192
"""Elements of all parameters together. Comparing them takes a few milliseconds of a pause."""

_MIN_ELEMENTS, _MAX_ELEMENTS = 8, 64
"""Elements of each parameter."""

_MAX_PARTS = 8
"""Parts sampled of a parameter that is made of many, of experts for instance."""


class Sample(NamedTuple):
    """Elements by which a model is known to hold a version."""

    version: VersionId | None
    """The version, or None if it is unknown."""
    elements: Mapping[str, Patch]
    """Elements of parameters, by the parameter's name."""

    def is_held(self) -> bool:
        """Whether the parameters have the sampled values; an empty sample does not tell."""
        patches = self.elements.values()
        for device in {patch.target.device for patch in patches}:
            mine = [patch for patch in patches if patch.target.device == device]
            live = [patch.target.index_select(0, patch.places) for patch in mine]
            # One comparison: on a device each waits for all that was queued.
            if not torch.equal(torch.cat(live), torch.cat([patch.values for patch in mine])):
                return False
        return bool(patches)

    def of(self, parameters: Collection[str]) -> Sample:
        """Return the sample of some parameters alone."""
        elements = {name: each for name, each in self.elements.items() if name in parameters}
        return self._replace(elements=elements)


NOTHING_HELD = Sample(None, {})
"""Sample of a model that may hold anything."""


def draw_sample(
    version: VersionId,
    copies: Mapping[str, Sequence[Copy]],
    parameters: Mapping[str, torch.Tensor],
    random: np.random.Generator,
) -> Sample:
    """Choose elements that the copies of a version put into every parameter."""
    sample = {}
    for name, each in copies.items():
        filled = [copy for copy in each if copy[0].numel()]
        chosen = [
            _elements_of(copy, parameters[name], count, random)
            for copy, count in _choose_parts(filled, len(copies), random)
        ]
        if chosen:
            sample[name] = _joined(chosen).on_device()
    return Sample(version, sample)


def with_patched(
    sample: Sample, patches: Mapping[str, Sequence[Patch]], random: np.random.Generator
) -> Sample:
    """Add elements that patches write, of every parameter that they write to."""
    more = {}
    for name, pieces in patches.items():
        chosen = [sample.elements[name]]
        for piece, count in _choose_parts(pieces, len(sample.elements), random):
            indices = torch.from_numpy(random.integers(len(piece.positions), size=count))
            some = piece._replace(positions=piece.positions[indices], values=piece.values[indices])
            chosen.append(some.on_device())
        more[name] = _joined(chosen)
    return sample._replace(elements={**sample.elements, **more})


def _choose_parts(
    parts: Sequence[T], num_parameters: int, random: np.random.Generator
) -> Iterator[tuple[T, int]]:
    """Choose a few parts of a parameter, and the number of elements to sample of each."""
    num_elements = _NUM_ELEMENTS // max(1, num_parameters)
    num_elements = min(max(num_elements, _MIN_ELEMENTS), _MAX_ELEMENTS)
    chosen = random.permutation(len(parts))[:_MAX_PARTS]
    for index in chosen:
        yield parts[index], num_elements // len(chosen)


def _elements_of(
    copy: Copy, parameter: torch.Tensor, count: int, random: np.random.Generator
) -> Patch:
    """Choose positions of a copy at random, and the values that it puts there."""
    target, source = copy
    if target.is_contiguous() and source.is_contiguous():  # most are, and versions have hundreds
        inside = torch.from_numpy(random.integers(target.numel(), size=count))
        start = int(target.storage_offset() - parameter.storage_offset())
        values = values_for(parameter, source.view(-1), (inside.to(source.device),))
        return Patch(flat(parameter), inside + start if start else inside, values)
    target, source = (each.reshape(each.shape or (1,)) for each in copy)
    indices = np.unravel_index(random.integers(target.numel(), size=count), target.shape)
    places = [torch.from_numpy(index) for index in indices]
    positions = torch.full((count,), View.of(target, parameter).offset)
    for index, stride in zip(places, target.stride(), strict=True):
        positions += index * stride
    values = values_for(parameter, source, tuple(place.to(source.device) for place in places))
    return Patch(flat(parameter), positions, values)


def _joined(patches: Sequence[Patch]) -> Patch:
    if len(patches) == 1:
        return patches[0]
    positions = torch.cat([patch.places for patch in patches])
    values = torch.cat([patch.values for patch in patches])
    return Patch(patches[0].target, positions, values)
