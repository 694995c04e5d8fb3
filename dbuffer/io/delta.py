"""A delta: the words that differ between two versions of one layout, encoded and applied.

`dbuffer.format.delta` describes a delta file; `dbuffer.io.changes` finds what differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dbuffer.errors import InvalidWeightsError, StoreCorruptError
from dbuffer.format import delta
from dbuffer.format.delta import Chunk, DeltaHeader, DeltaRecord, Integers
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.io.changes import (
    WORDS,
    Diff,
    Positions,
    TensorDiff,
    Words,
    check_change,
    cut_changes,
    cut_work,
    file_words,
    join_words,
    num_words,
    places_of,
    write_words,
)
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors

_MASK_SHARE = 0.3
"""Above it a bit for each word is shorter than gaps (bf16, normal weights and updates)."""

_SAMPLE_WORDS = 1 << 14

ReadChunk: TypeAlias = Callable[[int], bytes | memoryview]
"""Called with a chunk's number, in any order and from several threads, for its stored bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedDelta:
    """Delta file: its prefix and header, then its chunks."""

    header: bytes
    chunks: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(map(len, self.chunks))


def encode_delta(
    diff: Diff,
    copier: Copier,
    *,
    checksums: Sequence[int] | None,
    base: VersionId,
    version: VersionId,
    layout_xxh3: str,
) -> EncodedDelta:
    """Encode a delta file.

    Args:
        diff: differences, at most one for each tensor. Where the words that they replace were not
            kept, the delta holds the new words, and is larger.
        copier: its threads do it.
        checksums: checksums of all tensors of the version after, if it has any.
        base: the version before.
        version: the version after.
        layout_xxh3: digest of the layout of both.

    Raises:
        InvalidWeightsError: a change does not fit the layout.
    """
    for change in diff.changes:
        check_change(diff.layout, change)
    changes = sorted(diff.changes, key=lambda change: change.tensor)
    tensors = [change.tensor for change in changes]
    _require_ascending(len(set(tensors)) == len(tensors))
    groups = cut_changes(diff.layout, changes)
    encoded: dict[int, tuple[Chunk, bytes]] = {}

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            encoded[number] = _encode_chunk(diff.layout, groups[number])

    copier.in_parallel(work, cut_work(list(map(num_words, groups)), copier))
    chunks = [encoded[number][0] for number in range(len(groups))]
    for before, after in itertools.pairwise(chunks):
        if before.word_bytes == after.word_bytes:
            _require_ascending(before.first_word + before.num_words <= after.first_word)
    rows = delta.tensor_table(len(changes))
    rows["tensor"] = tensors
    if checksums is not None:
        rows["xxh3"] = [checksums[change.tensor] for change in changes]
    record = DeltaRecord(
        base=base,
        id=version,
        layout_xxh3=layout_xxh3,
        is_hashed=checksums is not None,
        num_tensors=len(rows),
        num_chunks=len(chunks),
    )
    header = delta.encode_header(record, rows, chunks)
    return EncodedDelta(header, [encoded[number][1] for number in range(len(groups))])


def _require_ascending(is_ascending: object) -> None:
    if not is_ascending:
        raise InvalidWeightsError(
            "two changes are of one tensor, or the positions of one are not ascending"
        )


def _encode_chunk(layout: Layout, group: Sequence[TensorDiff]) -> tuple[Chunk, bytes]:
    first, places = places_of(layout, group)
    words = join_words([change.values for change in group])
    replaced = [change.replaced for change in group if change.replaced is not None]
    value_code = delta.NEW_WORDS
    if len(replaced) == len(group):
        differences = _zigzag(words - join_words(replaced))
        if isinstance(places, np.ndarray) or _is_shorter(differences, words):
            value_code, words = delta.DIFFERENCES, differences
    if isinstance(places, np.ndarray):
        size = int(places[-1]) + 1
        position_code, streams = _encode_positions(places, size)
    else:
        size = places[-1].stop
        position_code, streams = delta.WHOLE, []
    streams += delta.split_planes(words)
    stored = [delta.pack(stream) for stream in streams]
    lengths = np.array([len(stream) for stream in stored], "<u4").tobytes()
    body = b"".join([lengths, *stored])
    chunk = Chunk(
        word_bytes=words.itemsize,
        first_word=first,
        num_words=size,
        num_changed=len(words),
        raw_bytes=sum(len(stream) for stream in streams),
        stored_bytes=len(body),
        xxh3=xxhash.xxh3_64_intdigest(body),
        positions=position_code,
        values=value_code,
    )
    return chunk, body


def _zigzag(differences: Words) -> Words:
    top = 8 * differences.dtype.itemsize - 1
    return (differences << 1) ^ -(differences >> top)


def _unzigzag(values: Words) -> Words:
    return (values >> 1) ^ -(values & 1)


def _is_shorter(differences: Words, values: Words) -> bool:
    """Whether words are stored in fewer bytes as differences, judged by a sample of them."""
    step = max(1, len(values) // _SAMPLE_WORDS)

    def size(words: Words) -> int:
        return sum(len(delta.pack(plane)) for plane in delta.split_planes(words[::step]))

    return size(differences) <= size(values)


def _encode_positions(positions: Positions, size: int) -> tuple[int, list[npt.NDArray[np.uint8]]]:
    """Encode positions among ``size`` words, of which the first is 0; return their code, too."""
    gaps = np.zeros(len(positions), WORDS[positions.itemsize])  # unsigned: none is negative
    gaps[1:] = positions[1:] - positions[:-1] - 1
    longest = gaps.max()
    _require_ascending(longest < size <= delta.MAX_CHUNK_WORDS)
    if len(positions) > _MASK_SHARE * size:
        mask = np.zeros(size, np.bool_)
        mask[positions] = True
        return delta.MASK, [np.packbits(mask, bitorder="little")]
    if longest >= delta.ESCAPE:
        (long,) = (gaps >= delta.ESCAPE).nonzero()
        times, gaps[long] = np.divmod(gaps.take(long), delta.ESCAPE)
        gaps = np.insert(gaps, np.repeat(long, times.astype(np.int64)), delta.ESCAPE)
    return delta.GAPS, delta.split_planes(gaps.astype(np.uint16))


def _decode_gaps(gaps: Words) -> Integers:
    """Return the positions of which `_encode_positions` has made these gaps."""
    is_last = gaps != delta.ESCAPE
    if not is_last[-1]:
        raise StoreCorruptError("delta: the last gap of a chunk has no end")
    steps = gaps.astype(np.int64)
    steps += is_last
    steps[0] -= 1
    # In a third of the time that numpy's sum takes.
    positions: Integers = torch.from_numpy(steps).cumsum(0).numpy()
    return positions if is_last.all() else positions[is_last]


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
                    if not isinstance(places, np.ndarray):
                        places = np.concatenate([np.arange(p.start, p.stop) for p in places])
                    is_inside, places = excerpt.select(places, chunk.word_bytes)
                    values = values[is_inside]
                words = file_words(contents, chunk.word_bytes)
                is_added = chunk.values == delta.DIFFERENCES
                write_words(words, places, values, is_added=is_added)

    copier.in_parallel(work, cut_work([chunk.raw_bytes for chunk in header.chunks], copier))


def changed_positions(
    header: DeltaHeader, read_chunk: ReadChunk, copier: Copier
) -> list[tuple[int, Integers | None]]:
    """Read index and changed positions of each changed tensor; None: all of them.

    Raises:
        StoreCorruptError: a chunk is not as it was written, or does not hold what the header says.
    """
    of_chunk: dict[int, list[tuple[int, Integers]]] = {}
    whole: set[int] = set()

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            indices, starts, ends = header.tensors_in(chunk)
            if chunk.positions == delta.WHOLE:
                whole.update(indices.tolist())
                continue
            streams = _streams(header, number, read_chunk(number))
            places = _decode_places(header, chunk, streams)
            cuts = places.searchsorted(ends)
            positions = places - np.repeat(starts, np.diff(cuts, prepend=0))
            parts = zip(indices.tolist(), itertools.pairwise([0, *cuts.tolist()]), strict=True)
            of_chunk[number] = [(index, positions[cut:end]) for index, (cut, end) in parts]

    copier.in_parallel(work, cut_work([chunk.raw_bytes for chunk in header.chunks], copier))
    by_tensor: dict[int, list[Integers]] = {}
    for number in sorted(of_chunk):
        for index, some in of_chunk[number]:
            by_tensor.setdefault(index, []).append(some)
    return [
        (index, None if index in whole else join_words(by_tensor[index]))
        for index in header.tensors["tensor"].tolist()
    ]


def _check_layout(header: DeltaHeader, contents: FileTensors) -> None:
    ours, theirs = contents.layout, header.layout
    if ours is not theirs and (ours.specs, ours.offsets) != (theirs.specs, theirs.offsets):
        raise StoreCorruptError(
            f"delta {header.record.id} is for other tensors than those it is to be applied to"
        )


def _streams(header: DeltaHeader, number: int, body: bytes | memoryview) -> list[memoryview]:
    """Cut a chunk into its streams, if it is as it was written."""
    chunk = header.chunks[number]
    if len(body) != chunk.stored_bytes or xxhash.xxh3_64_intdigest(body) != chunk.xxh3:
        raise StoreCorruptError(
            f"chunk {number} of delta {header.record.id} is not as it was written; publish again"
        )
    num_streams = delta.NUM_STREAMS[chunk.positions] + chunk.word_bytes
    lengths = np.frombuffer(body, "<u4", num_streams).tolist()
    ends = np.cumsum([4 * num_streams, *lengths]).tolist()
    if ends[-1] != len(body):
        raise StoreCorruptError(f"delta: the streams of chunk {number} do not make it up")
    view = memoryview(body)
    return [view[start:end] for start, end in itertools.pairwise(ends)]


def _decode_chunk(
    header: DeltaHeader, number: int, body: bytes | memoryview
) -> tuple[list[slice] | Integers, Words]:
    """Return the places of a chunk's words in the file, and the words, or what is added to them."""
    chunk, streams = header.chunks[number], _streams(header, number, body)
    places: list[slice] | Integers
    if chunk.positions == delta.WHOLE:
        places = _whole_ranges(header, chunk)
    else:
        places = _decode_places(header, chunk, streams)
    planes = streams[delta.NUM_STREAMS[chunk.positions] :]
    unpacked = [delta.unpack(plane, chunk.num_changed) for plane in planes]
    words: Words = delta.join_planes(unpacked, WORDS[chunk.word_bytes])
    return places, _unzigzag(words) if chunk.values == delta.DIFFERENCES else words


def _whole_ranges(header: DeltaHeader, chunk: Chunk) -> list[slice]:
    """Return the ranges of a chunk that replaces all words of changed tensors in its range."""
    _, starts, ends = header.tensors_in(chunk)
    first, end = chunk.first_word, chunk.first_word + chunk.num_words
    starts, ends = np.maximum(starts, first), np.minimum(ends, end)
    if (ends - starts).sum() != chunk.num_changed or (starts[0], ends[-1]) != (first, end):
        raise StoreCorruptError("delta: a whole chunk has other words than the tensors it names")
    return list(map(slice, starts.tolist(), ends.tolist()))


def _decode_places(header: DeltaHeader, chunk: Chunk, streams: list[memoryview]) -> Integers:
    """Return the ascending places of a chunk's changed words, which are in changed tensors."""
    raw_bytes = chunk.raw_bytes - chunk.num_changed * chunk.word_bytes
    num_streams = delta.NUM_STREAMS[chunk.positions]
    data = [delta.unpack(each, raw_bytes // num_streams) for each in streams[:num_streams]]
    if chunk.positions == delta.MASK:
        # Bits behind the last word are positions out of range, below.
        bits = np.unpackbits(np.frombuffer(data[0], np.uint8), bitorder="little")
        (places,) = bits.nonzero()
    else:
        places = _decode_gaps(delta.join_planes(data, WORDS[2]))
    if len(places) != chunk.num_changed or places[0] != 0 or places[-1] != chunk.num_words - 1:
        raise StoreCorruptError("delta: a chunk's positions are not those that its header counts")
    places += chunk.first_word
    _, starts, ends = header.tensors_in(chunk)
    counts = places.searchsorted(ends) - places.searchsorted(starts)
    if counts.sum() != len(places) or counts.min() < 1:
        raise StoreCorruptError("delta: a chunk's positions are not in the tensors it names")
    return places
