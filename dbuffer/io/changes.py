"""Finds the words that changed between two versions, and encodes them as chunks of a delta file.

The comparison is of bits, not of numbers: -0.0 differs from 0.0, and a NaN equals a NaN with the
same bits. Three functions find changes:

- `find_changes` compares two versions in main memory. The copier's threads compare with numpy,
  which takes half of torch's time and releases the interpreter's lock too.
- `find_on_device` compares two versions in a device's memory. The device finds the changed words,
  and only these are copied to main memory. `encode_found` encodes them later.
- `apply_patch` writes new words into a version, and compares only these.

All three encode the changes with `_encode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from dbuffer.format.delta import MAX_CHANGED_BYTES, Chunk
from dbuffer.format.layout import Layout
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier
from dbuffer.io.delta import WORDS, Words, encode_chunk
from dbuffer.io.devices import Download

CHUNK_BYTES = 16 << 20
"""Bytes of a version that become one chunk. A chunk ends earlier if `MAX_CHANGED_BYTES` in it have
changed. On two CPU cores, applying such chunks takes three quarters of the time that chunks of
4 MiB take."""

DEVICE_BYTES = 64 << 20
"""Bytes of a version that a device compares at a time. The host waits once for each comparison,
which takes as much memory again, and up to 20 bytes for each changed word."""

_SIGNED_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


_Found: TypeAlias = tuple[Integers, Words]
"""Places of changed words in memory, in ascending order, and for each word its new minus its old
value. Places count words from the beginning of the layout."""

_Find: TypeAlias = Callable[[int, int, int], _Found]
"""Function that finds the changed words in a range of memory, given as start, end and word size in
bytes."""

_Range: TypeAlias = tuple[int, int, int]
"""Range of memory that becomes one chunk of a delta: the arguments of `_Find`."""


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
    old, new = before.numpy(), after.numpy()
    ranges = _cut(layout, first_byte, first_byte + len(old), CHUNK_BYTES)
    first, last = (number * len(ranges) // share[1] for number in (share[0], share[0] + 1))

    def find(start: int, end: int, width: int) -> _Found:
        inside = slice(start - first_byte, end - first_byte)
        places, differences = _compare(*(side[inside].view(WORDS[width]) for side in (old, new)))
        places += start // width
        return places, differences

    in_share = [(find, compared) for compared in ranges[first:last]]
    return _encode(in_share, layout, copier, file_starts, max_bytes)


def apply_patch(patch: Patch, memory: torch.Tensor, layout: Layout, copier: Copier) -> Changes:
    """Write a patch into memory that has the previous version's bytes; return the changes."""
    width = patch.words.itemsize
    words = memory.numpy().view(WORDS[width])

    def find(start: int, end: int, width: int) -> _Found:
        first, last = patch.places.searchsorted((start // width, end // width)).tolist()
        places, new = patch.places[first:last], patch.words[first:last]
        differences = new - words.take(places)
        words[places] = new
        (differs,) = (differences != 0).nonzero()
        return places.take(differs), differences.take(differs)

    ranges = _cut(layout, 0, len(memory), CHUNK_BYTES)
    return _encode([(find, (start, end, width)) for start, end, _ in ranges], layout, copier)


def find_on_device(
    before: torch.Tensor, after: torch.Tensor, layout: Layout, *, first_byte: int = 0
) -> list[DeviceChanges]:
    """Compare two versions in a device's memory. Takes the arguments of `find_changes`.

    This includes the padding between tensors, until `encode_found` drops it. So the padding should
    be equal in both versions.
    """
    found: list[DeviceChanges] = []
    for start, end, width in _cut(layout, first_byte, first_byte + len(after), DEVICE_BYTES):
        old, new = (side[start - first_byte : end - first_byte] for side in (before, after))
        found.append(DeviceChanges(old, new, (start, end, width)))
    return found


class DeviceChanges:
    """Changed words of a range of memory on a device, on their way to main memory."""

    def __init__(self, old: torch.Tensor, new: torch.Tensor, compared: _Range) -> None:
        self.start, self.end, self.width = compared
        words = _SIGNED_WORDS[self.width]
        differences = new.view(words) - old.view(words)
        (positions,) = differences.nonzero(as_tuple=True)  # the host waits for the device here
        self.num_bytes = self.width * len(positions)
        self._positions = Download(positions.to(torch.int32))
        self._differences = Download(differences[positions])

    def find(self, start: int, end: int, width: int) -> _Found:
        """Wait until the changed words are in main memory, and return those in a range."""
        positions = self._positions.wait().numpy()
        bounds = np.array((start - self.start, end - self.start), np.int32) // width
        inside = slice(*positions.searchsorted(bounds))
        differences = self._differences.wait().numpy().view(WORDS[width])
        return positions[inside].astype(np.int64) + self.start // width, differences[inside]


def encode_found(
    found: Sequence[DeviceChanges], layout: Layout, copier: Copier, file_starts: Sequence[int]
) -> Changes:
    """Encode the results of `find_on_device` as `find_changes` does."""
    work = [
        (changes.find, (start, min(start + CHUNK_BYTES, changes.end), changes.width))
        for changes in found
        for start in range(changes.start, changes.end, CHUNK_BYTES)
    ]
    return _encode(work, layout, copier, file_starts)


def _cut(layout: Layout, first_byte: int, end_byte: int, most_bytes: int) -> list[_Range]:
    """Cut memory into ranges. The word size of a range is the size of its smallest elements.

    First cut at each multiple of `MAX_CHANGED_BYTES`. Then join adjacent ranges that have the same
    word size, up to ``most_bytes``.
    """
    ranges: list[_Range] = []
    for start in range(first_byte, end_byte, MAX_CHANGED_BYTES):
        end = min(start + MAX_CHANGED_BYTES, end_byte)
        if not len(sizes := layout.byte_ranges.within(start, end).word_bytes):
            continue
        width = int(sizes.min())
        if ranges and ranges[-1][1:] == (start, width) and end - ranges[-1][0] <= most_bytes:
            start, _, _ = ranges.pop()
        ranges.append((start, end, width))
    return ranges


def _encode(
    ranges: Sequence[tuple[_Find, _Range]],
    layout: Layout,
    copier: Copier,
    file_starts: Sequence[int] | None = None,
    max_bytes: float = math.inf,
) -> Changes:
    """Find the changed words in all ranges, and encode them. Ignore words that are no tensor's."""
    chunks: list[tuple[Chunk, bytes]] = []
    changed: set[int] = set()
    num_bytes = 0
    starts = None if file_starts is None else np.array(file_starts, np.int64)

    def find_pieces(find: _Find, start: int, end: int, width: int) -> Iterator[_Found]:
        nonlocal num_bytes
        for at in range(start, end, MAX_CHANGED_BYTES):
            if num_bytes > max_bytes:
                return
            to = min(at + MAX_CHANGED_BYTES, end)
            places, differences = find(at, to, width)
            tensors = layout.byte_ranges.within(at, to).in_words(width)
            counts = tensors.counts(places)
            if counts.sum() < len(places):  # some are in the padding between tensors
                inside = tensors.owners(places) >= 0
                places, differences = places[inside], differences[inside]
            changed.update(tensors.tensors[counts > 0].tolist())
            if starts is not None:
                places += (starts[tensors.tensors] // width - tensors.starts).repeat(counts)
            num_bytes += differences.nbytes  # may miss what another thread adds now: no harm
            yield places, differences

    def work(first: int, last: int) -> None:
        for find, (start, end, width) in ranges[first:last]:
            for group in _groups_of(find_pieces(find, start, end, width)):
                chunks.append(encode_chunk(*map(np.concatenate, zip(*group, strict=True))))

    copier.in_parallel(work, copier.cut_work([end - start for _, (start, end, _) in ranges]))
    return Changes(sorted(chunks), changed)


def _groups_of(pieces: Iterable[_Found]) -> Iterator[list[_Found]]:
    """Group changes of adjacent ranges. A group has at most `MAX_CHANGED_BYTES` of new words."""
    group: list[_Found] = []
    num_bytes = 0
    for piece in pieces:
        num_bytes += piece[1].nbytes
        if num_bytes > MAX_CHANGED_BYTES:
            yield group
            group, num_bytes = [], piece[1].nbytes
        if len(piece[0]):
            group.append(piece)
    if group:
        yield group


def _compare(old: Words, new: Words) -> _Found:
    """Return the positions of the words that differ, and for each word its new minus its old value.

    Few words differ. So look for a difference in groups of 32 bytes, then in the 8-byte parts of
    the groups that differ, then in their words. The length of both arrays is a multiple of 32
    bytes, because it is a multiple of `ALIGNMENT_BYTES`.
    """
    differences = new - old
    eights = differences.view(np.uint64)
    flags = eights != 0
    fours = flags.view(np.uint32)
    (groups,) = (fours != 0).nonzero()
    if 10 * len(groups) > 9 * len(fours):
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
