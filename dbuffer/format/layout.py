"""Layout of a weights file: the place of each tensor, as the end of the file describes it.

``docs/design.md`` ("Weights file") specifies the file. If the ranks of a trainer share no memory,
each rank writes a part: a file with the rank's pieces of tensors. In this case the weights file has
a hole instead of data, and its layout has the place of each piece in the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import xxhash
from msgspec import Meta

from dbuffer.errors import StoreCorruptError
from dbuffer.format.lineage import Count, Positive
from dbuffer.format.manifest import FORMAT, Record, decodable, decode
from dbuffer.runtime.lazy import cached_property

if TYPE_CHECKING:
    from dbuffer.format.ranges import ByteRanges

ALIGNMENT_BYTES = 64
"""Alignment of tensors in a weights file: a cache line, the widest vector register, and a multiple
of every dtype's size."""

BLOCK_BYTES = 1 << 20
"""Bytes of a block, which is copied, and then hashed while it is in a core's cache. The size is
part of the format: the checksum of a longer tensor is the digest of its blocks' digests."""

SPAN_BYTES = 4 << 20
"""Bytes that one call reads or writes if a file is not mapped: large enough to use a network
well."""

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}

_MAX_DIMENSIONS = 64  # torch's own limit

DRAFT_PREFIX = "__draft__."
"""Prefix of the names of a draft model's tensors, in a version with a draft for speculative
decoding."""

_MAX_TENSOR_BYTES = 1 << 60
"""Largest size of a tensor in bytes: larger than any memory, and small enough for 64-bit
offsets."""


def is_of_draft(name: str) -> bool:
    """Whether a version's tensor of this name belongs to the draft model (speculative decoding)."""
    return name.startswith(DRAFT_PREFIX)


class TensorSpec(NamedTuple):
    """Name, dtype (torch's name, such as ``"bfloat16"``) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Block(NamedTuple):
    """Part of a tensor, at most :data:`BLOCK_BYTES` long, that is hashed on its own."""

    tensor: int
    offset: int
    num_bytes: int


class Piece(NamedTuple):
    tensor: Count
    offset: Count
    num_bytes: Positive
    part: Count
    place: Count


class Span(NamedTuple):
    """Adjacent blocks that one call reads or writes, with their padding; about SPAN_BYTES long."""

    first_block: int
    end_block: int
    start: int
    """Offset of the span's first byte in the weights file, as if that had the parts' bytes, too."""
    end: int
    part: int | None
    """Number of the part file that has these bytes, or None if the weights file has them."""
    place: int


_Shape = Annotated[tuple[Count, ...], Meta(max_length=_MAX_DIMENSIONS)]


@decodable
class _LayoutRecord(Record, frozen=True, kw_only=True):
    NAME: ClassVar = "layout"

    tensors: list[tuple[str, str, _Shape, Count]]
    aliases: dict[str, str]
    parts: tuple[Count, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """Tensors of a weights file, in order, with their offsets in the file."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    aliases: dict[str, str]
    part_bytes: tuple[int, ...] = ()
    """Size of each part file in bytes. Empty if the weights file has all data."""
    pieces: tuple[Piece, ...] = ()
    """Pieces of tensors in the part files, ordered by tensor, and then by offset in the tensor.
    Checksums are of blocks, and each piece begins a block, even if a mirror joins the parts into
    one file."""

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], aliases: dict[str, str] | None = None) -> Layout:
        specs = tuple(specs)
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end = align(end + spec.num_bytes)
        return cls(specs, tuple(offsets), dict(aliases or {}))

    @cached_property
    def all_names(self) -> frozenset[str]:
        return frozenset(self.indices.keys() | self.aliases.keys())

    @cached_property
    def target(self) -> Layout:
        """Layout of the tensors that are not a draft model's.

        Without a draft, this is the layout itself.
        """
        return self if self.draft is None else self._part(is_draft=False)

    @cached_property
    def draft(self) -> Layout | None:
        """Layout of the draft's tensors, named as in the draft model, or None without a draft."""
        return self._part(is_draft=True) if any(map(is_of_draft, self.all_names)) else None

    def _part(self, *, is_draft: bool) -> Layout:
        specs, offsets = [], []
        aliases: dict[str, str] = {}
        firsts: dict[str, str] = {}
        for name, stored_as in ({name: name for name in self.indices} | self.aliases).items():
            if is_of_draft(name) is not is_draft:
                continue
            own_name = name.removeprefix(DRAFT_PREFIX)
            if (first := firsts.setdefault(stored_as, own_name)) != own_name:
                aliases[own_name] = first
                continue
            index = self.indices[stored_as]
            specs.append(self.specs[index]._replace(name=own_name))
            offsets.append(self.offsets[index])
        return Layout(tuple(specs), tuple(offsets), aliases)

    @cached_property
    def indices(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.specs)}

    @cached_property
    def sizes(self) -> list[int]:
        return [spec.num_bytes for spec in self.specs]

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def is_in_parts(self) -> bool:
        return bool(self.part_bytes)

    @cached_property
    def joined(self) -> Layout:
        """Layout after the part files are joined into one file. The checksums stay the same."""
        if not self.is_in_parts:
            return self
        pieces = tuple(piece._replace(part=0, place=0) for piece in self.pieces)
        return dataclasses.replace(self, part_bytes=(), pieces=pieces)

    @cached_property
    def blocks(self) -> list[Block]:
        """Blocks of all tensors, in the file's order. An empty tensor has one block of length 0.

        If a tensor is in part files, each of its pieces starts with a new block, because the rank
        that writes a piece also hashes the piece's blocks.
        """
        runs = [(index, 0, size) for index, size in enumerate(self.sizes)]
        if self.pieces:
            pieces = [(p.tensor, p.offset, p.offset + p.num_bytes) for p in self.pieces]
            runs = sorted([run for run in runs if not run[2]] + pieces)
        return [
            Block(index, offset, min(BLOCK_BYTES, end - offset))
            for index, start, end in runs
            for offset in range(start, max(end, start + 1), BLOCK_BYTES)
        ]

    @cached_property
    def byte_ranges(self) -> ByteRanges:
        from dbuffer.format.ranges import ByteRanges  # numpy is much to import for a command

        word_bytes = [min(ITEM_BYTES[spec.dtype], 8) for spec in self.specs]
        return ByteRanges.of(self.offsets, self.sizes, word_bytes)

    @cached_property
    def spans(self) -> list[Span]:
        if self.is_in_parts:
            return sorted(self._spans_of_pieces(), key=lambda span: (span.part, span.place))
        blocks, spans = self.blocks, []
        starts = [self.offsets[block.tensor] + block.offset for block in blocks]
        first = 0
        for index, block in enumerate(blocks):
            is_last = index + 1 == len(blocks)
            if is_last or starts[index] + block.num_bytes - starts[first] >= SPAN_BYTES:
                end = self.checksums_offset if is_last else starts[index + 1]
                spans.append(Span(first, index + 1, starts[first], end, None, starts[first]))
                first = index + 1
        return spans

    def _spans_of_pieces(self) -> Iterator[Span]:
        first_of = {(block.tensor, block.offset): i for i, block in enumerate(self.blocks)}
        for piece in self.pieces:
            start = self.offsets[piece.tensor] + piece.offset
            for at in range(0, piece.num_bytes, SPAN_BYTES):
                num_bytes = min(SPAN_BYTES, piece.num_bytes - at)
                first = first_of[piece.tensor, piece.offset + at]
                end = first - (-num_bytes // BLOCK_BYTES)
                place = piece.place + at
                yield Span(first, end, start + at, start + at + num_bytes, piece.part, place)

    @property
    def checksums_offset(self) -> int:
        if not self.specs:
            return 0
        return align(self.offsets[-1] + self.specs[-1].num_bytes)

    @property
    def layout_offset(self) -> int:
        return align(self.checksums_offset + 8 * len(self.specs))

    @property
    def file_bytes(self) -> int:
        return self.layout_offset + len(self.encoded) + len(self.tail)

    def describe_file(self, table_xxh3: str | None) -> dict[str, Any]:
        return {
            "file_bytes": self.file_bytes,
            "num_tensors": len(self.specs),
            "num_bytes": self.num_bytes,
            "layout_offset": self.layout_offset,
            "layout_bytes": len(self.encoded),
            "layout_xxh3": self.xxh3,
            "checksums_offset": self.checksums_offset,
            "checksums_xxh3": table_xxh3,
        }

    @cached_property
    def xxh3(self) -> str:
        return digest(self.encoded)

    @cached_property
    def encoded(self) -> bytes:
        tensors = [
            [spec.name, spec.dtype, spec.shape, offset]
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        ]
        data = {
            "format": FORMAT,
            "tensors": tensors,
            "aliases": self.aliases,
            "parts": self.part_bytes,
            "pieces": self.pieces,
        }
        return json.dumps(data, separators=(",", ":")).encode("ascii")

    @classmethod
    @functools.lru_cache(maxsize=4)
    def decode(cls, data: bytes, end: int) -> Layout:
        """Decode and check a layout. Every tensor must end before offset ``end`` of the file.

        The four layouts decoded last are cached: decoding 100,000 tensors takes a second.
        """
        record = decode(_LayoutRecord, data)
        aliases = record.aliases
        specs, offsets, free = [], [], 0
        for name, dtype, shape, offset in record.tensors:
            # Count a size of 0 as 1: torch limits an empty tensor's other sizes, too.
            num_elements = math.prod(size or 1 for size in shape)
            if dtype not in ITEM_BYTES or num_elements * ITEM_BYTES[dtype] > _MAX_TENSOR_BYTES:
                raise StoreCorruptError(
                    f"layout: tensor {name!r:.80} has an invalid dtype ({dtype!r:.20}) or is too "
                    f"large ({shape!r:.80})"
                )
            spec = TensorSpec(name, dtype, shape)
            if offset % ALIGNMENT_BYTES or offset < free or offset + spec.num_bytes > end:
                raise StoreCorruptError(
                    f"layout: tensor {spec.name!r:.80} is misaligned, or overlaps other data"
                )
            specs.append(spec)
            offsets.append(offset)
            free = offset + spec.num_bytes
        names = {spec.name for spec in specs}
        if len(names) != len(specs):
            raise StoreCorruptError("layout: a name occurs twice")
        if not names.issuperset(aliases.values()) or not names.isdisjoint(aliases):
            raise StoreCorruptError(
                "layout: an alias is itself a tensor's name, or names no tensor"
            )
        _check_pieces(record.parts, record.pieces, specs)
        return cls(tuple(specs), tuple(offsets), aliases, record.parts, record.pieces)

    @cached_property
    def tail(self) -> bytes:
        """Last bytes of the file, which ``TensorDict.from_consolidated`` needs to open it.

        The bytes are metadata in the form of tensordict 0.10 to 0.15, then the metadata's length.
        If the data is in several files, there are no last bytes, so that tensordict refuses the
        file.
        """
        if self.is_in_parts:  # with these bytes, tensordict would find no data
            return b""
        padding = 0
        # Leave out float8 and float4 tensors, which tensordict cannot load, and its reserved names.
        leaves = {
            spec.name: [f"torch.{spec.dtype}", spec.shape, at, at + spec.num_bytes, padding]
            for spec, at in zip(self.specs, self.offsets, strict=True)
            if not spec.dtype.startswith(("float8", "float4")) and not spec.name.startswith("<NJT")
        }
        attributes = {"device": "cpu", "names": [], "batch_size": [], "is_locked": True}
        data = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves}
        data |= {"cls_metadata": attributes}
        text = json.dumps(data, separators=(",", ":")).encode("ascii")
        return text + len(text).to_bytes(8, "little")


def align(offset: int) -> int:
    """Return the least multiple of :data:`ALIGNMENT_BYTES` that is not below the offset."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def digest(data: bytes | memoryview) -> str:
    """Return the 64-bit xxh3 hash of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def _check_pieces(
    parts: tuple[int, ...], pieces: tuple[Piece, ...], specs: list[TensorSpec]
) -> None:
    if not parts and not pieces:
        return
    covered = [0] * len(specs)
    for before, piece in itertools.pairwise((Piece(0, 0, 0, 0, 0), *pieces)):
        if piece.tensor >= len(specs) or not _is_inside(piece, parts):
            raise StoreCorruptError(
                f"layout: a piece belongs to no tensor, or is not inside its part: {piece}"
            )
        if piece.tensor < before.tensor or piece.offset != covered[piece.tensor]:
            raise StoreCorruptError(f"layout: a piece is missing, or out of place: {piece}")
        covered[piece.tensor] += piece.num_bytes
    if covered != [spec.num_bytes for spec in specs]:
        raise StoreCorruptError("layout: its pieces do not cover its tensors")
    if not parts:
        return
    in_place = sorted(pieces, key=lambda piece: (piece.part, piece.place))
    for before, piece in itertools.pairwise(in_place):
        if piece.part == before.part and piece.place < before.place + before.num_bytes:
            raise StoreCorruptError(f"layout: a piece overlaps another: {piece}")


def _is_inside(piece: Piece, parts: tuple[int, ...]) -> bool:
    if not parts:
        return piece.part == piece.place == 0
    return (
        piece.part < len(parts)
        and piece.place % ALIGNMENT_BYTES == 0
        and piece.place + piece.num_bytes <= parts[piece.part]
    )
