"""`Patch`: the part of a switch that is left where only some elements of a tensor changed.

Positions in published tensors become positions in parameters while the engine serves, and are
scattered in the pause. If too much of a tensor changed, it is copied whole.

An engine that slept may have lost its weights, and something else may have loaded others. So before
a version is patched, a `Sample` of random elements of every parameter is compared: other ones after
each switch, and always some elements of the last patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from dbuffer.engine.plan.load_trace import Copy, CopyOp, View
from dbuffer.format.lineage import VersionId
from dbuffer.format.words import Integers
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import split_evenly

T = TypeVar("T")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by their size: torch computes with few unsigned ones."""

Changed = Mapping[str, Integers]
"""Flat, ascending positions at which published tensors changed since an earlier version, by the
tensor's name. A tensor without an entry is unchanged."""

MAX_SHARE = 0.05
"""Largest share of a part's elements that is patched. Writing 3 % of 50 million bfloat16 one by one
took 0.6 of the time that copying all of them took, and 10 % more than twice as long (measured on
one CPU)."""

_PIECE = 1 << 16
"""Positions that one thread patches at a time; about a tenth of a millisecond."""

_DEVICE_PIECE = 1 << 22
"""Positions that a device patches at a time: they take 32 MiB of its memory meanwhile."""

_BLOCK_BYTES = 64 << 20
"""Bytes compared at a time: a device may have little room."""

_NUM_SAMPLED = 8192
"""Elements sampled of all parameters: comparing them takes a few milliseconds of a pause."""

_MIN_SAMPLED, _MAX_SAMPLED = 8, 64
"""Elements sampled of each parameter."""

_MAX_PARTS = 8
"""Parts sampled of a parameter that is made of many, of experts for instance."""


class Patch(NamedTuple):
    """Values at some positions of a parameter."""

    target: torch.Tensor
    """Memory of the parameter, flat, as integers of its elements' size."""
    positions: torch.Tensor
    """Counted from `start`."""
    values: torch.Tensor
    start: int = 0

    @property
    def places(self) -> torch.Tensor:
        """Positions counted from the beginning of the parameter, as wide as torch needs them."""
        return self.positions.long() + self.start if self.start else self.positions.long()

    def apply(self) -> None:
        """Write the values."""
        # In main memory, index_copy_ takes half as long again.
        self.target.scatter_(0, self.places, self.values)

    def at(self, index: slice | torch.Tensor) -> Patch:
        """Return the patch of some of its positions."""
        return self._replace(positions=self.positions[index], values=self.values[index])

    def pieces(self) -> Iterator[Patch]:
        """Split it into pieces, for several threads, or for a device with little room."""
        length = _PIECE if self.target.is_cpu else _DEVICE_PIECE
        for first in range(0, len(self.positions), length):
            yield self.at(slice(first, first + length))

    def narrow(self) -> Patch:
        """Count positions from the lowest, in 32 bits where those are enough."""
        start = int(self.positions.min())
        if int(self.positions.max()) - start > torch.iinfo(torch.int32).max:
            return self
        narrow = (self.positions - start).to(torch.int32)
        return self._replace(positions=narrow, start=self.start + start)

    def on_device(self) -> Patch:
        """Move positions and values to the parameter's device, in as little memory as possible."""
        device = self.target.device
        if device.type == "cpu":
            return self
        narrow = self.narrow()
        return narrow._replace(
            positions=narrow.positions.to(device), values=narrow.values.to(device)
        )


class Patches(NamedTuple):
    """The part of a switch that is left where the model holds the version before, say."""

    base: VersionId
    """Version that the model must hold."""
    by_parameter: Mapping[str, Sequence[Patch]]
    copies: Mapping[str, Sequence[Copy]]
    """Copies for changed parameters without patches, by the parameter's name."""

    def on_device(self) -> Patches:
        """Move them to their parameters' devices."""
        moved = {
            name: [patch.on_device() for patch in patches]
            for name, patches in self.by_parameter.items()
        }
        return self._replace(by_parameter=moved)

    def apply(self, copier: Copier) -> None:
        """Write all values: in several threads, or one patch after the other on a device."""
        pieces = [patch for patches in self.by_parameter.values() for patch in patches]

        def work(first: int, end: int) -> None:
            for patch in pieces[first:end]:
                patch.apply()

        # On a device too, in the copier's inference mode: its threads made views in that mode here,
        # and torch refuses to write to them in any other.
        slices = [(0, len(pieces))]
        if all(patch.target.is_cpu for patch in pieces):
            sizes = [patch.positions.numel() for patch in pieces]
            slices = split_evenly(sizes, copier.num_threads)
        copier.in_parallel(work, slices)


def patch_or_copy(
    parameter: torch.Tensor, op: CopyOp, tensors: Mapping[str, torch.Tensor], changed: Changed
) -> Patch | Copy | None:
    """Bring the changed elements of a published tensor into their places in a parameter.

    Args:
        parameter: the live parameter.
        op: the copy of a part of a published tensor into it.
        tensors: published tensors, contiguous.
        changed: where they may differ from the parameter's content.

    Returns:
        The patch or copy, or None if nothing in this part changed.
    """
    if op.source not in changed or op.source is None or op.part is None:
        return None
    source, positions = tensors[op.source], changed[op.source]
    whole = op.bind(parameter, tensors)
    if len(positions) > MAX_SHARE * source.numel() or not _is_invertible(op.part):
        return whole
    sources, targets = map_positions(op.part, op.to, positions)
    if not len(sources):
        return None
    if len(sources) > MAX_SHARE * op.part.num_elements:
        return whole
    values = _values_for(parameter, source.reshape(-1), (torch.from_numpy(sources),))
    return Patch(flat(parameter), torch.from_numpy(targets), values)


def _values_for(
    parameter: torch.Tensor, source: torch.Tensor, places: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Take elements of a source, as integers of the size of a parameter's elements."""
    bits = _as_integers(source)  # torch cannot index every dtype
    # Of one dimension, this takes half the time of an index in brackets.
    taken = bits.index_select(0, places[0]) if len(places) == 1 else bits[places]
    return _as_integers(taken.view(source.dtype).to(parameter.dtype))


def _is_invertible(part: View) -> bool:
    """Whether each element occurs once, and its position tells which one it is."""
    reach = 0
    for stride, extent in sorted(zip(part.stride, part.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return False
            reach += (extent - 1) * stride
    return True


def map_positions(part: View, to: View, changed: Integers) -> tuple[Integers, Integers]:
    """Select the positions that are in a part, and map them to where the part is copied."""
    is_dense = part.num_elements == part.end - part.offset
    if is_dense and part.stride == to.stride:
        first, end = np.searchsorted(changed, [part.offset, part.end])
        return changed[first:end], changed[first:end] + (to.offset - part.offset)
    rest = changed - part.offset
    inside = rest >= 0
    targets = np.full(len(changed), to.offset, np.int64)
    # From the longest stride to the shortest: the remainder of a position is in the next.
    for axis in sorted(range(len(part.shape)), key=lambda axis: -part.stride[axis]):
        if part.shape[axis] == 1:
            continue
        index, rest = np.divmod(rest, part.stride[axis])
        inside &= index < part.shape[axis]
        targets += index * to.stride[axis]
    inside &= rest == 0
    return changed[inside], targets[inside]


class Sample(NamedTuple):
    """Elements that show whether a model still holds a version."""

    version: VersionId | None
    """The version, or None if it is unknown."""
    elements: Mapping[str, Patch]
    """Elements of parameters, by the parameter's name."""

    def is_held(self) -> bool:
        """Whether the parameters have the sampled values; an empty sample does not tell."""
        patches = self.elements.values()
        for device in {patch.target.device for patch in patches}:
            local = [patch for patch in patches if patch.target.device == device]
            live = [patch.target.index_select(0, patch.places) for patch in local]
            # One comparison: on a device each waits for all that was queued.
            if not torch.equal(torch.cat(live), torch.cat([patch.values for patch in local])):
                return False
        return bool(patches)

    def of(self, parameters: Collection[str]) -> Sample:
        """Return the sample of some parameters alone."""
        elements = {name: patch for name, patch in self.elements.items() if name in parameters}
        return self._replace(elements=elements)

    def with_patched(
        self, patches: Mapping[str, Sequence[Patch]], random: np.random.Generator
    ) -> Sample:
        """Add elements that patches write, of every parameter that they write to."""
        more = {}
        for name, pieces in patches.items():
            chosen = [self.elements[name]]
            for piece, count in _choose_parts(pieces, len(self.elements), random):
                indices = torch.from_numpy(random.integers(len(piece.positions), size=count))
                chosen.append(piece.at(indices).on_device())
            more[name] = _joined(chosen)
        return self._replace(elements={**self.elements, **more})


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
    for name, parts in copies.items():
        filled = [copy for copy in parts if copy[0].numel()]
        chosen = [
            _elements_of(copy, parameters[name], count, random)
            for copy, count in _choose_parts(filled, len(copies), random)
        ]
        if chosen:
            sample[name] = _joined(chosen).on_device()
    return Sample(version, sample)


def _choose_parts(
    parts: Sequence[T], num_parameters: int, random: np.random.Generator
) -> Iterator[tuple[T, int]]:
    """Choose a few parts of a parameter, and the number of elements to sample of each."""
    num_elements = _NUM_SAMPLED // max(1, num_parameters)
    num_elements = min(max(num_elements, _MIN_SAMPLED), _MAX_SAMPLED)
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
        values = _values_for(parameter, source.view(-1), (inside.to(source.device),))
        return Patch(flat(parameter), inside + start if start else inside, values)
    target, source = (tensor.reshape(tensor.shape or (1,)) for tensor in copy)
    indices = np.unravel_index(random.integers(target.numel(), size=count), target.shape)
    places = [torch.from_numpy(index) for index in indices]
    positions = torch.full((count,), View.of(target, parameter).offset)
    for index, stride in zip(places, target.stride(), strict=True):
        positions += index * stride
    values = _values_for(parameter, source, tuple(place.to(source.device) for place in places))
    return Patch(flat(parameter), positions, values)


def _joined(patches: Sequence[Patch]) -> Patch:
    if len(patches) == 1:
        return patches[0]
    positions = torch.cat([patch.places for patch in patches])
    values = torch.cat([patch.values for patch in patches])
    return Patch(patches[0].target, positions, values)


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter that shares its memory with no other, as flat integers."""
    plain = parameter.detach()
    return _as_integers(plain.as_strided((plain.numel(),), (1,), plain.storage_offset()))


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    """View the bits as integers of the elements' size."""
    return values.view(_INTEGERS[values.itemsize])


def same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a target has the bytes that a copy of the source into it leaves."""
    target, source = (tensor.reshape(tensor.shape or (1,)) for tensor in (target, source))
    rows = max(1, len(target) * _BLOCK_BYTES // max(1, target.nbytes))
    blocks = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    return all(
        _same_bits(block, other.to(device=block.device, dtype=block.dtype))
        for block, other in blocks
    )


def _same_bits(block: torch.Tensor, other: torch.Tensor) -> bool:
    pair = [_as_integers(tensor) for tensor in (block, other)]
    # Elements are compared one by one: of eight bytes, that takes half the time of two's.
    if all(
        bits.is_contiguous() and not (bits.nbytes % 8 or bits.storage_offset() * bits.itemsize % 8)
        for bits in pair
    ):
        pair = [bits.view(-1).view(torch.int64) for bits in pair]
    return torch.equal(*pair)
