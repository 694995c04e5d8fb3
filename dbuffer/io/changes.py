"""Compares two versions with one layout, and encodes the changed words as chunks of a delta file.

The comparison is of bits, not of numbers: -0.0 differs from 0.0, and a NaN equals a NaN with the
same bits. The copier's threads compare with numpy, which takes half of torch's time and releases
the interpreter's lock too. `device_changes` compares versions in a GPU's memory.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dbuffer.format import delta
from dbuffer.format.delta import GAP_BYTES, MAX_CHANGED_BYTES, Chunk
from dbuffer.format.layout import Layout, digest
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier

CHUNK_BYTES = 16 << 20
"""Bytes of a version that become one chunk, unless `MAX_CHANGED_BYTES` of them changed. On two CPU
cores, applying such chunks takes three quarters of the time of chunks of 4 MiB."""

COMPARED_BYTES = 4 << 20
"""Bytes of a version that a thread compares at a time."""

T = TypeVar("T")

Words: TypeAlias = npt.NDArray[Any]

Plane: TypeAlias = npt.NDArray[np.uint8]

WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


class Changes(msgspec.Struct, frozen=True):
    chunks: list[tuple[Chunk, bytes]]
    tensors: set[int]
    """Indices of the tensors that changed, in the layout of the compared memory."""

    @property
    def num_bytes(self) -> int:
        """Size of the changed words in bytes.

        If it exceeds ``max_bytes`` of `find_changes`, the comparison has left out some words.
        """
        return sum(chunk.num_changed * chunk.word_bytes for chunk, _ in self.chunks)

    @classmethod
    def joined(cls, parts: Iterable[Changes]) -> Changes:
        parts = list(parts)
        return cls(
            sorted(chunk for part in parts for chunk in part.chunks),
            {tensor for part in parts for tensor in part.tensors},
        )


class Patch(NamedTuple):
    """New words of a version, with their places. All words have one size."""

    places: Integers
    """Places of the words in the weights file, in ascending order, counted in words of this patch's
    size."""
    words: Words


_Range: TypeAlias = tuple[int, int, int]
"""Range of memory that becomes one chunk of a delta: its first byte, its end, and the size of its
words in bytes."""

_Found: TypeAlias = tuple[Integers, Words]
"""Ascending positions of changed words, and for each word its new minus its old value."""

_FindChanges: TypeAlias = Callable[[int, int, int], _Found]
"""Function that finds the changed words in a range of memory, given as start, end and word size in
bytes."""


def find_changes(
    before: torch.Tensor,
    after: torch.Tensor,
    layout: Layout,
    copier: Copier,
    *,
    first_byte: int = 0,
    file_starts: Sequence[int] | None = None,
    share: tuple[int, int] = (0, 1),
    max_bytes: float = math.inf,
) -> Changes:
    """Compare the bytes of two versions with one layout, and encode the changes.

    ``before`` and ``after`` have the bytes of ``layout`` from ``first_byte`` on. If the weights
    file has the tensors at other offsets, ``file_starts`` has these offsets. ``share`` is this
    rank's number and the number of ranks: each rank compares an equal share. If the changed words
    have more bytes than ``max_bytes``, the comparison stops early, and the result is incomplete.
    """
    ranges = ranges_of(layout, first_byte, first_byte + len(after), CHUNK_BYTES)
    first, last = (number * len(ranges) // share[1] for number in (share[0], share[0] + 1))
    scratch = _Scratch()

    def find(start: int, end: int, width: int) -> _Found:
        inside = slice(start - first_byte, end - first_byte)
        return _compare(words_in(before[inside], width), words_in(after[inside], width), scratch)

    return _encode(find, ranges[first:last], layout, copier, file_starts, max_bytes)


def apply_patch(patch: Patch, memory: torch.Tensor, layout: Layout, copier: Copier) -> Changes:
    """Write a patch into memory that has the previous version's bytes; return the changes."""
    words, width = words_in(memory, patch.words.itemsize), patch.words.itemsize

    def find(start: int, end: int, width: int) -> _Found:
        first, last = patch.places.searchsorted((start // width, end // width)).tolist()
        places, new = patch.places[first:last], patch.words[first:last]
        differences = new - words.take(places)
        words[places] = new
        (differs,) = differences.nonzero()
        return places.take(differs) - start // width, differences.take(differs)

    ranges = [
        (start, end, width) for start, end, _ in ranges_of(layout, 0, len(memory), CHUNK_BYTES)
    ]
    return _encode(find, ranges, layout, copier)


def ranges_of(layout: Layout, first_byte: int, end_byte: int, most_bytes: int) -> list[_Range]:
    """Cut memory into ranges. The word size of a range is the size of its smallest elements.

    Adjacent ranges of `COMPARED_BYTES` with one word size are joined, up to ``most_bytes``.
    """
    ranges: list[_Range] = []
    for start in range(first_byte, end_byte, COMPARED_BYTES):
        end = min(start + COMPARED_BYTES, end_byte)
        if not len(sizes := layout.byte_ranges.within(start, end).word_bytes):
            continue
        width = int(sizes.min())
        if ranges and ranges[-1][1:] == (start, width) and end - ranges[-1][0] <= most_bytes:
            start, _, _ = ranges.pop()
        ranges.append((start, end, width))
    return ranges


def _encode(
    find: _FindChanges,
    ranges: list[_Range],
    layout: Layout,
    copier: Copier,
    file_starts: Sequence[int] | None = None,
    max_bytes: float = math.inf,
) -> Changes:
    chunks: list[tuple[Chunk, bytes]] = []
    changed: set[int] = set()
    num_bytes = 0
    starts = None if file_starts is None else np.array(file_starts, np.int64)

    def changes_in(start: int, end: int, width: int) -> Iterator[tuple[_Found, int]]:
        nonlocal num_bytes
        for at in range(start, end, COMPARED_BYTES):
            if num_bytes > max_bytes:
                return
            to = min(at + COMPARED_BYTES, end)
            places, differences = find(at, to, width)
            places += at // width
            tensors = layout.byte_ranges.within(at, to).in_words(width)
            counts = tensors.counts(places)
            if counts.sum() < len(places):  # some are in the padding between tensors
                inside = tensors.owners(places) >= 0
                places, differences = places[inside], differences[inside]
            changed.update(tensors.tensors[counts > 0].tolist())
            if starts is not None:
                places += (starts[tensors.tensors] // width - tensors.starts).repeat(counts)
            num_bytes += width * len(places)  # may miss what another thread adds now: no harm
            yield (places, differences), differences.nbytes

    def work(first: int, last: int) -> None:
        for of_range in itertools.starmap(changes_in, ranges[first:last]):
            for group in groups_of(of_range):
                chunks.append(_encode_chunk(*map(np.concatenate, zip(*group, strict=True))))

    copier.in_parallel(work, copier.cut_work([end - start for start, end, _ in ranges]))
    return Changes(sorted(chunks), changed)


def groups_of(items: Iterable[tuple[T, int]]) -> Iterator[list[T]]:
    """Group the changes of adjacent ranges, given with their sizes in bytes, into chunks."""
    group: list[T] = []
    sum_bytes = 0
    for item, num_bytes in items:
        sum_bytes += num_bytes
        if sum_bytes > MAX_CHANGED_BYTES:
            yield group
            group, sum_bytes = [], num_bytes
        if num_bytes:
            group.append(item)
    if group:
        yield group


class _Scratch(threading.local):
    """One thread's buffers for comparing a range. Allocating them takes longer than comparing."""

    def __init__(self) -> None:
        self.differences = np.empty(COMPARED_BYTES, np.uint8)
        self.flags = np.empty(COMPARED_BYTES // 8, np.bool_)


def _compare(old: Words, new: Words, scratch: _Scratch) -> _Found:
    """Return the positions of the words that differ, and for each word its new minus its old value.

    Eight bytes are compared at a time. This is possible because the length of a range is a multiple
    of `ALIGNMENT_BYTES`.
    """
    differences = scratch.differences[: new.nbytes].view(new.dtype)
    np.subtract(new, old, out=differences)
    eights = differences.view(np.uint64)
    flags = np.not_equal(eights, 0, out=scratch.flags[: len(eights)])
    fours = flags.view(np.uint32)  # four flags at a time, as few are set
    (groups,) = (fours != 0).nonzero()
    if 3 * len(groups) > 2 * len(fours):
        (positions,) = (differences != 0).nonzero()
        return positions, differences.take(positions)
    (hits,) = fours.take(groups).view(np.bool_).nonzero()
    positions = _positions_in(groups, hits, 4)
    differences = eights.take(positions).view(new.dtype)
    (hits,) = (differences != 0).nonzero()
    return _positions_in(positions, hits, 8 // new.itemsize), differences.take(hits)


def _positions_in(groups: Integers, hits: Integers, size: int) -> Integers:
    shift = size.bit_length() - 1  # a division takes several times as long
    positions: Integers = groups.take(hits >> shift)
    positions <<= shift
    positions |= hits & (size - 1)
    return positions


def _encode_chunk(places: Integers, differences: Words) -> tuple[Chunk, bytes]:
    width = differences.itemsize
    gaps = np.zeros(len(places), np.int64)
    np.subtract(places[1:], places[:-1], out=gaps[1:])
    gaps[1:] -= 1
    zigzag = (differences << 1) ^ -(differences >> (8 * width - 1))
    planes: list[Plane | None] = []
    for words, num_streams in ((gaps, GAP_BYTES), (zigzag, width)):
        num_planes = -(-int(words.max()).bit_length() // 8)  # all higher planes are zero
        planes += [*np.ascontiguousarray(planes_of(words)[:num_planes])]
        planes += [None] * (num_streams - num_planes)
    return pack_chunk(int(places[0]), int(places[-1]), width, len(places), planes)


def pack_chunk(
    first: int, last: int, width: int, num_changed: int, planes: Sequence[Plane | None]
) -> tuple[Chunk, bytes]:
    """Make a chunk of changed words, the first and last at these places, from its streams' bytes.

    A stream of zeros may be None.
    """
    stored = [b"" if plane is None or not plane.any() else delta.pack(plane) for plane in planes]
    body = b"".join([np.array(list(map(len, stored)), "<u4").tobytes(), *stored])
    num_bytes = width * (last + 1 - first)
    return Chunk(first * width, num_bytes, width, num_changed, len(body), digest(body)), body


def words_in(memory: torch.Tensor, width: int) -> Words:
    return memory.numpy().view(WORDS[width])


def planes_of(words: npt.NDArray[Any]) -> Plane:
    """View the lowest byte of all words as one row, the next byte as the next row, and so on."""
    return words.view(np.uint8).reshape(len(words), words.itemsize).T
