"""Format of a delta file: the words that changed between two versions with one layout.

``docs/design.md`` ("Deltas") specifies the file: a prefix, a header (:class:`DeltaRecord`), and
chunks, whose digests are in the header. A chunk changes *words*: unsigned numbers of 1, 2, 4 or 8
bytes, each an element or a part of an element. For each changed word, a chunk has a *gap* (the
number of unchanged words before the word) and a *difference* (the new word minus the old word, in
zigzag encoding). A chunk stores these numbers in *streams* of one byte per changed word: first a
stream for each byte of the gaps, lowest byte first, then a stream for each byte of the differences.
The header and each stream are compressed with zstd if that makes them shorter.
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

MAGIC = b"dbufdelt"
DELTA_FORMAT = 1

_PREFIX = struct.Struct("<8sIIIQ")
PREFIX_BYTES = _PREFIX.size

GAP_BYTES = 5
"""Number of bytes that store the distance (gap) from one changed word to the next. One chunk of a
rank can have tensors from both ends of a weights file, so a gap can be as long as the file: five
bytes suffice for terabytes. The sum of a chunk's gaps stays below 2**63."""

MAX_HEADER_BYTES = 1 << 26

MAX_CHANGED_BYTES = 4 << 20
"""Largest size in bytes of a chunk's changed words. A thread that makes or applies a chunk needs
memory in proportion to this size."""


class Chunk(NamedTuple):
    start: Count
    """Place of the chunk's first changed word, in bytes from the beginning of the first tensor."""
    num_bytes: Count
    word_bytes: Count
    num_changed: Count
    stored_bytes: Count
    xxh3: Token

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    @property
    def num_streams(self) -> int:
        return GAP_BYTES + self.word_bytes


@decodable
class DeltaRecord(Record, frozen=True, kw_only=True):
    NAME: ClassVar = "delta"

    base: VersionId
    id: VersionId
    layout_xxh3: Token
    checksums: list[tuple[Count, Token]] | None
    """Index and new checksum of each tensor that changed, in ascending order. None if the versions
    have no checksums."""
    chunks: list[Chunk]


@dataclass(frozen=True, eq=False)
class DeltaHeader:
    """Header of a delta file, checked against the layout that the delta's two versions share."""

    record: DeltaRecord
    layout: Layout
    places: list[int]
    """Offset of each chunk in the file, in bytes. The last item is the size of the file."""

    @property
    def chunks(self) -> list[Chunk]:
        return self.record.chunks


def encode_header(record: DeltaRecord) -> bytes:
    line = encode(record)
    data = pack(line)
    prefix = _PREFIX.pack(MAGIC, DELTA_FORMAT, len(data), len(line), int(digest(data), 16))
    return prefix + data


def decode_header(
    read: Callable[[int, int], bytes], layout: Layout, layout_xxh3: str
) -> DeltaHeader:
    """Read and check the prefix and the header of a delta file.

    ``read`` returns bytes of the file, given their offset and number. ``layout`` is the layout of
    the delta's two versions, and ``layout_xxh3`` its digest, which the header must have.

    Raises:
        UnsupportedError: this version of dbuffer does not know the file's format.
        StoreCorruptError: the file is not a delta file, is damaged, or is for another layout.
    """
    prefix = read(0, PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        raise StoreCorruptError(
            f"delta: the file has {len(prefix)} bytes; a prefix has {PREFIX_BYTES}"
        )
    magic, number, stored_bytes, raw_bytes, xxh3 = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise StoreCorruptError(
            f"delta: the file begins with {magic!r}; a delta file begins with {MAGIC!r}"
        )
    if number != DELTA_FORMAT:
        raise UnsupportedError(
            f"delta: the file has format {number}; this dbuffer reads format {DELTA_FORMAT}. Use "
            "the same version of dbuffer for senders and receivers"
        )
    if not 0 < stored_bytes <= raw_bytes <= MAX_HEADER_BYTES:
        raise StoreCorruptError(
            f"delta: impossible size of the header: {stored_bytes} bytes, {raw_bytes} unpacked"
        )
    data = read(PREFIX_BYTES, stored_bytes)
    if int(digest(data), 16) != xxh3:
        raise StoreCorruptError("delta: the header was damaged after it was written: publish again")
    record = decode(DeltaRecord, bytes(unpack(data, raw_bytes)))
    if record.layout_xxh3 != layout_xxh3:
        raise StoreCorruptError(
            f"delta: made for the layout {record.layout_xxh3}, but this version has the layout "
            f"{layout_xxh3}"
        )
    indices = [-1, *(index for index, _ in record.checksums or ()), len(layout.specs)]
    if any(index >= following for index, following in itertools.pairwise(indices)):
        raise StoreCorruptError(
            "delta: its checksums are out of order, or of tensors that are not in the layout"
        )
    _check_chunks(record.chunks, layout)
    chunks_bytes = (chunk.stored_bytes for chunk in record.chunks)
    places = itertools.accumulate(chunks_bytes, initial=PREFIX_BYTES + stored_bytes)
    return DeltaHeader(record, layout, list(places))


def _check_chunks(chunks: list[Chunk], layout: Layout) -> None:
    starts = [-1, *(chunk.start for chunk in chunks)]
    for before, chunk in zip(starts, chunks, strict=False):
        lengths, raw_bytes = 4 * chunk.num_streams, chunk.num_streams * chunk.num_changed
        if not (
            before < chunk.start < chunk.end <= layout.checksums_offset
            and chunk.word_bytes in (1, 2, 4, 8)
            and chunk.start % chunk.word_bytes == chunk.num_bytes % chunk.word_bytes == 0
            and 0 < chunk.num_changed * chunk.word_bytes <= min(chunk.num_bytes, MAX_CHANGED_BYTES)
            and lengths <= chunk.stored_bytes <= lengths + raw_bytes
        ):
            raise StoreCorruptError(
                f"delta: the chunk after byte {before} contradicts the layout: {chunk}"
            )


_of_thread = threading.local()
"""Compressor and decompressor of each thread. Making them takes as long as using them once."""


def require_compression() -> ModuleType:
    """Return the module zstandard, or raise a DBufferError if it is not installed."""
    with needed_for("a delta"):
        import zstandard
    return zstandard


def _compressor() -> Any:
    if not hasattr(_of_thread, "compressor"):
        zstandard = require_compression()
        # A delta's bytes are nearly random. Huffman coding shortens them, but matches (repeated
        # strings of bytes) cost time and space. With these parameters, zstd finds few matches. For
        # Gaussian updates of bfloat16, the result has 2 to 11 % fewer bytes than with plain level
        # 1. If all words change by one, the size is equal, and encoding takes a seventh longer.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1,
            strategy=zstandard.STRATEGY_FAST,
            min_match=7,
            hash_log=6,
            write_content_size=True,
            write_checksum=False,
        )
        _of_thread.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return _of_thread.compressor


def _decompressor() -> Any:
    if not hasattr(_of_thread, "decompressor"):
        zstandard = require_compression()
        _of_thread.decompressor = zstandard.ZstdDecompressor(max_window_size=2 * MAX_HEADER_BYTES)
    return _of_thread.decompressor


def pack(data: Any) -> bytes:
    """Return ``data`` as it is stored: compressed if that makes it shorter."""
    packed: bytes = _compressor().compress(data)
    return packed if len(packed) < memoryview(data).nbytes else bytes(data)


def unpack(stored: bytes | memoryview, raw_bytes: int) -> bytes | memoryview:
    """Return the original data of ``stored``, the result of `pack`.

    The data has ``raw_bytes`` bytes. More memory is never allocated, even if ``stored`` is hostile.
    """
    if len(stored) == raw_bytes:
        return stored
    zstandard = require_compression()
    try:
        # Check the size first: zstandard allocates the size that a frame states, even if that size
        # is above max_output_size.
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise StoreCorruptError(f"delta: a stream does not unpack to {raw_bytes} bytes")
        data: bytes = _decompressor().decompress(
            stored, max_output_size=raw_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise StoreCorruptError(f"delta: a stream cannot be unpacked ({error!s:.80})") from None
    return data
