"""A delta file: the words that differ between two versions of one layout.

It is, in this order::

    prefix       magic, number of the format, length and xxh3 of the header as it is stored
    header       one line of JSON (:class:`DeltaRecord`), then two tables
    chunks       one after another, each with its digest in the header

A version with checksums has a row in the first table for each tensor whose checksum changed. The
second table has a row for each chunk: a range of the weights file, from a changed word to a changed
word. Chunks are sorted by the bytes of their words, then by place. A table is stored byte plane by
byte plane, as values are.

A *word* is an element's bits as an unsigned number. An element of 16 bytes is two words of 8. A
chunk changes words of one size, in tensors that have words of this size. Its positions count words
of this size from the first one to the last; padding and other tensors in between are counted, too.

A chunk is, in this order: the stored length of each of its streams (4 bytes, little-endian), then
the streams. The first two are the low and the high bytes of *gaps*: the number of unchanged words
before each changed one, in 16 bits: 65535 as often as it fits, then the rest. Then comes one stream
for each byte of a word: the lowest byte of each changed word, the next one of each, and so on.

A stream, and the two tables together, are stored as one zstd frame if that makes them shorter, and
unchanged otherwise. The length of each, unpacked, follows from the header alone.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.layout import ITEM_BYTES, Layout, TensorSpec, digest
from dbuffer.format.lineage import Count, Token, VersionId
from dbuffer.format.manifest import Record, decodable, decode, encode
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.lazy import cached_property

MAGIC = b"dbufdelt"
DELTA_FORMAT = 1
"""Version of this file's format; raised when an older reader would misread a newer file."""

_PREFIX = struct.Struct("<8sIIQ")
PREFIX_BYTES = _PREFIX.size

NUM_GAP_STREAMS = 2

DIFFERENCES, NEW_WORDS = 0, 1
"""Codes of a changed word: new minus old (zigzag, so that small differences of either sign are
small numbers), or the new word."""

ESCAPE = 65535

MAX_HEADER_BYTES = 1 << 28
MAX_TABLE_BYTES = 1 << 28
CHUNK_BYTES = 8 << 20
"""Longest range of a chunk. It bounds the memory that a thread needs for one."""

_MAX_LINE_BYTES = 4096

_TENSOR_ROW = np.dtype([("tensor", "<u4"), ("xxh3", "<u8")])
CHUNK_ROW = np.dtype(
    [
        ("word_bytes", "u1"),
        ("first_word", "<u8"),
        ("num_words", "<u4"),
        ("num_changed", "<u4"),
        ("raw_bytes", "<u4"),
        ("stored_bytes", "<u4"),
        ("xxh3", "<u8"),
        ("values", "u1"),
    ]
)

Table = npt.NDArray[np.void]


@decodable
class DeltaRecord(Record, frozen=True, kw_only=True):
    """First line of the header."""

    NAME: ClassVar = "delta"

    base: VersionId
    """Version that the delta starts from."""
    id: VersionId
    """Version that it leads to."""
    layout_xxh3: Token
    is_hashed: bool
    """Whether the version has checksums."""
    num_tensors: Count
    num_chunks: Count


class Chunk(NamedTuple):
    """Row of the second table, with plain numbers."""

    word_bytes: int
    first_word: int
    """First changed word, in words of this size from the first tensor's beginning."""
    num_words: int
    """Number of words from the first changed one to the last, both included."""
    num_changed: int
    raw_bytes: int
    """Size of all its streams, unpacked."""
    stored_bytes: int
    xxh3: int
    """Checksum of the stored bytes."""
    values: int
    """Code of the changed words."""


@dataclass(frozen=True, eq=False)
class DeltaHeader:
    """Header of a delta file, checked against the layout that it is for."""

    record: DeltaRecord
    layout: Layout
    tensors: Table
    """``tensor`` (its index in the layout) and ``xxh3`` of each tensor whose checksum changed, as
    `Copier.checksums` has it; none if the version has no checksums."""
    chunks: list[Chunk]
    header_bytes: int
    """Size as stored, without the prefix."""

    @cached_property
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
        """Changed checksums, by the tensor's index; None if the version has no checksums."""
        if not self.record.is_hashed:
            return None
        return dict(
            zip(self.tensors["tensor"].tolist(), self.tensors["xxh3"].tolist(), strict=True)
        )


def words_per_element(spec: TensorSpec) -> int:
    """Return the number of words of one element of a tensor."""
    return max(1, ITEM_BYTES[spec.dtype] // 8)


def tensor_table(num_rows: int) -> Table:
    """Return an empty first table, to be filled in."""
    return np.zeros(num_rows, _TENSOR_ROW)


def encode_header(record: DeltaRecord, tensors: Table, chunks: list[Chunk]) -> bytes:
    """Return the prefix and the header."""
    rows = np.array(chunks, CHUNK_ROW)
    data = encode(record) + pack(_encode_table(tensors) + _encode_table(rows))
    return _PREFIX.pack(MAGIC, DELTA_FORMAT, len(data), int(digest(data), 16)) + data


def decode_prefix(data: bytes | memoryview) -> tuple[int, str]:
    """Read a file's first :data:`PREFIX_BYTES`: the size of the header behind them, and its digest.

    Raises:
        UnsupportedError: it is of a format that this version of dbuffer does not know.
        StoreCorruptError: it is no delta file, or too short, or its header would be too long.
    """
    if len(data) < PREFIX_BYTES:
        raise StoreCorruptError(f"delta: {len(data)} bytes are no prefix, which has {PREFIX_BYTES}")
    magic, number, header_bytes, xxh3 = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise StoreCorruptError(f"delta: begins with {magic!r}, and a delta file with {MAGIC!r}")
    if number != DELTA_FORMAT:
        raise UnsupportedError(
            f"delta: format {number}, and this dbuffer reads format {DELTA_FORMAT}; use the same "
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
        data: the header as stored, without the prefix.
        data_xxh3: the digest that the prefix holds.
        layout: of the version that the delta starts from.
        layout_xxh3: its digest, which must be that in the header.

    Raises:
        UnsupportedError: its record is of an unknown format.
        StoreCorruptError: ``data`` does not have the digest, or is no header of a delta for this
            layout.
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
    _check_tensors(tensors, layout)
    _check_chunks(chunks, layout)
    return DeltaHeader(record, layout, tensors, [Chunk(*row) for row in chunks.tolist()], len(data))


def _decode_tables(
    record: DeltaRecord, data: bytes | memoryview, layout: Layout
) -> tuple[Table, Table]:
    if record.num_tensors > (len(layout.specs) if record.is_hashed else 0):
        raise StoreCorruptError(
            f"delta: {record.num_tensors} checksums of {len(layout.specs)} tensors"
        )
    first_bytes = record.num_tensors * _TENSOR_ROW.itemsize
    raw_bytes = first_bytes + record.num_chunks * CHUNK_ROW.itemsize
    if raw_bytes > MAX_TABLE_BYTES:
        raise StoreCorruptError(f"delta: tables of {raw_bytes} bytes, above {MAX_TABLE_BYTES}")
    tables = unpack(data, raw_bytes)
    first, second = tables[:first_bytes], tables[first_bytes:]
    return _decode_table(first, _TENSOR_ROW), _decode_table(second, CHUNK_ROW)


def _check_tensors(tensors: Table, layout: Layout) -> None:
    indices = tensors["tensor"].astype(np.int64)
    if (np.diff(indices) <= 0).any() or (indices >= len(layout.specs)).any():
        _refuse("its tensors are out of order, or not in the layout")


def _check_chunks(chunks: Table, layout: Layout) -> None:
    """Check that chunks are of known codes, apart, in order, and of possible sizes."""
    if not np.isin(chunks["word_bytes"], (1, 2, 4, 8)).all():
        _refuse("a chunk has words of no known size")
    if (chunks["values"] > NEW_WORDS).any():
        _refuse("a chunk is encoded in no known way")
    if (chunks["first_word"] > layout.checksums_offset).any():
        _refuse("words beyond the end of the file")
    widths, first, words, changed, raw, stored = (
        chunks[name].astype(np.int64)
        for name in (
            *("word_bytes", "first_word", "num_words"),
            *("num_changed", "raw_bytes", "stored_bytes"),
        )
    )
    if (first + words > layout.checksums_offset // widths).any():
        _refuse("words beyond the end of the file")
    if (changed < 1).any() or (changed > words).any() or (words * widths > CHUNK_BYTES).any():
        _refuse("a chunk has another number of words than those changed")
    is_behind = (np.diff(widths) > 0) | (first[1:] >= (first + words)[:-1])
    if (np.diff(widths) < 0).any() or not is_behind.all():
        _refuse("a chunk is out of order, or two hold the same words")
    gaps = raw - changed * widths
    most = 2 * (changed + words // ESCAPE)
    if ((gaps < 2 * changed) | (gaps > most) | (gaps % 2 == 1)).any():
        _refuse("a chunk's size does not go with its counts")
    lengths = 4 * (NUM_GAP_STREAMS + widths)
    if (stored <= lengths).any() or (stored > lengths + raw).any():
        _refuse("a chunk is stored in more bytes than it holds")


def _refuse(why: str) -> None:
    raise StoreCorruptError(f"delta: the header is wrong: {why}")


def _encode_table(table: Table) -> bytes:
    """Return the lowest byte of each row, then the next one of each."""
    return table.view(np.uint8).reshape(len(table), table.dtype.itemsize).T.tobytes()


def _decode_table(data: bytes | memoryview, dtype: np.dtype[Any]) -> Table:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def split_planes(words: npt.NDArray[Any]) -> list[npt.NDArray[np.uint8]]:
    """Return the lowest byte of each word, the next one of each, and so on."""
    return [(words >> 8 * place).astype(np.uint8) for place in range(words.dtype.itemsize)]


def join_planes(
    planes: list[bytes | memoryview], dtype: np.dtype[Any]
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the words that `split_planes` split into these planes."""
    words: npt.NDArray[Any] = np.frombuffer(planes[-1], np.uint8).astype(dtype)
    for plane in reversed(planes[:-1]):
        words <<= 8
        words |= np.frombuffer(plane, np.uint8)
    return words


class _Tools(threading.local):
    """A thread's own compressor and decompressor, which take as long to make as to use."""

    @cached_property
    def zstandard(self) -> ModuleType:
        with needed_for("a delta"):
            import zstandard
        return zstandard

    @cached_property
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

    @cached_property
    def decompressor(self) -> Any:
        return self.zstandard.ZstdDecompressor(max_window_size=2 * CHUNK_BYTES)


_tools = _Tools()


def require_compression() -> None:
    """Raise a DBufferError if zstandard, which packs and unpacks deltas, is not installed."""
    _ = _tools.zstandard


def pack(data: Any) -> bytes:
    """Return a buffer's bytes as they are stored: compressed, if that makes them fewer."""
    packed: bytes = _tools.compressor.compress(data)
    return packed if len(packed) < memoryview(data).nbytes else bytes(data)


def unpack(stored: bytes | memoryview, raw_bytes: int) -> bytes | memoryview:
    """Unpack what `pack` has stored, into at most ``raw_bytes`` of memory.

    Raises:
        StoreCorruptError: it is not what `pack` makes of so many bytes.
    """
    if len(stored) == raw_bytes:
        return stored
    if len(stored) > raw_bytes:
        raise StoreCorruptError(f"delta: {len(stored)} bytes are stored of {raw_bytes}")
    zstandard = _tools.zstandard
    try:
        # zstandard allocates the size that a frame states, whatever the limit.
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
