"""A delta file: the words that differ between two versions of one layout.

It is, in this order::

    prefix       magic, number of the format, the header's size as stored and unpacked, its xxh3
    header       one line of JSON (:class:`DeltaRecord`), packed
    chunks       one after another, each with its digest in the header

A chunk changes *words*: unsigned numbers of 1, 2, 4 or 8 bytes, each of them an element, or a part
of an element. It extends from its first changed word to its last, over all tensors and padding in
between. Chunks are sorted by their first words. Chunks of several ranks may overlap, but no two
change a word.

A chunk is, in this order: the stored length of each of its streams (4 bytes, little-endian), then
the streams. The first five are the bytes of *gaps*, the number of unchanged words before each
changed one: the lowest byte of each gap, the next one of each, and so on. Then come the bytes of
the changed words in the same way: new minus old, zigzag, so that small differences of either sign
are small numbers. A stream has length 0 if all its bytes are zero.

The header and all other streams are stored as a frame of zstd if that is shorter.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.layout import Layout, digest
from dbuffer.format.lineage import Count, Token, VersionId
from dbuffer.format.manifest import Record, decodable, decode, encode
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.lazy import cached_property

MAGIC = b"dbufdelt"
DELTA_FORMAT = 1
"""Version of this file's format; raised when an older reader would misread a newer file."""

_PREFIX = struct.Struct("<8sIIIQ")
PREFIX_BYTES = _PREFIX.size

GAP_BYTES = 5
"""Bytes of a gap. A rank's chunk may have words of tensors at both ends of a file of terabytes; the
gaps of a chunk, all together, are below 2**63."""

MAX_HEADER_BYTES = 1 << 26
"""Largest header, as stored and unpacked."""

CHUNK_BYTES = 4 << 20
"""Bytes that are compared for one chunk, and most that it changes. It bounds the memory that a
thread needs for one."""


class Chunk(NamedTuple):
    """A chunk in the header."""

    start: Count
    """Place of its first changed word, in bytes from the first tensor's beginning."""
    num_bytes: Count
    """Number of bytes from there to the end of its last changed word."""
    word_bytes: Count
    num_changed: Count
    """Number of changed words."""
    stored_bytes: Count
    xxh3: Token
    """Checksum of the stored bytes."""

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    @property
    def num_streams(self) -> int:
        return GAP_BYTES + self.word_bytes


@decodable
class DeltaRecord(Record, frozen=True, kw_only=True):
    """The header."""

    NAME: ClassVar = "delta"

    base: VersionId
    """Version that the delta starts from."""
    id: VersionId
    """Version that it leads to."""
    layout_xxh3: Token
    checksums: list[tuple[Count, Token]] | None
    """Index of each tensor whose checksum changed, ascending, and its checksum; None if the version
    has no checksums."""
    chunks: list[Chunk]


@dataclass(frozen=True, eq=False)
class DeltaHeader:
    """Header of a delta file, checked against the layout that it is for."""

    record: DeltaRecord
    layout: Layout
    header_bytes: int
    """Size as stored, with the prefix."""

    @property
    def chunks(self) -> list[Chunk]:
        return self.record.chunks

    @cached_property
    def places(self) -> list[int]:
        """Offset of each chunk in the file, in bytes; and, last, the size of the file."""
        stored = (chunk.stored_bytes for chunk in self.chunks)
        return list(itertools.accumulate(stored, initial=self.header_bytes))


def encode_header(record: DeltaRecord) -> bytes:
    """Return the prefix and the header."""
    line = encode(record)
    data = pack(line)
    prefix = _PREFIX.pack(MAGIC, DELTA_FORMAT, len(data), len(line), int(digest(data), 16))
    return prefix + data


def decode_header(
    read: Callable[[int, int], bytes], layout: Layout, layout_xxh3: str
) -> DeltaHeader:
    """Read a file's prefix and header, strictly.

    Args:
        read: returns bytes of the file; called with their offset and number.
        layout: layout of the version that the delta starts from.
        layout_xxh3: its digest, which must be that in the header.

    Raises:
        UnsupportedError: the file is of a format that this version of dbuffer does not know.
        StoreCorruptError: it is no delta file, is damaged, or is for another layout.
    """
    prefix = read(0, PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        raise StoreCorruptError(f"delta: {len(prefix)} bytes, and a prefix has {PREFIX_BYTES}")
    magic, number, stored_bytes, raw_bytes, xxh3 = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise StoreCorruptError(f"delta: begins with {magic!r}, and a delta file with {MAGIC!r}")
    if number != DELTA_FORMAT:
        raise UnsupportedError(
            f"delta: format {number}, and this dbuffer reads format {DELTA_FORMAT}; use the same "
            "version of dbuffer at both ends"
        )
    if not 0 < stored_bytes <= raw_bytes <= MAX_HEADER_BYTES:
        raise StoreCorruptError(f"delta: a header of {stored_bytes} bytes, {raw_bytes} unpacked")
    data = read(PREFIX_BYTES, stored_bytes)
    if int(digest(data), 16) != xxh3:
        raise StoreCorruptError("delta: the header is not as it was written; publish again")
    record = decode(DeltaRecord, bytes(unpack(data, raw_bytes)))
    if record.layout_xxh3 != layout_xxh3:
        raise StoreCorruptError(
            f"delta: made for the layout {record.layout_xxh3}, and this version has {layout_xxh3}"
        )
    indices = [-1, *(index for index, _ in record.checksums or ()), len(layout.specs)]
    if any(index >= following for index, following in itertools.pairwise(indices)):
        raise StoreCorruptError("delta: its tensors are out of order, or not in the layout")
    _check_chunks(record.chunks, layout)
    return DeltaHeader(record, layout, PREFIX_BYTES + stored_bytes)


def _check_chunks(chunks: list[Chunk], layout: Layout) -> None:
    """Check that chunks are in order, in the file, and of possible sizes."""
    starts = [-1, *(chunk.start for chunk in chunks)]
    for before, chunk in zip(starts, chunks, strict=False):
        lengths, raw_bytes = 4 * chunk.num_streams, chunk.num_streams * chunk.num_changed
        if not (
            before < chunk.start < chunk.end <= layout.checksums_offset
            and chunk.word_bytes in (1, 2, 4, 8)
            and chunk.start % chunk.word_bytes == chunk.num_bytes % chunk.word_bytes == 0
            and 0 < chunk.num_changed * chunk.word_bytes <= min(chunk.num_bytes, CHUNK_BYTES)
            and lengths <= chunk.stored_bytes <= lengths + raw_bytes
        ):
            raise StoreCorruptError(f"delta: a chunk after byte {before} that cannot be: {chunk}")


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
        return self.zstandard.ZstdDecompressor(max_window_size=2 * MAX_HEADER_BYTES)


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
    return data
