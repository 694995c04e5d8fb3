"""A delta file: what changed between two versions of one layout.

It is, in this order::

    prefix       magic, number of the format, length and xxh3 of the header as it is stored
    header       one line of JSON (:class:`DeltaRecord`), then two tables
    chunks       one after another, each with its digest in the header

The first table has a row for each changed tensor, sorted by whether it comes whole, by the bytes of
its words and by its place in the layout. The second has one for each chunk: the tensors of several
rows, or a range of one row's tensor. A table is stored byte plane by byte plane, as values are.

A *word* is an element's bits as an unsigned number. An element of 16 bytes is two words of 8.

A chunk is, in this order: the stored length of each of its streams (4 bytes, little-endian), then
the streams. The first ones say where the changed words are, counted through all words of the chunk
as if they lay side by side: two for gaps, the low and the high bytes of 16-bit numbers, one for a
mask, none for whole tensors. Then comes one for each byte of a word: the lowest byte of each
changed word, the next one of each, and so on.

A stream, and the two tables together, are stored as a frame of zstd if that is shorter than what is
in it, and as they are if not. How long each is, unpacked, follows from the header alone.
"""

from __future__ import annotations

import functools
import struct
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from dbuffer.errors import DBufferError, StoreCorruptError, UnsupportedError
from dbuffer.format.layout import ITEM_BYTES, Layout, TensorSpec, digest
from dbuffer.format.manifest import DIGEST, IDENTITY, Record, decode, encode

MAGIC = b"dbufdelt"
DELTA_FORMAT = 1
"""Version of this file's format; raised when an older reader would misread a newer file."""

_PREFIX = struct.Struct("<8sIIQ")
PREFIX_BYTES = _PREFIX.size

GAPS, MASK, WHOLE = 0, 1, 2
"""Encodings of the positions of a chunk's changed words.

GAPS: the number of unchanged words before each: 65535 as often as it fits, then the rest. MASK: a
bit for each word, the lowest of a byte first. WHOLE: all changed.
"""

NUM_STREAMS = (2, 1, 0)
"""Number of streams of each encoding of positions."""

DIFFERENCES, THEMSELVES = 0, 1
"""Encodings of a changed word: new minus old (zigzag, so that small differences of either sign are
small numbers), or the new word."""

ESCAPE = 65535

MAX_HEADER_BYTES = 1 << 28
MAX_TABLE_BYTES = 1 << 30
MAX_CHUNK_BYTES = 8 << 20
"""No chunk is longer, unpacked. With the next, it bounds the memory that a thread needs for one."""
MAX_CHUNK_WORDS = 1 << 25
MIN_CHUNK_BYTES = 1 << 14
"""There are no more chunks than tensors, and one for so many bytes of all tensors."""

_MAX_LINE_BYTES = 4096

_TENSOR_ROW = np.dtype([("tensor", "<u4"), ("num_changed", "<u8"), ("xxh3", "<u8")])
_CHUNK_ROW = np.dtype(
    [
        ("first_row", "<u4"),
        ("num_rows", "<u4"),
        ("first_word", "<u8"),
        ("num_words", "<u8"),
        ("num_changed", "<u8"),
        ("raw_bytes", "<u4"),
        ("stored_bytes", "<u4"),
        ("xxh3", "<u8"),
        ("where", "u1"),
        ("what", "u1"),
    ]
)

Integers = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRecord(Record):
    """The first line of the header."""

    NAME: ClassVar = "delta"
    PATTERNS: ClassVar = {"base": IDENTITY, "identity": IDENTITY, "layout_xxh3": DIGEST}

    base: str
    """Identity of the version that it starts from."""
    identity: str
    """Identity of the one that it leads to."""
    version: int
    layout_xxh3: str
    is_hashed: bool
    """Whether the rows hold checksums; without, they hold 0."""
    num_tensors: int
    num_chunks: int


class Chunk(NamedTuple):
    """A row of the second table, with plain numbers."""

    first_row: int
    num_rows: int
    first_word: int
    """First word of the range, for a range of one tensor; else 0."""
    num_words: int
    """Number of words in all its tensors, or in the range: changed or not."""
    num_changed: int
    raw_bytes: int
    """Size of all its streams, unpacked."""
    stored_bytes: int
    xxh3: int
    """Checksum of the stored bytes."""
    where: int
    what: int


@dataclass(frozen=True, eq=False)
class DeltaHeader:
    """Header of a delta file, checked against the layout that it is for."""

    record: DeltaRecord
    layout: Layout
    tensors: Table
    """``tensor`` (its index in the layout), ``num_changed`` (words), ``xxh3`` of the tensor after
    the change, as `Copier.checksums` has it."""
    chunks: list[Chunk]
    header_bytes: int
    """As stored, without the prefix."""

    @functools.cached_property
    def places(self) -> list[int]:
        """Offset of each chunk in the file, in bytes; and, last, the end of the file."""
        stored = [chunk.stored_bytes for chunk in self.chunks]
        first = PREFIX_BYTES + self.header_bytes
        return [first, *(first + np.cumsum(stored, dtype=np.int64)).tolist()]

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self.places[-1]

    @property
    def checksums(self) -> dict[int, int] | None:
        """Checksum of each changed tensor after the change, by index; None if there are none."""
        if not self.record.is_hashed:
            return None
        return dict(
            zip(self.tensors["tensor"].tolist(), self.tensors["xxh3"].tolist(), strict=True)
        )

    @functools.cached_property
    def shapes(self) -> Shapes:
        return Shapes.of(self.layout, self.tensors["tensor"])


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """Word size, number of words and offset of the tensor in each row."""

    word_bytes: Integers
    num_words: Integers
    offsets: Integers
    """Bytes from the first tensor's beginning."""

    @classmethod
    def of(cls, layout: Layout, tensors: npt.NDArray[Any]) -> Shapes:
        widths, sizes, offsets = (
            np.array(column, np.int64)[tensors]
            for column in (layout.widths, layout.sizes, layout.offsets)
        )
        return cls(widths, sizes // np.maximum(widths, 1), offsets)


def words_per_element(spec: TensorSpec) -> int:
    """Return the number of words of one element of a tensor."""
    return max(1, ITEM_BYTES[spec.dtype] // 8)


def encode_header(record: DeltaRecord, tensors: Table, chunks: list[Chunk]) -> bytes:
    """The prefix and the header."""
    rows = np.array(chunks, _CHUNK_ROW)
    data = encode(record) + pack(_encode_table(tensors) + _encode_table(rows))
    return _PREFIX.pack(MAGIC, DELTA_FORMAT, len(data), int(digest(data), 16)) + data


def tensor_table(num_rows: int) -> Table:
    """An empty first table, to be filled in."""
    return np.zeros(num_rows, _TENSOR_ROW)


def decode_prefix(data: bytes | memoryview) -> tuple[int, str]:
    """Read a file's first :data:`PREFIX_BYTES`: bytes of the header behind them, and its digest.

    Raises:
        UnsupportedError: it is of a format that this version of dbuffer does not know.
        StoreCorruptError: it is no delta file, or too short, or its header would be too long.
    """
    if len(data) < PREFIX_BYTES:
        raise StoreCorruptError(f"delta: {len(data)} bytes are no prefix, which has {PREFIX_BYTES}")
    magic, found, header_bytes, xxh3 = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise StoreCorruptError(f"delta: begins with {magic!r}, and a delta file with {MAGIC!r}")
    if found != DELTA_FORMAT:
        raise UnsupportedError(
            f"delta: format {found}, and this dbuffer reads format {DELTA_FORMAT}; use the same "
            "version of dbuffer at both ends"
        )
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise StoreCorruptError(f"delta: a header of {header_bytes} bytes")
    return header_bytes, f"{xxh3:016x}"


def decode_header(
    data: bytes | memoryview, data_xxh3: str, layout: Layout, layout_xxh3: str
) -> DeltaHeader:
    """Read a header, strictly.

    Args:
        data: as stored, without the prefix.
        data_xxh3: the digest that the prefix holds.
        layout: of the version that the delta starts from.
        layout_xxh3: its digest, which must be that in the header.

    Raises:
        StoreCorruptError: ``data`` does not have the digest, or is no header of a delta for this
            layout.
        UnsupportedError: its record is of an unknown format.
    """
    if digest(data) != data_xxh3:
        raise StoreCorruptError("delta: the header is not as it was written; publish again")
    line_bytes = bytes(data[:_MAX_LINE_BYTES]).find(b"\n") + 1
    record = decode(DeltaRecord, bytes(data[:line_bytes]))
    if record.layout_xxh3 != layout_xxh3:
        raise StoreCorruptError(
            f"delta: made for the layout {record.layout_xxh3}, and this version has {layout_xxh3}"
        )
    tensors, chunks = _decode_tables(record, data[line_bytes:], layout)
    shapes = _check_tensors(record, tensors, chunks, layout)
    _check_chunks(tensors, chunks, shapes)
    listed = [Chunk(*row) for row in chunks.tolist()]
    return DeltaHeader(record, layout, tensors, listed, len(data))


def _decode_tables(
    record: DeltaRecord, data: bytes | memoryview, layout: Layout
) -> tuple[Table, Table]:
    most = record.num_tensors + layout.num_bytes // MIN_CHUNK_BYTES
    if record.num_tensors > len(layout.specs) or record.num_chunks > most:
        raise StoreCorruptError(
            f"delta: {record.num_tensors} changed tensors and {record.num_chunks} chunks, of a "
            f"layout of {len(layout.specs)} tensors"
        )
    first_bytes = record.num_tensors * _TENSOR_ROW.itemsize
    raw_bytes = first_bytes + record.num_chunks * _CHUNK_ROW.itemsize
    if raw_bytes > MAX_TABLE_BYTES:
        raise StoreCorruptError(f"delta: tables of {raw_bytes} bytes, above {MAX_TABLE_BYTES}")
    tables = unpack(data, raw_bytes)
    first, second = tables[:first_bytes], tables[first_bytes:]
    return _decode_table(first, _TENSOR_ROW), _decode_table(second, _CHUNK_ROW)


def _check_tensors(record: DeltaRecord, tensors: Table, chunks: Table, layout: Layout) -> Shapes:
    """Each tensor once, in order, with a possible number of changed words."""
    if (tensors["tensor"] >= len(layout.specs)).any():
        _refuse("there is no such tensor")
    shapes = Shapes.of(layout, tensors["tensor"])
    changed = tensors["num_changed"]
    if (changed < 1).any() or (changed > shapes.num_words.astype(np.uint64)).any():
        _refuse("a tensor has another number of words than those changed")
    if not record.is_hashed and tensors["xxh3"].any():
        _refuse("a checksum, where there are to be none")
    if (chunks["where"] > WHOLE).any() or (chunks["what"] > THEMSELVES).any():
        _refuse("a chunk is encoded in no known way")
    return shapes


def _check_chunks(tensors: Table, chunks: Table, shapes: Shapes) -> None:
    """Each chunk holds whole rows, or a range of one; all together, each row is in them once."""
    num_rows, num_chunks = len(tensors), len(chunks)
    if not num_chunks:
        if num_rows:
            _refuse("no chunk holds the changed tensors")
        return
    first, rows = (chunks[name].astype(np.int64) for name in ("first_row", "num_rows"))
    end = first + rows
    if (rows < 1).any() or (end > num_rows).any() or first[0] != 0 or end[-1] != num_rows:
        _refuse("the chunks do not hold the changed tensors")
    continues = np.zeros(num_chunks, bool)
    continues[1:] = first[1:] == first[:-1]
    is_next = first[1:] == end[:-1]
    if not (continues[1:] | is_next).all() or (rows[1:][continues[1:]] > 1).any():
        _refuse("a chunk is out of place")
    if (rows[:-1][continues[1:]] > 1).any():
        _refuse("a tensor is in two chunks, of which one holds others, too")
    _check_order(tensors, chunks, shapes, first, rows)
    _check_words(tensors, chunks, shapes, continues)
    _check_sizes(chunks, shapes.word_bytes[first])


def _check_order(
    tensors: Table, chunks: Table, shapes: Shapes, first: Integers, rows: Integers
) -> None:
    """Rows are sorted, and those of one chunk have words of one size."""
    is_whole = np.zeros(len(tensors), np.int64)
    of_chunk = chunks["where"] == WHOLE
    # A row's chunks follow each other: that all agree shows when the last one's is set.
    is_whole[np.repeat(first, rows) + _counted(rows)] = np.repeat(of_chunk, rows)
    if (np.repeat(of_chunk, rows) != is_whole[np.repeat(first, rows) + _counted(rows)]).any():
        _refuse("a tensor comes whole in one chunk and not in another")
    indices = tensors["tensor"].astype(np.int64)
    keys = (is_whole * 16 + shapes.word_bytes) * (1 << 32) + indices
    if (np.diff(keys) <= 0).any() or len(np.unique(indices)) != len(indices):
        _refuse("its tensors are out of order")
    if (shapes.word_bytes[first] != shapes.word_bytes[first + rows - 1]).any():
        _refuse("words of two sizes in one chunk")


def _counted(counts: Integers) -> Integers:
    """0, 1, ... for each count, one after another."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)


def _check_words(
    tensors: Table, chunks: Table, shapes: Shapes, continues: npt.NDArray[np.bool_]
) -> None:
    """Ranges lie in their tensors, one behind the other, and the counts agree."""
    if any((chunks[name] > MAX_CHUNK_WORDS).any() for name in ("num_words", "num_changed")):
        _refuse(f"more than {MAX_CHUNK_WORDS} words in one chunk")
    if (chunks["first_word"] >= 1 << 60).any():
        _refuse("words beyond the end of a tensor")
    start, words, changed = (
        chunks[name].astype(np.int64) for name in ("first_word", "num_words", "num_changed")
    )
    first, rows = (chunks[name].astype(np.int64) for name in ("first_row", "num_rows"))
    available = _sums(shapes.num_words, first, rows)
    if (start + words > available).any():
        _refuse("words beyond the end of a tensor")
    is_group = rows > 1
    if (start[is_group] != 0).any() or (words[is_group] != available[is_group]).any():
        _refuse("a chunk does not hold all words of its tensors")
    if (continues[1:] & (start[1:] < start[:-1] + words[:-1])).any():
        _refuse("two chunks hold the same words")
    if (changed < 1).any() or (changed > words).any():
        _refuse("a chunk has another number of words than those changed")
    counts = tensors["num_changed"].astype(np.int64)
    if (changed[is_group] != _sums(counts, first, rows)[is_group]).any():
        _refuse("the counts of a chunk and of its tensors disagree")
    per_row = np.zeros(len(tensors), np.int64)
    np.add.at(per_row, first[~is_group], changed[~is_group])
    alone = np.unique(first[~is_group])
    if (per_row[alone] != counts[alone]).any():
        _refuse("the counts of a tensor and of its chunks disagree")
    whole = chunks["where"] == WHOLE
    if (changed[whole] != words[whole]).any():
        _refuse("a chunk of whole tensors lacks words")
    whole_rows = np.unique(first[whole & ~is_group])
    if (counts[whole_rows] != shapes.num_words[whole_rows]).any():
        _refuse("a tensor that comes whole lacks words")


def _sums(values: Integers, first: Integers, rows: Integers) -> Integers:
    """The sum over each chunk's rows."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    sums: Integers = total[first + rows] - total[first]
    return sums


def _check_sizes(chunks: Table, widths: Integers) -> None:
    words, changed, raw, stored, where = (
        chunks[name].astype(np.int64)
        for name in ("num_words", "num_changed", "raw_bytes", "stored_bytes", "where")
    )
    rest = raw - changed * widths
    least = np.choose(where, [2 * changed, -(-words // 8), np.zeros_like(words)])
    most = np.where(where == GAPS, 2 * (changed + words // ESCAPE), least)
    is_odd = (where == GAPS) & (rest % 2 == 1)
    if ((rest < least) | (rest > most) | is_odd | (raw > MAX_CHUNK_BYTES)).any():
        _refuse("a chunk's size does not go with its counts")
    lengths = 4 * (widths + np.array(NUM_STREAMS)[where])
    if (stored <= lengths).any() or (stored > lengths + raw).any():
        _refuse("a chunk is stored in more bytes than it holds")


def _refuse(why: str) -> None:
    raise StoreCorruptError(f"delta: the header is wrong: {why}")


def _encode_table(table: Table) -> bytes:
    """The lowest byte of each row, then the next one of each."""
    return table.view(np.uint8).reshape(len(table), table.dtype.itemsize).T.tobytes()


def _decode_table(data: bytes | memoryview, dtype: np.dtype[Any]) -> Table:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def split_planes(words: npt.NDArray[Any]) -> list[npt.NDArray[np.uint8]]:
    """The lowest byte of each word, the next one of each, and so on."""
    return [(words >> 8 * place).astype(np.uint8) for place in range(words.dtype.itemsize)]


def join_planes(
    planes: list[bytes | memoryview], dtype: np.dtype[Any]
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The other way round."""
    words: npt.NDArray[Any] = np.frombuffer(planes[-1], np.uint8).astype(dtype)
    for plane in reversed(planes[:-1]):
        words <<= 8
        words |= np.frombuffer(plane, np.uint8)
    return words


class _Tools(threading.local):
    """A thread's own: they cannot be shared, and making them takes as long as using them."""

    @functools.cached_property
    def zstandard(self) -> ModuleType:
        try:
            import zstandard
        except ImportError as error:
            raise DBufferError(
                f"deltas need {error.name}: pip install 'dbuffer[delta]', or zstandard itself"
            ) from error
        return zstandard

    @functools.cached_property
    def compressor(self) -> Any:
        # Numbers that are next to random: Huffman's code makes them shorter, and matches only cost
        # time and spoil it. Against level 1 as it is, 2 to 10 % fewer bytes.
        parameters = self.zstandard.ZstdCompressionParameters.from_level(
            1,
            strategy=self.zstandard.STRATEGY_FAST,
            min_match=7,
            hash_log=6,
            write_content_size=True,
            write_checksum=False,
        )
        return self.zstandard.ZstdCompressor(compression_params=parameters)

    @functools.cached_property
    def decompressor(self) -> Any:
        return self.zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)


_tools = _Tools()


def require_compression() -> None:
    """Raise what a delta would, where what packs and unpacks it is not installed."""
    _ = _tools.zstandard


def pack(data: Any) -> bytes:
    """The bytes of a buffer as they are stored: compressed, if that makes them fewer."""
    packed: bytes = _tools.compressor.compress(data)
    return packed if len(packed) < memoryview(data).nbytes else bytes(data)


def unpack(stored: bytes | memoryview, raw_bytes: int) -> bytes | memoryview:
    """The other way round; not more than ``raw_bytes`` are set aside.

    Raises:
        StoreCorruptError: it is not what :meth:`pack` makes of so many bytes.
    """
    if len(stored) == raw_bytes:
        return stored
    if len(stored) > raw_bytes:
        raise StoreCorruptError(f"delta: {len(stored)} bytes are stored of {raw_bytes}")
    zstandard = _tools.zstandard
    try:
        # A frame that tells its size is given that much memory, whatever we say.
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise StoreCorruptError(f"delta: a stream is not of {raw_bytes} bytes")
        data: bytes = _tools.decompressor.decompress(
            stored, max_output_size=raw_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise StoreCorruptError(f"delta: a stream cannot be unpacked ({error!s:.80})") from None
    if len(data) != raw_bytes:
        raise StoreCorruptError(f"delta: a stream is not of {raw_bytes} bytes")
    return data
