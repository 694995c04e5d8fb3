"""Differences between two versions of one layout: what they are, and how they are written.

`dbuffer.io.find_changes` finds them.

Bits are compared, not numbers: -0.0 is not 0.0, and a NaN is itself. Positions count a tensor's
*words*, which are its elements; one of 16 bytes (complex128) is two words of 8.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format import delta
from dbuffer.format.delta import Integers
from dbuffer.format.layout import Layout
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, flat_view, split_evenly

Words = npt.NDArray[Any]
"""Unsigned numbers of one size."""

Positions = npt.NDArray[np.integer[Any]]
"""Places of words, as wide as they need to be."""

WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes of words of a tensor: torch computes with few unsigned ones."""

_GROUP_CHANGES = 1 << 16
"""Changed words that are handled together: each stream of a delta's chunk is then one block of
zstd, or less."""

_NEAR_CHANGES = 1 << 11
"""Changed words that are read, and then written: few enough to stay in a core's cache meanwhile,
each with its neighbors."""

_WHOLE_BYTES = 4 << 20
"""Bytes of a whole tensor that are handled together."""

_SHARES_A_THREAD = 8
"""Threads take pieces of work one by one; more of them, and the last one is waited for less."""


class TensorDiff(NamedTuple):
    """Words that differ in one tensor."""

    tensor: int
    """Index of the tensor in the layout."""
    positions: Positions | None
    """Ascending positions of the changed words in the flat tensor; None: the whole tensor."""
    values: Words
    """The new words: one a position, or all. Those of a whole tensor may be the very memory that
    was compared: encode or write them before it changes."""
    replaced: Words | None = None
    """The words that were at these positions, if they were kept. Those of a whole tensor may be
    the very memory of the version before: encode them before it changes."""
    first: int = 0
    """First word, of a part of a whole tensor."""

    def part(self, start: int, end: int) -> TensorDiff:
        """Return some of the changed words."""
        if (start, end) == (0, len(self.values)):
            return self
        some = slice(start, end)
        positions = None if self.positions is None else self.positions[some]
        replaced = None if self.replaced is None else self.replaced[some]
        return TensorDiff(self.tensor, positions, self.values[some], replaced, start)


@dataclass(frozen=True, slots=True, eq=False)
class Diff:
    """Words that differ in all tensors of a layout."""

    layout: Layout
    changes: list[TensorDiff]
    """One for each tensor that differs, in the order of the tensors."""
    num_changed: int
    """Words that differ, also of tensors that go whole."""


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a plain tensor."""
    data: npt.NDArray[np.uint8] = flat_view(tensor).numpy()
    return data


def narrowed(positions: Integers, num_bytes: int) -> Positions:
    """Return positions in a tensor of so many bytes, in half the memory wherever that can be.

    They may take more memory than the weights.
    """
    return positions.astype(np.uint32 if num_bytes < 1 << 32 else np.int64)


def cut_work(sizes: Sequence[int], copier: Copier) -> list[tuple[int, int]]:
    """Return slices of such work for a copier's threads, which take them one by one."""
    return split_evenly(sizes, copier.num_threads * _SHARES_A_THREAD)


def cut_changes(layout: Layout, changes: Iterable[TensorDiff]) -> list[list[TensorDiff]]:
    """Cut changes into groups of a bounded number of words, in a bounded range of the file.

    A group holds parts of changes in tensors with words of one size, all of whole tensors or none.
    Groups are in the order of the bytes of their words, then in that of the changes.
    """
    by_width: dict[int, list[TensorDiff]] = {width: [] for width in WORDS}
    for change in changes:
        by_width[layout.widths[change.tensor]].append(change)
    return [group for width, some in by_width.items() for group in _groups(layout, some, width)]


def _groups(
    layout: Layout, changes: Iterable[TensorDiff], width: int
) -> Iterator[list[TensorDiff]]:
    group: list[TensorDiff] = []
    is_whole, room, limit = False, 0, 0
    for change in changes:
        at, total, positions = 0, len(change.values), change.positions
        start = layout.offsets[change.tensor] // width
        last = start + layout.sizes[change.tensor] // width - 1
        if is_whole == (positions is None) and total <= room and last < limit:
            group.append(change)
            room -= total
            continue
        if is_whole != (positions is None):
            is_whole, room = not is_whole, 0
        while at < total:
            first = start + (at if positions is None else int(positions[at]))
            if not room or first >= limit:
                if group:
                    yield group
                group, room = [], _WHOLE_BYTES // width if is_whole else _GROUP_CHANGES
                limit = first + delta.MAX_CHUNK_WORDS
            end = min(at + room, total)
            if last >= limit:  # some words of the tensor are too far away
                places = np.arange(at, end) if positions is None else positions[at:end]
                end = at + max(1, int(places.searchsorted(limit - start)))
            group.append(change.part(at, end))
            room -= end - at
            at = end
    if group:
        yield group


def check_change(layout: Layout, change: TensorDiff) -> None:
    """Check that a change is of a tensor and has a new word for each position in it.

    Raises:
        InvalidWeightsError: it does not fit the layout.
    """
    if not 0 <= change.tensor < len(layout.specs):
        raise InvalidWeightsError(f"a change of tensor {change.tensor}, which is not there")
    positions, values = change.positions, change.values
    num_words = layout.sizes[change.tensor] // layout.widths[change.tensor]
    count = num_words if positions is None else len(positions)
    if (
        values.dtype != WORDS[layout.widths[change.tensor]]
        or not len(values) == count > 0
        or (positions is not None and not 0 <= int(positions[0]) <= int(positions[-1]) < num_words)
    ):
        raise InvalidWeightsError(
            f"a change does not fit {layout.specs[change.tensor]!s:.200}: {len(values)} values of "
            f"{values.dtype}, at {count} positions, or at some that are not in the tensor"
        )


def places_of(layout: Layout, group: Sequence[TensorDiff]) -> tuple[int, list[slice] | Positions]:
    """Return the places of a group's words in the file.

    Returns:
        The first word's place, counted in words of its size. The words' places from there on:
        ranges, for whole tensors.
    """
    width = group[0].values.itemsize
    starts = [layout.offsets[change.tensor] // width for change in group]
    positions = [change.positions for change in group if change.positions is not None]
    if not positions:
        first = starts[0] + group[0].first
        firsts = [start + change.first - first for start, change in zip(starts, group, strict=True)]
        lengths = [len(change.values) for change in group]
        return first, list(map(slice, firsts, map(operator.add, firsts, lengths)))
    places = np.concatenate(positions)
    first = starts[0] + int(places[0])
    # A tensor may begin further than 2 ** 32 words from the first place, or before it. But sums of
    # 32 bits wrap around, and all places lie within a group's range, `delta.MAX_CHUNK_WORDS`.
    shifts = np.array(starts, np.int64) - first
    places += np.repeat(shifts.astype(places.dtype), [len(each) for each in positions])
    return first, places


def join_words(parts: Sequence[Words]) -> Words:
    """Concatenate arrays; one alone is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def write_changes(changes: Sequence[TensorDiff], contents: FileTensors, copier: Copier) -> None:
    """Write changes into memory that holds the version before; writing them twice is harmless.

    The changes must fit the layout, as those of :func:`find_changes` do: nothing is checked.
    """
    groups = cut_changes(contents.layout, changes)

    def work(first: int, end: int) -> None:
        for group in groups[first:end]:
            if group[0].positions is None:  # joined first, they would take twice as long
                for change in group:
                    part = slice(change.first, change.first + len(change.values))
                    words_of(contents, change.tensor)[part] = change.values
            else:
                first, places = places_of(contents.layout, group)
                values = join_words([change.values for change in group])
                words = file_words(contents, values.itemsize)[first:]
                write_words(words, places, values, is_added=False)

    copier.in_parallel(work, cut_work(list(map(num_words, groups)), copier))


def write_words(
    words: Words,
    places: list[slice] | Positions,
    values: Words,
    *,
    is_added: bool,
) -> None:
    """Write values to places, or add them to the words there."""
    if isinstance(places, np.ndarray):
        places = places.astype(np.intp, copy=False)  # as an index, others take a third longer
        if not is_added:
            words[places] = values
            return
        for start in range(0, len(places), _NEAR_CHANGES):
            some = slice(start, start + _NEAR_CHANGES)
            near = places[some]
            words[near] = words.take(near) + values[some]
        return
    end = 0
    for place in places:
        start, end = end, end + place.stop - place.start
        if is_added:
            words[place] += values[start:end]
        else:
            words[place] = values[start:end]


def num_words(group: Sequence[TensorDiff]) -> int:
    """Return the number of words in a group."""
    return sum([len(change.values) for change in group])


def change_at(tensor: int, positions: Positions, values: torch.Tensor) -> TensorDiff:
    """Return the change that puts ``values``, plain and flat, at ``positions``, ascending.

    Positions and values count elements.
    """
    item_bytes = values.dtype.itemsize
    words = bytes_of(values).view(WORDS[min(item_bytes, 8)])
    if (times := item_bytes // 8) > 1:
        positions = (positions[:, None] * times + np.arange(times)).reshape(-1)
    return TensorDiff(tensor, positions, words)


def words_of(contents: FileTensors, tensor: int) -> Words:
    """Return the words of a tensor, in the memory of ``contents``."""
    layout = contents.layout
    start, num_words = layout.offsets[tensor], layout.sizes[tensor] // layout.widths[tensor]
    return np.frombuffer(contents.raw, WORDS[layout.widths[tensor]], num_words, start)


def file_words(contents: FileTensors, width: int) -> Words:
    """Return all the memory of ``contents`` as words of one size."""
    return np.frombuffer(contents.raw, WORDS[width], len(contents.raw) // width)
