"""`Patches`: what of a switch is left where only some places of some tensors changed.

Positions in published tensors become positions in parameters, while the engine serves; in the pause
they are scattered. A tensor of which too much changed, or nobody knows what, is copied whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from dbuffer.format.delta import Integers
from dbuffer.integrations.engine.plan.load_trace import View

Changed = Mapping[str, Integers | None]
"""Where published tensors may differ from those of an earlier version: flat positions, ascending,
by name; None: anywhere. A tensor that is not named is as it was."""

MAX_SHARE = 0.05
"""Of a part's elements. Writing 3 % of 50 million bfloat16 one by one took 0.6 of the time that
copying all of them took, and 10 % more than twice as long (measured on one CPU)."""

_PIECE = 1 << 16
"""Positions; about a tenth of a millisecond."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copy(NamedTuple):
    """What is copied in a switch."""

    target: torch.Tensor
    source: torch.Tensor


class Patch(NamedTuple):
    """Values in some places of a parameter."""

    target: torch.Tensor
    """All its memory, flat, as integers of its elements' size."""
    positions: torch.Tensor
    """Counted from `start`."""
    values: torch.Tensor
    start: int = 0

    @property
    def places(self) -> torch.Tensor:
        """Positions from the beginning of the parameter, as wide as torch wants them."""
        return self.positions.long() + self.start if self.start else self.positions.long()

    def apply(self) -> None:
        """Put them there."""
        self.target.index_copy_(0, self.places, self.values)

    def pieces(self) -> Iterator[Patch]:
        """Yield it in pieces of which several threads can take some each."""
        for first in range(0, len(self.positions), _PIECE):
            piece = slice(first, first + _PIECE)
            yield self._replace(positions=self.positions[piece], values=self.values[piece])

    def narrow(self) -> Patch:
        """Count positions from the lowest, in 32 bits where those will do."""
        start = int(self.positions.min())
        if int(self.positions.max()) - start > torch.iinfo(torch.int32).max:
            return self
        narrow = (self.positions - start).to(torch.int32)
        return self._replace(positions=narrow, start=self.start + start)

    def on_device(self) -> Patch:
        """Move positions and values to where the parameter is, in as little memory as will do."""
        device = self.target.device
        if device.type == "cpu":
            return self
        narrow = self.narrow()
        return narrow._replace(
            positions=narrow.positions.to(device), values=narrow.values.to(device)
        )

    def some(self, count: int, random: np.random.Generator) -> Patch:
        """Choose so many of its places, at random; one may come twice."""
        chosen = torch.from_numpy(random.integers(len(self.positions), size=count))
        return Patch(self.target, self.places[chosen], self.values[chosen])


@dataclass(frozen=True, slots=True)
class Patches:
    """What leads from the version that a model holds to another."""

    base: str
    """Identity of the version that it must hold."""
    patches: Mapping[str, Sequence[Patch]]
    """By the name of the parameter."""
    copies: Sequence[Copy]
    """Of what is not patched."""

    def on_device(self) -> Patches:
        """Move all patches to where their parameters are."""
        patches = {name: [p.on_device() for p in each] for name, each in self.patches.items()}
        return replace(self, patches=patches)


def elements_of(
    copy: Copy, parameter: torch.Tensor, count: int, random: np.random.Generator
) -> Patch:
    """Choose places of a copy at random, and the values that it puts there; one may come twice."""
    target, source = (each.reshape(each.shape or (1,)) for each in copy)
    indices = np.unravel_index(random.integers(target.numel(), size=count), target.shape)
    places = [torch.from_numpy(index) for index in indices]
    positions = torch.full((count,), View.of(target, parameter).offset)
    for index, stride in zip(places, target.stride(), strict=True):
        positions += index * stride
    values = _values_for(parameter, source, tuple(place.to(source.device) for place in places))
    return Patch(flat(parameter), positions, values)


def joined(patches: Sequence[Patch]) -> Patch:
    """Join patches of one parameter."""
    positions = torch.cat([patch.places for patch in patches])
    values = torch.cat([patch.values for patch in patches])
    return Patch(patches[0].target, positions, values)


def are_there(patches: Collection[Patch]) -> bool:
    """Whether parameters have these values in these places."""
    devices = {patch.target.device for patch in patches}
    for device in devices:
        mine = [patch for patch in patches if patch.target.device == device]
        found = [patch.target.index_select(0, patch.places) for patch in mine]
        # One comparison: on a device each waits for all that was queued.
        if not torch.equal(torch.cat(found), torch.cat([patch.values for patch in mine])):
            return False
    return True


def patch_or_copy(
    parameter: torch.Tensor,
    to: View,
    part: View,
    source: torch.Tensor,
    changed: Integers | None,
) -> Patch | Copy | None:
    """What brings a part of a published tensor into its place in a parameter.

    None: nothing of it changed.

    Args:
        parameter: that.
        to: its place.
        part: which part.
        source: the published tensor, contiguous.
        changed: where that may differ from what the parameter holds; None: anywhere.
    """
    whole = Copy(to.in_(parameter), part.in_(source))
    if changed is None or len(changed) > MAX_SHARE * source.numel() or not _is_nested(part):
        return whole
    sources, targets = places_in(part, to, changed)
    if not len(sources):
        return None
    if len(sources) > MAX_SHARE * part.num_elements:
        return whole
    values = _values_for(parameter, source.reshape(-1), (torch.from_numpy(sources),))
    return Patch(flat(parameter), torch.from_numpy(targets), values)


def _values_for(
    parameter: torch.Tensor, source: torch.Tensor, places: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Take elements of a source, as integers of the size of a parameter's elements."""
    if source.dtype == parameter.dtype:  # torch cannot index every dtype
        return as_integers(source)[places]
    return as_integers(source[places].to(parameter.dtype))


def _is_nested(part: View) -> bool:
    """Whether each element is there once, and its place tells which it is."""
    reach = 0
    for stride, extent in sorted(zip(part.stride, part.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return False
            reach += (extent - 1) * stride
    return True


def places_in(part: View, to: View, changed: Integers) -> tuple[Integers, Integers]:
    """Which of these positions are in a part, and where each is in what the part is copied to."""
    is_dense = part.num_elements == part.end - part.offset
    if is_dense and part.stride == to.stride:
        first, end = np.searchsorted(changed, [part.offset, part.end])
        return changed[first:end], changed[first:end] + (to.offset - part.offset)
    rest = changed - part.offset
    inside = rest >= 0
    targets = np.full(len(changed), to.offset, np.int64)
    # From the longest stride to the shortest: what is left over of a position is in the next.
    for axis in sorted(range(len(part.shape)), key=lambda axis: -part.stride[axis]):
        if part.shape[axis] == 1:
            continue
        index, rest = np.divmod(rest, part.stride[axis])
        inside &= index < part.shape[axis]
        targets += index * to.stride[axis]
    inside &= rest == 0
    return changed[inside], targets[inside]


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter that has one of its own, as integers of its elements' size."""
    plain = parameter.detach()
    return as_integers(plain.as_strided((plain.numel(),), (1,), plain.storage_offset()))


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """Their bits, as integers of the elements' size."""
    return values.view(_INTEGERS[values.itemsize])
