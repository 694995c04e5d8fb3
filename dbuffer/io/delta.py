"""Encodes changed words as chunks of a delta file, and applies a delta to an earlier version."""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.errors import StoreCorruptError
from dbuffer.format import delta
from dbuffer.format.delta import GAP_BYTES, Chunk, DeltaHeader, DeltaRecord
from dbuffer.format.layout import ITEM_BYTES, Layout, digest
from dbuffer.format.lineage import VersionId
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier

Words: TypeAlias = npt.NDArray[Any]

WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

ReadChunk: TypeAlias = Callable[[int], bytes | memoryview]
"""Function that returns the stored bytes of a chunk, given its number. Several threads call it."""


def encode_chunk(places: Integers, differences: Words) -> tuple[Chunk, bytes]:
    """Make a chunk of changed words, given their places in the weights file."""
    width, num_changed = differences.itemsize, len(places)
    gaps = np.diff(places, prepend=places[:1] - 1) - 1
    zigzag = (differences << 1) ^ -(differences >> (8 * width - 1))
    streams: list[bytes] = []
    for words, num_streams in ((gaps, GAP_BYTES), (zigzag, width)):
        num_planes = -(-int(words.max()).bit_length() // 8)  # all higher planes are zero
        planes = np.ascontiguousarray(_planes_of(words)[:num_planes])
        streams += [delta.pack(plane) if plane.any() else b"" for plane in planes]
        streams += [b""] * (num_streams - num_planes)
    body = b"".join([np.array(list(map(len, streams)), "<u4").tobytes(), *streams])
    start, end = width * int(places[0]), width * (int(places[-1]) + 1)
    return Chunk(start, end - start, width, num_changed, len(body), digest(body)), body


def encode_delta(
    chunks: list[tuple[Chunk, bytes]],
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
        chunks=[chunk for chunk, _ in chunks],
    )
    return [delta.encode_header(record), *(body for _, body in chunks)]


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


def changed_elements(
    header: DeltaHeader, read_chunk: ReadChunk, copier: Copier
) -> list[dict[int, Integers]]:
    """Return the elements that each chunk of a delta changes.

    The elements of a chunk are ascending positions in each flat tensor, keyed by the tensor's
    index.
    """
    parts: list[dict[int, Integers]] = [{} for _ in header.chunks]

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            streams = _streams(header, number, read_chunk(number))
            places = _decode_places(header, chunk, streams) * chunk.word_bytes
            parts[number] = _elements_at(places, header.layout, chunk)

    copier.in_parallel(work, _cut_chunks(header, copier))
    return parts


def merge_elements(parts: Iterable[dict[int, Integers]], copier: Copier) -> dict[int, Integers]:
    """Merge elements of several chunks, or of several deltas; keep all positions ascending."""
    by_tensor: defaultdict[int, list[Integers]] = defaultdict(list)
    for part in parts:
        for index, positions in part.items():
            by_tensor[index].append(positions)
    to_merge = [index for index, lists in by_tensor.items() if len(lists) > 1]

    def work(first: int, end: int) -> None:
        for index in to_merge[first:end]:
            by_tensor[index] = [_ascending(np.concatenate(by_tensor[index]))]

    sizes = [sum(map(len, by_tensor[index])) for index in to_merge]
    copier.in_parallel(work, copier.cut_work(sizes))
    return {index: positions for index, [positions] in by_tensor.items()}


def _elements_at(places: Integers, layout: Layout, chunk: Chunk) -> dict[int, Integers]:
    """Return the elements at a chunk's places, which are ascending offsets in the weights file."""
    tensors = layout.byte_ranges.within(chunk.start, chunk.end)
    elements: dict[int, Integers] = {}
    first = 0
    ends = places.searchsorted(tensors.ends)
    for index, start, end in zip(tensors.tensors.tolist(), tensors.starts, ends, strict=True):
        if first < end:
            positions = (places[first:end] - start) // ITEM_BYTES[layout.specs[index].dtype]
            elements[index], first = _ascending(positions), end
    return elements


def _ascending(positions: Integers) -> Integers:
    """Sort positions, and drop repeated ones."""
    if (positions[1:] > positions[:-1]).all():
        return positions
    positions = np.sort(positions)
    # Don't call np.unique, which builds a hash table and takes ten times as long.
    distinct: Integers = positions[np.append(True, positions[1:] != positions[:-1])]
    return distinct


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
        raise StoreCorruptError(
            "delta: a chunk changes words between tensors, or in tensors with smaller elements"
        )
    return places


def _join_planes(streams: list[memoryview], chunk: Chunk, dtype: np.dtype[Any]) -> Words:
    """Combine streams of bytes into numbers.

    Stream ``i`` has byte ``i`` of every number, lowest byte first.
    """
    words = np.zeros(chunk.num_changed, dtype)
    for plane, stream in zip(_planes_of(words), streams, strict=False):
        if len(stream):
            plane[:] = np.frombuffer(delta.unpack(stream, chunk.num_changed), np.uint8)
    return words


def _planes_of(words: Words) -> npt.NDArray[np.uint8]:
    """View the lowest byte of all words as one row, the next byte as the next row, and so on."""
    return words.view(np.uint8).reshape(len(words), words.itemsize).T
