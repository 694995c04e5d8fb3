"""Changes between two versions of one layout, found and encoded a chunk at a time.

Bits are compared, not numbers: -0.0 is not 0.0, and a NaN is itself. `dbuffer.format.delta`
describes words and chunks; `dbuffer.io.delta` makes a file of the chunks, and applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dbuffer.format import delta
from dbuffer.format.delta import CHUNK_BYTES, Chunk
from dbuffer.format.layout import BLOCK_BYTES, Layout
from dbuffer.format.words import Integers, WordRanges
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, flat_view, split_evenly

Words = npt.NDArray[Any]
"""Unsigned numbers of one size."""

Bytes = npt.NDArray[np.uint8]

WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

_RUN_BYTES = BLOCK_BYTES
"""Bytes that are compared together. Each call of numpy lets go of the interpreter's lock, and then
waits while another thread has it: few calls, then; and yet a core's cache holds most of a run."""

_SAMPLE_WORDS = 1 << 14

_SHARES_A_THREAD = 8
"""Threads take pieces of work one by one; more of them, and the last one is waited for less."""


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Chunks of a delta, in the order of the file."""

    chunks: list[tuple[Chunk, bytes]]
    tensors: set[int]
    """Indices of the tensors that differ, in the layout of the memory that was compared."""

    @property
    def num_changed(self) -> int:
        """Words that differ. If these are more than was asked for, some chunks are missing."""
        return sum(chunk.num_changed for chunk, _ in self.chunks)

    @classmethod
    def joined(cls, parts: Iterable[Changes]) -> Changes:
        """Join the changes of several parts of a version."""
        parts = list(parts)
        chunks = [chunk for part in parts for chunk in part.chunks]
        return cls(
            sorted(chunks, key=lambda chunk: chunk[0][:2]),
            {tensor for part in parts for tensor in part.tensors},
        )

    def encode(self) -> bytes:
        """Return the chunks for another rank: their number in 8 bytes, their rows, their bytes."""
        rows = np.array([row for row, _ in self.chunks], delta.CHUNK_ROW)
        bodies = [body for _, body in self.chunks]
        return b"".join([len(rows).to_bytes(8, "little"), rows.tobytes(), *bodies])

    @classmethod
    def decode(cls, data: memoryview) -> Changes:
        """Return the changes that `encode` has encoded, without the tensors."""
        rows = np.frombuffer(data, delta.CHUNK_ROW, int.from_bytes(data[:8], "little"), 8)
        chunks, at = [], 8 + rows.nbytes
        for row in rows.tolist():
            chunk = Chunk(*row)
            chunks.append((chunk, bytes(data[at : at + chunk.stored_bytes])))
            at += chunk.stored_bytes
        return cls(chunks, set())


class Patch(NamedTuple):
    """New words of one size, at named places."""

    places: Integers
    """Ascending places in the file, counted in words of this size."""
    words: Words

    @property
    def width(self) -> int:
        return self.words.itemsize

    def cut(self) -> Iterator[Patch]:
        """Yield the part of it in each range of the file that makes a chunk."""
        if not len(self.places):
            return
        step = CHUNK_BYTES // self.width
        starts = np.arange(step, int(self.places[-1]) + 1, step)
        ends = [*self.places.searchsorted(starts).tolist(), len(self.places)]
        for start, end in itertools.pairwise([0, *ends]):
            if start < end:
                yield Patch(self.places[start:end], self.words[start:end])


_Differences: TypeAlias = tuple[Integers, Words, Words]
"""Ascending places of words that differ, the old words there, and the new."""


def cut_work(sizes: Sequence[int], copier: Copier) -> list[tuple[int, int]]:
    """Return slices of such work for a copier's threads, which take them one by one."""
    return split_evenly(sizes, copier.num_threads * _SHARES_A_THREAD)


def find_changes(
    before: FileTensors,
    after: Bytes,
    copier: Copier,
    *,
    first_byte: int = 0,
    file_starts: Sequence[int] | None = None,
    share: tuple[int, int] = (0, 1),
    max_changed: float = math.inf,
) -> Changes:
    """Compare a version with the bytes of the next, and encode what differs.

    Args:
        before: the version to start from.
        after: bytes of the next version, from ``first_byte`` on.
        copier: its threads do it.
        first_byte: a tensor's first byte in the memory of ``before``.
        file_starts: where each tensor of ``before`` begins in the weights file; None if they have
            the file's layout.
        share: number of this rank, and number of ranks; each compares its share of the file.
        max_changed: words that may differ. When more do, the comparison ends.
    """
    layout, end = before.layout, first_byte + len(after)
    ranges = list(_ranges(layout, first_byte, end))
    first, last = (number * len(ranges) // share[1] for number in (share[0], share[0] + 1))
    ranges = ranges[first:last]
    chunks: dict[int, list[tuple[Chunk, bytes]]] = {}
    changed: set[int] = set()
    num_changed = 0
    old = bytes_in(before)

    def work(first: int, end: int) -> None:
        nonlocal num_changed
        mask = np.empty(_RUN_BYTES // 8, np.bool_)
        for number in range(first, end):
            if num_changed > max_changed:
                return
            width, start, stop = ranges[number]
            tensors = layout.word_ranges[width].within(start // width, stop // width)
            sides = old[start:stop], after[start - first_byte : stop - first_byte]
            old_words, new_words = (side.view(WORDS[width]) for side in sides)
            differs = _compare(old_words, new_words, start // width, tensors, mask)
            chunks[number] = list(_encoded(tensors, differs, file_starts))
            changed.update(tensors.tensors[tensors.counts_of(differs[0]) > 0].tolist())
            num_changed += len(differs[0])  # less, if another thread does so now: no harm

    copier.in_parallel(work, cut_work([stop - start for _, start, stop in ranges], copier))
    return Changes([chunk for number in sorted(chunks) for chunk in chunks[number]], changed)


def apply_patches(patches: Iterable[Patch], contents: FileTensors, copier: Copier) -> Changes:
    """Write patches into memory that holds the version before; return what that changed."""
    parts = [
        part for patch in sorted(patches, key=lambda patch: patch.width) for part in patch.cut()
    ]
    chunks: dict[int, tuple[Chunk, bytes]] = {}
    changed: set[int] = set()

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            places, new = parts[number]
            words = file_words(contents, new.itemsize)
            old = words.take(places)
            (differs,) = (old != new).nonzero()
            if len(differs):
                chunks[number] = _encode_chunk(places[differs], old[differs], new[differs])
                tensors = contents.layout.word_ranges[new.itemsize]
                changed.update(tensors.tensors[tensors.counts_of(places[differs]) > 0].tolist())
            words[places] = new

    copier.in_parallel(work, cut_work([len(part.places) for part in parts], copier))
    return Changes([chunks[number] for number in sorted(chunks)], changed)


def _ranges(layout: Layout, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the width of the words, the first byte and the end of each chunk between two bytes."""
    for width, tensors in layout.word_ranges.items():
        tensors = tensors.within(start // width, -(-end // width))
        firsts = np.maximum(tensors.starts * width, start)
        lasts = np.minimum(tensors.ends * width, end) - 1
        num_open = np.zeros(-(-end // CHUNK_BYTES) + 1, np.int64)
        np.add.at(num_open, firsts // CHUNK_BYTES, 1)
        np.add.at(num_open, lasts // CHUNK_BYTES + 1, -1)
        for number in num_open.cumsum().nonzero()[0].tolist():
            at = number * CHUNK_BYTES
            yield width, max(at, start), min(at + CHUNK_BYTES, end)


def _compare(
    old: Words, new: Words, start: int, tensors: WordRanges, mask: npt.NDArray[np.bool_]
) -> _Differences:
    """Find the words that differ in a range of the memory, which begins with the word ``start``."""
    runs, step = [], _RUN_BYTES // old.itemsize
    for at in range(0, len(old), step):
        places, *words = _compare_run(old[at : at + step], new[at : at + step], mask)
        places += start + at
        runs.append((places, *words))
    places, old_words, new_words = map(_joined, zip(*runs, strict=True))
    if tensors.counts_of(places).sum() < len(places):  # padding or other tensors differ, too
        inside = tensors.owners(places) >= 0
        places, old_words, new_words = places[inside], old_words[inside], new_words[inside]
    return places, old_words, new_words


def _compare_run(old: Words, new: Words, mask: npt.NDArray[np.bool_]) -> _Differences:
    """Find the words that differ, with their positions in the run.

    Eight bytes are compared at a time, and single words only where these differ. The length of a
    run is a multiple of `ALIGNMENT_BYTES`, as tensors and chunks begin at such multiples.
    """
    old_eights, new_eights = old.view(np.uint64), new.view(np.uint64)
    mask = np.not_equal(old_eights, new_eights, out=mask[: len(old_eights)])
    fours = mask.view(np.uint32)  # four of the mask at a time: few of them are true
    (groups,) = (fours != 0).nonzero()
    if 3 * len(groups) > 2 * len(fours):
        (positions,) = (old != new).nonzero()
        return positions, old.take(positions), new.take(positions)
    (hits,) = fours.take(groups).view(np.bool_).nonzero()
    eights = _positions_in(groups, hits, 4)
    some_old, some_new = (side.take(eights).view(old.dtype) for side in (old_eights, new_eights))
    (hits,) = (some_old != some_new).nonzero()
    positions = _positions_in(eights, hits, 8 // old.itemsize)
    return positions, some_old.take(hits), some_new.take(hits)


def _positions_in(groups: Integers, hits: Integers, size: int) -> Integers:
    """Return the positions of hits, which are counted in groups of ``size``, side by side."""
    shift = size.bit_length() - 1  # a division takes several times as long
    positions: Integers = groups.take(hits >> shift)
    positions <<= shift
    positions |= hits & (size - 1)
    return positions


def _encoded(
    tensors: WordRanges, differs: _Differences, file_starts: Sequence[int] | None
) -> Iterator[tuple[Chunk, bytes]]:
    """Yield the chunks of the words that differ in a range."""
    places, old, new = differs
    if file_starts is None:
        if len(places):
            yield _encode_chunk(*differs)
        return
    for index, start, some in tensors.split(places):
        in_file = file_starts[index] // old.itemsize
        yield _encode_chunk(places[some] + (in_file - start), old[some], new[some])


def _encode_chunk(places: Integers, old: Words, new: Words) -> tuple[Chunk, bytes]:
    """Encode words at ascending places in the file."""
    code, values = delta.DIFFERENCES, _zigzag(new - old)
    num_words = int(places[-1] - places[0]) + 1
    if 2 * len(places) > num_words and not _is_shorter(values, new):
        code, values = delta.NEW_WORDS, new
    streams = [*delta.split_planes(_gaps_of(places)), *delta.split_planes(values)]
    stored = [delta.pack(stream) for stream in streams]
    body = b"".join([np.array(list(map(len, stored)), "<u4").tobytes(), *stored])
    chunk = Chunk(
        word_bytes=new.itemsize,
        first_word=int(places[0]),
        num_words=num_words,
        num_changed=len(places),
        raw_bytes=sum(map(len, streams)),
        stored_bytes=len(body),
        xxh3=xxhash.xxh3_64_intdigest(body),
        values=code,
    )
    return chunk, body


def _gaps_of(places: Integers) -> Words:
    """Return the gaps before each place, as 16-bit numbers."""
    between = places[1:] - places[:-1]
    between -= 1
    gaps = np.zeros(len(places), np.uint16)
    (long,) = (between >= delta.ESCAPE).nonzero()
    times, between[long] = np.divmod(between.take(long), delta.ESCAPE)
    gaps[1:] = between
    return np.insert(gaps, np.repeat(long + 1, times), delta.ESCAPE) if len(long) else gaps


def _zigzag(differences: Words) -> Words:
    top = 8 * differences.dtype.itemsize - 1
    return (differences << 1) ^ -(differences >> top)


def _is_shorter(differences: Words, values: Words) -> bool:
    """Whether words are stored in fewer bytes as differences, judged by a sample of them."""
    step = max(1, len(values) // _SAMPLE_WORDS)

    def size(words: Words) -> int:
        return sum(len(delta.pack(plane)) for plane in delta.split_planes(words[::step]))

    return size(differences) <= size(values)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def words_in(tensor: torch.Tensor) -> Words:
    """Return the memory of a plain tensor as words."""
    return flat_view(tensor).numpy().view(WORDS[min(tensor.itemsize, 8)])


def bytes_in(contents: FileTensors) -> Bytes:
    """Return all the memory of ``contents``."""
    return np.frombuffer(contents.raw, np.uint8)[: contents.layout.checksums_offset]


def file_words(contents: FileTensors, width: int) -> Words:
    """Return all the memory of ``contents`` as words of one size."""
    return np.frombuffer(contents.raw, WORDS[width], len(contents.raw) // width)
