"""A delta file: made of chunks that `dbuffer.io.changes` has encoded, and applied.

`dbuffer.format.delta` describes it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dbuffer.errors import StoreCorruptError
from dbuffer.format import delta
from dbuffer.format.delta import Chunk, DeltaHeader, DeltaRecord
from dbuffer.format.lineage import VersionId
from dbuffer.format.words import Integers
from dbuffer.io.changes import WORDS, Changes, Words, cut_work, file_words
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors

ReadChunk: TypeAlias = Callable[[int], bytes | memoryview]
"""Called with a chunk's number, in any order and from several threads, for its stored bytes."""


def encode_delta(
    changes: Changes,
    checksums: tuple[Sequence[int], Sequence[int]] | None,
    *,
    base: VersionId,
    version: VersionId,
    layout_xxh3: str,
) -> list[bytes]:
    """Return the parts of a delta file, its header first.

    Args:
        changes: what differs.
        checksums: checksums of all tensors before and after, if the versions have any.
        base: the version before.
        version: the version after.
        layout_xxh3: digest of the layout of both.
    """
    changed: list[tuple[int, int]] = []
    if checksums is not None:
        pairs = enumerate(zip(*checksums, strict=True))
        changed = [(index, after) for index, (before, after) in pairs if before != after]
    rows = delta.tensor_table(len(changed))
    if changed:
        rows["tensor"], rows["xxh3"] = zip(*changed, strict=True)
    record = DeltaRecord(
        base=base,
        id=version,
        layout_xxh3=layout_xxh3,
        is_hashed=checksums is not None,
        num_tensors=len(rows),
        num_chunks=len(changes.chunks),
    )
    header = delta.encode_header(record, rows, [chunk for chunk, _ in changes.chunks])
    return [header, *(body for _, body in changes.chunks)]


class Excerpt(NamedTuple):
    """Parts of a file's data that some memory holds, in the file's order."""

    starts: Integers
    """Bytes from the first tensor's beginning, in the file."""
    ends: Integers
    places: Integers
    """Byte in the memory at which each part begins."""

    def overlaps(self, chunk: Chunk) -> bool:
        """Whether a chunk may change some of it."""
        first = chunk.first_word * chunk.word_bytes
        part = int(self.ends.searchsorted(first, side="right"))
        end = first + chunk.num_words * chunk.word_bytes
        return part < len(self.starts) and int(self.starts[part]) < end

    def select(self, places: Integers, word_bytes: int) -> tuple[npt.NDArray[np.bool_], Integers]:
        """Return which words of the file the memory holds, and their places there."""
        at = places * word_bytes
        part = self.ends.searchsorted(at, side="right")
        part[part == len(self.ends)] = 0  # behind all, and so behind the first
        is_inside = (self.starts[part] <= at) & (at < self.ends[part])
        inside = (at - self.starts[part] + self.places[part])[is_inside]
        return is_inside, inside // word_bytes


def apply_delta(
    header: DeltaHeader,
    read_chunk: ReadChunk,
    contents: FileTensors,
    copier: Copier,
    excerpt: Excerpt | None = None,
) -> None:
    """Apply a delta to the version before, in place.

    Apply it once only: chunks may hold differences. All of a chunk is checked before any byte of it
    is written. The caller verifies the checksums of the result.

    Args:
        header: the delta's.
        read_chunk: returns a chunk's bytes.
        contents: memory of the caller's own, which no one else writes.
        copier: its threads do it.
        excerpt: parts of the version that the contents hold. Chunks that change nothing in them are
            not read. None: all of it, as the layout says.

    Raises:
        StoreCorruptError: a chunk is not as it was written, or does not hold what the header says;
            others may have been applied. Or the contents have another layout.
    """
    if excerpt is None:
        _check_layout(header, contents)

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            if excerpt is None or excerpt.overlaps(chunk):
                places, values = _decode_chunk(header, number, read_chunk(number))
                if excerpt is not None:
                    is_inside, places = excerpt.select(places, chunk.word_bytes)
                    values = values[is_inside]
                _write_words(file_words(contents, chunk.word_bytes), places, values, chunk.values)

    copier.in_parallel(work, cut_work([chunk.raw_bytes for chunk in header.chunks], copier))


def changed_positions(
    header: DeltaHeader, read_chunk: ReadChunk, copier: Copier
) -> dict[int, Integers]:
    """Read the ascending positions of changed words in each changed tensor, by its index.

    Raises:
        StoreCorruptError: a chunk is not as it was written, or does not hold what the header says.
    """
    of_chunk: dict[int, list[tuple[int, Integers]]] = {}

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            places = _decode_places(header, chunk, _streams(header, number, read_chunk(number)))
            ranges = header.layout.word_ranges[chunk.word_bytes]
            tensors = ranges.within(int(places[0]), int(places[-1]) + 1)
            of_chunk[number] = [
                (index, places[some] - start) for index, start, some in tensors.split(places)
            ]

    copier.in_parallel(work, cut_work([chunk.raw_bytes for chunk in header.chunks], copier))
    by_tensor: dict[int, list[Integers]] = {}
    for number in sorted(of_chunk):
        for index, positions in of_chunk[number]:
            by_tensor.setdefault(index, []).append(positions)
    return {index: np.concatenate(parts) for index, parts in sorted(by_tensor.items())}


def _check_layout(header: DeltaHeader, contents: FileTensors) -> None:
    ours, theirs = contents.layout, header.layout
    if ours is not theirs and (ours.specs, ours.offsets) != (theirs.specs, theirs.offsets):
        raise StoreCorruptError(
            f"delta {header.record.id} is for other tensors than those it is to be applied to"
        )


def _write_words(words: Words, places: Integers, values: Words, code: int) -> None:
    """Write values to places, or add them to the words there."""
    # torch reads and writes each place once, and has signed numbers alone.
    signed = f"<i{words.itemsize}"
    memory, source = (torch.from_numpy(array.view(signed)) for array in (words, values))
    write = memory.scatter_ if code == delta.NEW_WORDS else memory.scatter_add_
    write(0, torch.from_numpy(places), source)


def _streams(header: DeltaHeader, number: int, body: bytes | memoryview) -> list[memoryview]:
    """Cut a chunk into its streams, if it is as it was written."""
    chunk = header.chunks[number]
    if len(body) != chunk.stored_bytes or xxhash.xxh3_64_intdigest(body) != chunk.xxh3:
        raise StoreCorruptError(
            f"chunk {number} of delta {header.record.id} is not as it was written; publish again"
        )
    num_streams = delta.NUM_GAP_STREAMS + chunk.word_bytes
    lengths = struct.unpack_from(f"<{num_streams}I", body)
    ends = list(itertools.accumulate(lengths, initial=4 * num_streams))
    if ends[-1] != len(body):
        raise StoreCorruptError(f"delta: the streams of chunk {number} do not make it up")
    view = memoryview(body)
    return [view[start:end] for start, end in itertools.pairwise(ends)]


def _decode_chunk(
    header: DeltaHeader, number: int, body: bytes | memoryview
) -> tuple[Integers, Words]:
    """Return the places of a chunk's words in the file, and the words, or what is added to them."""
    chunk, streams = header.chunks[number], _streams(header, number, body)
    places = _decode_places(header, chunk, streams)
    planes = streams[delta.NUM_GAP_STREAMS :]
    unpacked = [delta.unpack(plane, chunk.num_changed) for plane in planes]
    words: Words = delta.join_planes(unpacked, WORDS[chunk.word_bytes])
    return places, _unzigzag(words) if chunk.values == delta.DIFFERENCES else words


def _decode_places(header: DeltaHeader, chunk: Chunk, streams: list[memoryview]) -> Integers:
    """Return the ascending places of a chunk's changed words, all of them in tensors."""
    raw_bytes = chunk.raw_bytes - chunk.num_changed * chunk.word_bytes
    planes = streams[: delta.NUM_GAP_STREAMS]
    gaps = [delta.unpack(plane, raw_bytes // delta.NUM_GAP_STREAMS) for plane in planes]
    places = _decode_gaps(delta.join_planes(gaps, WORDS[2]))
    if len(places) != chunk.num_changed or places[0] != 0 or places[-1] != chunk.num_words - 1:
        raise StoreCorruptError("delta: a chunk's positions are not those that its header counts")
    places += chunk.first_word
    tensors = header.layout.word_ranges[chunk.word_bytes]
    tensors = tensors.within(chunk.first_word, chunk.first_word + chunk.num_words)
    if tensors.counts_of(places).sum() != len(places):
        raise StoreCorruptError("delta: a chunk's positions are in no tensor with such words")
    return places


def _decode_gaps(gaps: Words) -> Integers:
    """Return the positions that have these gaps before them."""
    if gaps[-1] == delta.ESCAPE:
        raise StoreCorruptError("delta: the last gap of a chunk has no end")
    has_escapes = gaps.max() == delta.ESCAPE
    is_last = gaps != delta.ESCAPE if has_escapes else np.True_
    steps = gaps.astype(np.int64)
    steps += is_last
    steps[0] -= 1
    # In a third of the time that numpy's sum takes.
    positions: Integers = torch.from_numpy(steps).cumsum_(0).numpy()
    return positions[is_last] if has_escapes else positions


def _unzigzag(values: Words) -> Words:
    return (values >> 1) ^ -(values & 1)
