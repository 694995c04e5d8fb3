"""A delta: what differs between two versions of one layout, encoded and applied.

`dbuffer.format.delta` says what a delta file holds; `dbuffer.io.changes` finds what differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dbuffer.errors import StoreCorruptError
from dbuffer.format import delta
from dbuffer.format.delta import Chunk, DeltaHeader, DeltaRecord, Integers, Shapes
from dbuffer.format.layout import Layout
from dbuffer.io.changes import (
    WORDS,
    Diff,
    TensorDiff,
    Words,
    check_changes,
    cut_work,
)
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors

_MASK_SHARE = 0.3
"""Above it a bit for each word is shorter than gaps (bf16, normal weights and updates)."""

_CHUNK_CHANGES = 1 << 16
"""Changed words in a chunk: each of its streams is then one block of zstd, or less."""

_WHOLE_BYTES = 4 << 20
"""Size of the whole tensors in one chunk."""

_SAMPLE_WORDS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class EncodedDelta:
    """A delta file: its prefix and header, then its chunks."""

    header: bytes
    chunks: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(map(len, self.chunks))


def encode_delta(
    found: Diff,
    copier: Copier,
    *,
    base: str,
    identity: str,
    version: int,
    layout_xxh3: str,
) -> EncodedDelta:
    """Encode a delta file.

    Args:
        found: differences, at most one for each tensor. If their old words were not kept, the delta
            holds the new words instead of differences, and is larger.
        copier: its threads do it.
        base: identity of the version before.
        identity: that of the version after.
        version: its number.
        layout_xxh3: digest of the layout of both.

    Raises:
        InvalidWeightsError: a change does not fit the layout.
    """
    layout = found.layout
    check_changes(layout, found.changes)
    changes = _sorted(layout, found.changes)
    rows = delta.tensor_table(len(changes))
    rows["tensor"] = [change.tensor for change in changes]
    rows["num_changed"] = [len(change.values) for change in changes]
    if found.checksums is not None:
        rows["xxh3"] = [found.checksums[change.tensor] for change in changes]
    encoder = _Encoder(layout, changes, Shapes.of(layout, rows["tensor"]))
    sizes = [plan.num_changed for plan in encoder.plans]
    copier.in_parallel(encoder.encode, cut_work(sizes, copier))
    record = DeltaRecord(
        base=base,
        identity=identity,
        version=version,
        layout_xxh3=layout_xxh3,
        is_hashed=found.checksums is not None,
        num_tensors=len(rows),
        num_chunks=len(encoder.plans),
    )
    chunks = [encoder.done[number] for number in range(len(encoder.plans))]
    header = delta.encode_header(record, rows, [chunk for chunk, _ in chunks])
    return EncodedDelta(header, [body for _, body in chunks])


def _sorted(layout: Layout, changes: Sequence[TensorDiff]) -> list[TensorDiff]:
    """As the rows are to be: see `dbuffer.format.delta`."""
    tensors = [change.tensor for change in changes]
    widths = [layout.widths[tensor] for tensor in tensors]
    is_whole = [change.positions is None for change in changes]
    return [changes[index] for index in np.lexsort((tensors, widths, is_whole)).tolist()]


class _ChunkPlan(NamedTuple):
    """Content of one chunk to be encoded."""

    first_row: int
    num_rows: int
    first_word: int
    num_words: int
    start: int
    """Index of the first value, for a range of one tensor."""
    num_changed: int


class _Encoder:
    """Makes the chunks, each by itself."""

    def __init__(
        self,
        layout: Layout,
        changes: Sequence[TensorDiff],
        shapes: Shapes,
    ) -> None:
        self._layout, self._changes, self._shapes = layout, changes, shapes
        self.plans = list(self._plan())
        self.done: dict[int, tuple[Chunk, bytes]] = {}

    def _plan(self) -> Iterator[_ChunkPlan]:
        """Short changes together, long ones in pieces."""
        first = words = changed = 0
        kind: tuple[bool, int] | None = None
        columns = (self._shapes.word_bytes.tolist(), self._shapes.num_words.tolist())
        for row, (change, width, size) in enumerate(zip(self._changes, *columns, strict=True)):
            is_whole, count = change.positions is None, len(change.values)
            most = _WHOLE_BYTES // width if is_whole else _CHUNK_CHANGES
            is_long = count > most or size > delta.MAX_CHUNK_WORDS
            is_full = changed + count > most or words + size > delta.MAX_CHUNK_WORDS
            if row > first and (is_long or is_full or kind != (is_whole, width)):
                yield _ChunkPlan(first, row - first, 0, words, 0, changed)
                first, words, changed = row, 0, 0
            kind = (is_whole, width)
            if is_long:
                yield from self._cut(row, change, most)
                first = row + 1
            else:
                words, changed = words + size, changed + count
        if changed:
            yield _ChunkPlan(first, len(self._changes) - first, 0, words, 0, changed)

    @staticmethod
    def _cut(row: int, change: TensorDiff, most: int) -> Iterator[_ChunkPlan]:
        """Ranges of one tensor, from a changed word to a changed word."""
        start, total = 0, len(change.values)
        while start < total:
            end = min(start + most, total)
            first, last = start, end - 1
            if (positions := change.positions) is not None:
                first = int(positions[start])
                limit = first + delta.MAX_CHUNK_WORDS
                end = start + int((positions[start:end] < limit).sum())
                last = int(positions[end - 1])
            yield _ChunkPlan(row, 1, first, last + 1 - first, start, end - start)
            start = end

    def encode(self, first: int, end: int) -> None:
        """Make some of the chunks."""
        for number in range(first, end):
            self.done[number] = self._encode(self.plans[number])

    def _encode(self, plan: _ChunkPlan) -> tuple[Chunk, bytes]:
        span = _ChunkSpan(self._shapes, plan)
        values, positions = self._joined(plan, span)
        what = delta.THEMSELVES
        old = self._replaced(plan)
        if old is not None:
            differences = _zigzag(values - old)
            if positions is not None or _is_shorter(differences, values):
                what, values = delta.DIFFERENCES, differences
        where, streams = _encode_positions(positions, plan.num_words)
        streams += delta.split_planes(values)
        stored = [delta.pack(stream) for stream in streams]
        lengths = np.array([len(stream) for stream in stored], "<u4").tobytes()
        body = b"".join([lengths, *stored])
        chunk = Chunk(
            first_row=plan.first_row,
            num_rows=plan.num_rows,
            first_word=plan.first_word,
            num_words=plan.num_words,
            num_changed=plan.num_changed,
            raw_bytes=sum(len(stream) for stream in streams),
            stored_bytes=len(body),
            xxh3=xxhash.xxh3_64_intdigest(body),
            where=where,
            what=what,
        )
        return chunk, body

    def _joined(self, plan: _ChunkPlan, span: _ChunkSpan) -> tuple[Words, Integers | None]:
        """Return values and positions of all rows, one row after another."""
        changes = self._changes[plan.first_row : plan.first_row + plan.num_rows]
        piece = slice(plan.start, plan.start + plan.num_changed)
        if plan.num_rows == 1:
            values, positions = changes[0].values[piece], changes[0].positions
            if positions is None:
                return values, None
            return values, positions[piece].astype(np.int64) - plan.first_word
        values = np.concatenate([change.values for change in changes])
        parts = [change.positions for change in changes if change.positions is not None]
        if not parts:
            return values, None
        joined = np.concatenate(parts).astype(np.int64)
        joined += np.repeat(span.starts, [len(change.values) for change in changes])
        return values, joined

    def _replaced(self, plan: _ChunkPlan) -> Words | None:
        """The old words, where they were kept."""
        changes = self._changes[plan.first_row : plan.first_row + plan.num_rows]
        if plan.num_rows == 1:
            kept = changes[0].replaced
            return None if kept is None else kept[plan.start : plan.start + plan.num_changed]
        parts = [change.replaced for change in changes if change.replaced is not None]
        return np.concatenate(parts) if len(parts) == len(changes) else None


class _ChunkSpan:
    """The words of a chunk as if they lay side by side, and where in memory they do."""

    def __init__(self, shapes: Shapes, chunk: Chunk | _ChunkPlan) -> None:
        rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        self.word_bytes = int(shapes.word_bytes[chunk.first_row])
        self.num_words = shapes.num_words[rows]
        self.starts = np.cumsum(self.num_words) - self.num_words
        self.places = shapes.offsets[rows] // self.word_bytes + chunk.first_word
        """Word of the file at which each tensor, or the range, begins."""

    def in_memory(self, positions: Integers, counts: Integers) -> Integers:
        """Map positions to words in memory; ``counts`` of them are in each tensor."""
        is_one = len(counts) == 1
        by = self.places[0] if is_one else np.repeat(self.places - self.starts, counts)
        places: Integers = positions + by
        return places

    def pieces(self, num_words: int) -> list[tuple[int, int, int]]:
        """List for each tensor its first word here, that in memory, and its number of words."""
        words = self.num_words.tolist() if len(self.starts) > 1 else [num_words]
        return list(zip(self.starts.tolist(), self.places.tolist(), words, strict=True))


class _WordMemory:
    """The bytes of all tensors as words."""

    def __init__(self, contents: FileTensors) -> None:
        raw = contents.raw
        self._words: dict[int, Words] = {
            width: np.frombuffer(raw, dtype, len(raw) // width) for width, dtype in WORDS.items()
        }

    def write(
        self,
        span: _ChunkSpan,
        chunk: Chunk,
        positions: Integers | None,
        counts: Integers,
        values: Words,
    ) -> None:
        """Put the words of a chunk into their places; ``counts`` of them in each tensor."""
        words, is_added = self._words[span.word_bytes], chunk.what == delta.DIFFERENCES
        if positions is not None:
            places = span.in_memory(positions, counts)
            # Not np.add.at, which keeps the interpreter's lock: no place is there twice.
            words[places] = words.take(places) + values if is_added else values
            return
        for start, place, size in span.pieces(len(values)):
            target, own = words[place : place + size], values[start : start + size]
            if is_added:
                target += own
            else:
                target[:] = own


class Excerpt(NamedTuple):
    """Parts of a file's data that some memory holds, in the file's order."""

    starts: Integers
    """Bytes from the first tensor's beginning, in the file."""
    ends: Integers
    places: Integers
    """Byte in the memory at which each part begins."""

    def overlaps(self, span: _ChunkSpan, chunk: Chunk) -> bool:
        """Whether words of a chunk may be in it."""
        sizes = span.num_words if chunk.num_rows > 1 else np.array([chunk.num_words])
        starts = span.places * span.word_bytes
        ends = starts + sizes * span.word_bytes
        # Of the parts that end behind a tensor's first word, the first one is the one that counts.
        which = np.searchsorted(self.ends, starts, side="right")
        is_there = which < len(self.ends)
        return bool((self.starts[which[is_there]] < ends[is_there]).any())


class _ExcerptMemory(_WordMemory):
    """Memory that holds only an excerpt of the file: all else is skipped."""

    def __init__(self, contents: FileTensors, excerpt: Excerpt) -> None:
        super().__init__(contents)
        self._excerpt = excerpt

    def write(
        self,
        span: _ChunkSpan,
        chunk: Chunk,
        positions: Integers | None,
        counts: Integers,
        values: Words,
    ) -> None:
        if positions is None:
            positions = np.arange(len(values))
        starts, ends, places = self._excerpt
        at = span.in_memory(positions, counts) * span.word_bytes
        which = np.searchsorted(ends, at, side="right")
        which[which == len(ends)] = 0  # behind all, and so behind the first
        is_inside = (starts[which] <= at) & (at < ends[which])
        which, values = which[is_inside], values[is_inside]
        own = (at[is_inside] - starts[which] + places[which]) // span.word_bytes
        words = self._words[span.word_bytes]
        words[own] = words.take(own) + values if chunk.what == delta.DIFFERENCES else values


def _zigzag(differences: Words) -> Words:
    top = 8 * differences.dtype.itemsize - 1
    return (differences << 1) ^ -(differences >> top)


def _unzigzag(values: Words) -> Words:
    return (values >> 1) ^ -(values & 1)


def _is_shorter(differences: Words, values: Words) -> bool:
    """Whether words are stored in fewer bytes as differences: by what a sample of them takes."""
    step = max(1, len(values) // _SAMPLE_WORDS)

    def size(words: Words) -> int:
        return sum(len(delta.pack(plane)) for plane in delta.split_planes(words[::step]))

    return size(differences) <= size(values)


def _encode_positions(
    positions: Integers | None, num_words: int
) -> tuple[int, list[npt.NDArray[np.uint8]]]:
    """Choose an encoding of the positions; return it with its streams."""
    if positions is None:
        return delta.WHOLE, []
    if len(positions) > _MASK_SHARE * num_words:
        return delta.MASK, [_mask_of(positions, num_words)]
    return delta.GAPS, delta.split_planes(_gaps(positions))


def _gaps(positions: Integers) -> npt.NDArray[np.uint16]:
    gaps = np.diff(positions, prepend=-1) - 1
    if gaps.max() < delta.ESCAPE:
        return gaps.astype(np.uint16)
    where = np.flatnonzero(gaps >= delta.ESCAPE)
    times, rest = np.divmod(gaps.take(where), delta.ESCAPE)
    gaps[where] = rest
    return np.insert(gaps.astype(np.uint16), np.repeat(where, times), delta.ESCAPE)


def _positions_of(gaps: Words) -> Integers:
    """The other way round."""
    steps = gaps.astype(np.int64)
    if gaps.max() == delta.ESCAPE:
        ends = gaps != delta.ESCAPE
        if not ends[-1]:
            raise StoreCorruptError("delta: the last gap of a chunk has no end")
        found: Integers = (np.cumsum(steps + ends) - 1)[ends]
        return found
    steps += 1
    np.cumsum(steps, out=steps)
    steps -= 1
    return steps


def _mask_of(positions: Integers, num_words: int) -> npt.NDArray[np.uint8]:
    mask = np.zeros(num_words, np.bool_)
    mask[positions] = True
    return np.packbits(mask, bitorder="little")


def apply_delta(
    header: DeltaHeader,
    read_chunk: Callable[[int], bytes | memoryview],
    contents: FileTensors,
    copier: Copier,
    excerpt: Excerpt | None = None,
) -> None:
    """Make of the version before, which the contents hold, the one after.

    Not to be done twice: chunks may hold differences. No byte of a chunk is written before all of
    it was checked. That the result is right is for who has its checksums to say.

    Args:
        header: the delta's.
        read_chunk: called with a chunk's number, in any order and from several threads: its bytes.
        contents: memory of the caller's own, which nobody else writes.
        copier: its threads do it.
        excerpt: what of the version the contents hold. Chunks that change nothing in it are not
            read. None: all of it, as the layout says.

    Raises:
        StoreCorruptError: a chunk is not as it was written or not what the header says, or the
            contents have another layout. Other chunks may have been applied.
    """
    if excerpt is None:
        _check_layout(header, contents)
        memory = _WordMemory(contents)
    else:
        memory = _ExcerptMemory(contents, excerpt)

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            span = _ChunkSpan(header.shapes, chunk)
            if excerpt is not None and not excerpt.overlaps(span, chunk):
                continue
            streams = _streams(header, number, read_chunk(number))
            counts = _counts_of(header, chunk)
            positions = _positions(chunk, span, counts, streams)
            values = _values(chunk, span, streams)
            memory.write(span, chunk, positions, counts, values)

    sizes = [chunk.raw_bytes for chunk in header.chunks]
    copier.in_parallel(work, cut_work(sizes, copier))


def changed_positions(
    header: DeltaHeader,
    read_chunk: Callable[[int], bytes | memoryview],
    copier: Copier,
) -> list[tuple[int, Integers | None]]:
    """Read index and changed positions of each changed tensor; None: all of them.

    Raises:
        StoreCorruptError: a chunk is not as it was written, or not what the header says.
    """
    parts: dict[int, list[Integers]] = {}

    def work(first: int, end: int) -> None:
        for number in range(first, end):
            chunk = header.chunks[number]
            if chunk.where != delta.WHOLE:
                parts[number] = _positions_by_row(header, number, read_chunk(number))

    copier.in_parallel(work, cut_work([chunk.raw_bytes for chunk in header.chunks], copier))
    of_row: dict[int, list[Integers]] = {}
    for number in sorted(parts):
        for row, positions in enumerate(parts[number], header.chunks[number].first_row):
            of_row.setdefault(row, []).append(positions)
    return [
        (tensor, np.concatenate(of_row[row]) if row in of_row else None)
        for row, tensor in enumerate(header.tensors["tensor"].tolist())
    ]


def _positions_by_row(header: DeltaHeader, number: int, body: bytes | memoryview) -> list[Integers]:
    chunk = header.chunks[number]
    span = _ChunkSpan(header.shapes, chunk)
    counts = _counts_of(header, chunk)
    positions = _positions(chunk, span, counts, _streams(header, number, body))
    assert positions is not None  # noqa: S101 - a whole tensor's is not asked for
    positions = positions + np.repeat(chunk.first_word - span.starts, counts)
    return np.split(positions, np.cumsum(counts)[:-1])


def _check_layout(header: DeltaHeader, contents: FileTensors) -> None:
    ours, theirs = contents.layout, header.layout
    if ours is not theirs and (ours.specs, ours.offsets) != (theirs.specs, theirs.offsets):
        raise StoreCorruptError(
            f"delta {header.record.identity} is for other tensors than those it is to be applied to"
        )


def _counts_of(header: DeltaHeader, chunk: Chunk) -> Integers:
    if chunk.num_rows == 1:
        return np.array([chunk.num_changed], np.int64)
    rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
    counts: Integers = header.tensors["num_changed"][rows].astype(np.int64)
    return counts


class _Streams(NamedTuple):
    """A chunk's, as stored."""

    where: list[memoryview]
    planes: list[memoryview]


def _streams(header: DeltaHeader, number: int, body: bytes | memoryview) -> _Streams:
    """Cut a chunk into its streams, once it is what was written."""
    chunk = header.chunks[number]
    if len(body) != chunk.stored_bytes or xxhash.xxh3_64_intdigest(body) != chunk.xxh3:
        raise StoreCorruptError(
            f"chunk {number} of delta {header.record.identity} is not as it was written; "
            "publish again"
        )
    num_where = delta.NUM_STREAMS[chunk.where]
    num_streams = num_where + int(header.shapes.word_bytes[chunk.first_row])
    lengths = np.frombuffer(body, "<u4", num_streams).tolist()
    ends = np.cumsum([4 * num_streams, *lengths]).tolist()
    if ends[-1] != len(body):
        raise StoreCorruptError(f"delta: the streams of chunk {number} do not make it up")
    view = memoryview(body)
    streams = [view[start:end] for start, end in itertools.pairwise(ends)]
    return _Streams(streams[:num_where], streams[num_where:])


def _positions(
    chunk: Chunk, span: _ChunkSpan, counts: Integers, streams: _Streams
) -> Integers | None:
    """Decode the positions of the changed words, ascending; check their number in each row."""
    if chunk.where == delta.WHOLE:
        return None
    raw_bytes = chunk.raw_bytes - chunk.num_changed * span.word_bytes
    each = raw_bytes // len(streams.where)
    data = [delta.unpack(stream, each) for stream in streams.where]
    if chunk.where == delta.MASK:
        # Bits behind the last word are positions out of range, below.
        bits = np.unpackbits(np.frombuffer(data[0], np.uint8), bitorder="little")
        positions = np.flatnonzero(bits)
    else:
        positions = _positions_of(delta.join_planes(data, WORDS[2]))
    if len(positions) != chunk.num_changed or positions[-1] >= chunk.num_words:
        raise StoreCorruptError("delta: a chunk's positions are not those that its header counts")
    if len(counts) > 1:
        ends = np.cumsum(counts)
        firsts, lasts = positions[ends - counts], positions[ends - 1]
        if (firsts < span.starts).any() or (lasts >= span.starts + span.num_words).any():
            raise StoreCorruptError("delta: a chunk's positions are not in the tensors it names")
    return positions


def _values(chunk: Chunk, span: _ChunkSpan, streams: _Streams) -> Words:
    """The words of a chunk, or what is to be added to them."""
    planes = [delta.unpack(plane, chunk.num_changed) for plane in streams.planes]
    values: Words = delta.join_planes(planes, WORDS[span.word_bytes])
    return _unzigzag(values) if chunk.what == delta.DIFFERENCES else values
