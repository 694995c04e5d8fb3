"""Makes a delta file from chunks of changes, and applies a delta file to an earlier version."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from dbuffer.errors import StoreCorruptError
from dbuffer.format import delta
from dbuffer.format.delta import GAP_BYTES, Chunk, DeltaHeader, DeltaRecord
from dbuffer.format.layout import ITEM_BYTES, Layout, digest
from dbuffer.format.lineage import VersionId
from dbuffer.format.ranges import Integers
from dbuffer.io.changes import WORDS, Changes, Words, planes_of
from dbuffer.io.copier import Copier

ReadChunk: TypeAlias = Callable[[int], bytes | memoryview]
"""Function that returns the stored bytes of a chunk, given its number. Several threads call it."""


def encode_delta(
    changes: Changes,
    checksums: tuple[Sequence[int], Sequence[int]] | None,
    *,
    base: VersionId,
    version: VersionId,
    layout_xxh3: str,
) -> list[bytes]:
    """Return the pieces of the delta file from ``base`` to ``version``, with the header first.

    ``checksums`` are the checksums of all tensors in ``base`` and in ``version``, or None if the
    versions have no checksums.
    """
    changed = None
    if checksums is not None:
        pairs = enumerate(zip(*checksums, strict=True))
        changed = [(index, f"{new:016x}") for index, (old, new) in pairs if new != old]
    record = DeltaRecord(
        base=base,
        id=version,
        layout_xxh3=layout_xxh3,
        checksums=changed,
        chunks=[chunk for chunk, _ in changes.chunks],
    )
    return [delta.encode_header(record), *(body for _, body in changes.chunks)]


def apply_delta(
    header: DeltaHeader, read_chunk: ReadChunk, memory: torch.Tensor, copier: Copier
) -> None:
    """Turn the earlier version of a delta, whose bytes are in memory, into the later version.

    A delta must not be applied twice, because its chunks hold differences. Each chunk is checked
    before its first word is written. The caller verifies the checksums of the result.

    Raises:
        StoreCorruptError: a chunk was damaged, or contradicts the header. Other chunks may have
            been applied.
    """

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            streams = _streams(header, number, read_chunk(number))
            places = _decode_places(header, chunk, streams)
            zigzag = _join_planes(streams[GAP_BYTES:], chunk, WORDS[chunk.word_bytes])
            differences = (zigzag >> 1) ^ -(zigzag & 1)
            # Add with torch, which reads and writes each place once, but needs signed numbers.
            signed = torch.from_numpy(differences.view(f"<i{chunk.word_bytes}"))
            memory.view(signed.dtype).scatter_add_(0, torch.from_numpy(places), signed)

    copier.in_parallel(work, _cut_chunks(header, copier))


def changed_places(header: DeltaHeader, read_chunk: ReadChunk, copier: Copier) -> Integers:
    """Return the offset in the weights file of each word that a delta changes, in any order."""
    parts = [np.empty(0, np.int64)] * (1 + len(header.chunks))

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            streams = _streams(header, number, read_chunk(number))
            parts[number] = _decode_places(header, chunk, streams) * chunk.word_bytes

    copier.in_parallel(work, _cut_chunks(header, copier))
    return np.concatenate(parts)


def elements_at(layout: Layout, places: Integers) -> dict[int, Integers]:
    """Return the ascending positions of the elements at these places, keyed by tensor index."""
    if not (places[1:] > places[:-1]).all():
        places = np.sort(places)
    tensors = layout.byte_ranges
    ends = tensors.counts(places).cumsum()
    elements = {}
    for row in (ends > np.append(0, ends[:-1])).nonzero()[0].tolist():
        index, first = int(tensors.tensors[row]), int(ends[row - 1]) if row else 0
        inside = places[first : ends[row]] - tensors.starts[row]
        positions = inside // ITEM_BYTES[layout.specs[index].dtype]
        # Don't call np.unique, which builds a hash table and takes ten times as long.
        is_first = np.append(True, positions[1:] != positions[:-1])
        elements[index] = positions if is_first.all() else positions[is_first]
    return elements


def _cut_chunks(header: DeltaHeader, copier: Copier) -> list[tuple[int, int]]:
    return copier.cut_work([chunk.num_changed for chunk in header.chunks])


def _streams(header: DeltaHeader, number: int, body: bytes | memoryview) -> list[memoryview]:
    chunk = header.chunks[number]
    if len(body) != chunk.stored_bytes or digest(body) != chunk.xxh3:
        raise StoreCorruptError(
            f"chunk {number} of delta {header.record.id} was damaged after it was written; publish "
            "again"
        )
    lengths = struct.unpack_from(f"<{chunk.num_streams}I", body)
    ends = list(itertools.accumulate(lengths, initial=4 * chunk.num_streams))
    if ends[-1] != len(body):
        raise StoreCorruptError(f"delta: the streams of chunk {number} do not fill the chunk")
    view = memoryview(body)
    return [view[start:end] for start, end in itertools.pairwise(ends)]


def _decode_places(header: DeltaHeader, chunk: Chunk, streams: list[memoryview]) -> Integers:
    """Return a chunk's places in ascending order. Refuse a place that is no word of a tensor."""
    width = chunk.word_bytes
    steps = _join_planes(streams[:GAP_BYTES], chunk, np.dtype(np.int64))
    first = steps[0]
    steps += 1
    steps[0] = chunk.start // width
    # torch's cumulative sum takes a third of the time of numpy's.
    places: Integers = torch.from_numpy(steps).cumsum_(0).numpy()
    if first != 0 or (places[-1] + 1) * width != chunk.end:
        raise StoreCorruptError("delta: a chunk's positions contradict its header")
    tensors = header.layout.byte_ranges.within(chunk.start, chunk.end).in_words(width)
    counts = tensors.counts(places)
    if counts.sum() != len(places) or tensors.word_bytes[counts > 0].min() < width:
        raise StoreCorruptError("delta: a chunk has positions outside all tensors of its word size")
    return places


def _join_planes(streams: list[memoryview], chunk: Chunk, dtype: np.dtype[Any]) -> Words:
    """Join streams of bytes to numbers.

    Stream ``i`` has byte ``i`` of every number, lowest byte first.
    """
    words = np.zeros(chunk.num_changed, dtype)
    for plane, stream in zip(planes_of(words), streams, strict=False):
        if len(stream):
            plane[:] = np.frombuffer(delta.unpack(stream, chunk.num_changed), np.uint8)
    return words
