"""Damaged and hostile deltas: refused before a byte is written, or right."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format import delta
from dbuffer.format.delta import Chunk, DeltaHeader
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.manifest import encode
from dbuffer.io import changes as io_changes
from dbuffer.io import delta as io_delta
from dbuffer.io.copier import Copier
from dbuffer.io.delta import apply_delta, changed_elements
from tests.support.deltas import (
    Step,
    decoded,
    make_step,
    random_step,
    random_tensor,
    verify_result,
)
from tests.support.soak import is_soak

FUZZ_CASES = 20_000 if is_soak() else 300

MOST_BYTES = 16 << 20
"""Memory that reading and applying a delta may take, of versions with up to 1.3 MB."""


@pytest.fixture(scope="module")
def copier():
    copier = Copier(1)
    yield copier
    copier.close()


def mixed(copier: Copier) -> Step:
    """Small tensors of all kinds, with words of each size."""
    rng = np.random.default_rng(0)
    dtypes = [
        *("bfloat16", "bfloat16", "int8", "float32", "bfloat16", "complex128", "float32"),
        *("bfloat16", "bool", "bfloat16", "float8_e4m3fn", "int64"),
    ]
    sizes = [300, 500, 77, 40, 9, 33, 60, 64, 100, 1, 260, 21]
    shares = [0.02, 0.05, 0.1, 0.05, 0.9, 0.4, 1.0, 0.45, 0.4, 1.0, 0.01, 0.2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io_changes, "CHUNK_BYTES", 128)
        patch.setattr(io_changes, "MAX_CHANGED_BYTES", 64)
        return random_step(rng, dtypes, sizes, shares, copier)


def cut(copier: Copier) -> Step:
    """Tensors that are longer than a chunk."""
    rng = np.random.default_rng(0)
    dtypes, sizes, shares = ["bfloat16"] * 4, [9000, 70_000, 800, 600], [0.02, 0.0001, 0.9, 0.4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io_changes, "CHUNK_BYTES", 4096)
        patch.setattr(io_changes, "MAX_CHANGED_BYTES", 1024)
        return random_step(rng, dtypes, sizes, shares, copier)


def far_apart(copier: Copier) -> Step:
    """Long gaps, and streams that are stored as they are."""
    rng = np.random.default_rng(0)
    before = [torch.zeros(300_000).to(torch.uint8), random_tensor("float32", 3000, rng)]
    after = [before[0].clone(), torch.zeros(3000)]
    after[0][[5, 70_000, 299_000]] += 1
    return make_step(before, after, ["uint8", "float32"], copier)


@pytest.fixture(scope="module")
def steps(copier):
    return [make(copier) for make in (mixed, cut, far_apart)]


def seal(data: bytes, raw_bytes: int) -> bytes:
    """A header with the prefix that goes with it."""
    return (
        delta._PREFIX.pack(
            *(delta.MAGIC, delta.DELTA_FORMAT, len(data), raw_bytes),
            xxhash.xxh3_64_intdigest(data),
        )
        + data
    )


def fields_of(step: Step) -> dict[str, Any]:
    return json.loads(encode(step.header.record))


def header_of(fields: dict[str, Any]) -> bytes:
    line = json.dumps(fields).encode()
    return seal(delta.pack(line), len(line))


def with_chunk(step: Step, number: int, body: bytes, **changed: int) -> bytes:
    """The header for a chunk that holds something else, with the digest that this has."""
    fields = fields_of(step)
    digest = xxhash.xxh3_64_hexdigest(body)
    chunk = step.header.chunks[number]._replace(stored_bytes=len(body), xxh3=digest)
    fields["chunks"][number] = chunk._replace(**changed)
    return header_of(fields)


def streams_of(step: Step, number: int) -> list[bytes]:
    header = step.header
    streams = io_delta._streams(header, number, step.chunks[number])
    return [bytes(stream) for stream in streams]


def body_of(streams: list[bytes]) -> bytes:
    return np.array([len(each) for each in streams], "<u4").tobytes() + b"".join(streams)


def words_of(step: Step, chunk: Chunk) -> list[tuple[int, int]]:
    """First byte and end of everything that a chunk may write."""
    return [
        (max(chunk.start, offset), min(chunk.end, offset + size))
        for offset, size in zip(step.layout.offsets, step.layout.sizes, strict=True)
        if offset < chunk.end and chunk.start < offset + size
    ]


def try_to_apply(step: Step, header: bytes, chunks: list[bytes], copier: Copier) -> str:
    """What comes of it: the error, or that the result is right, or that it is known to be wrong.

    Anything else, and any byte written that no chunk may write, fails the test.
    """
    contents = step.contents()
    damaged = [n for n, body in enumerate(chunks) if body != step.chunks[n]]
    read: DeltaHeader | None = None
    try:
        read = decoded(header, step)
        apply_delta(read, chunks.__getitem__, contents.data, copier)
        verify_result(read, contents, copier)
    except (StoreCorruptError, UnsupportedError) as error:
        contents.assert_guarded()
        if read is None:
            assert torch.equal(contents.data, step.contents().data)
            return "header refused"
        if "not what delta" in str(error):
            return "found out"
        untouched = step.contents()
        for number in damaged:
            for first, end in words_of(step, read.chunks[number]):
                assert torch.equal(contents.data[first:end], untouched.data[first:end])
        return "chunk refused"
    contents.assert_guarded()
    assert torch.equal(contents.data, step.contents(of_after=True).data)
    return "right"


def damage(data: bytes, chance: random.Random) -> bytes:
    """Flip a bit, or put junk in the place of a few bytes or of the whole rest."""
    at = chance.randrange(len(data)) if data else 0
    if data and chance.random() < 0.3:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    end = chance.choice((at, at + chance.randrange(9), len(data)))
    junk = chance.choice((b"", data[at : at + 5], chance.randbytes(chance.randrange(1, 9))))
    return data[:at] + junk + data[end:]


NUMBERS = (0, 1, 2, 254, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def damage_number(row: list[Any], chance: random.Random) -> None:
    """One field of one row: a bit of it, next to it, or a number that is often wrong."""
    place = chance.randrange(len(row))
    if isinstance(row[place], str):
        row[place] = damage(row[place].encode(), chance).decode("latin-1")
        return
    value = row[place]
    row[place] = chance.choice(
        [value ^ 1 << chance.randrange(64), value + 1, value - 1, chance.choice(NUMBERS)]
    )


def fuzz_bytes(step: Step, chance: random.Random) -> tuple[bytes, list[bytes]]:
    """Damage that disks and networks do, which no digest fits; or such as a digest fits."""
    header, chunks = step.encoded, list(step.chunks)
    number, is_sealed = chance.randrange(-1, len(chunks)), chance.random() < 0.5
    if number < 0:
        data = damage(header[delta.PREFIX_BYTES :], chance)
        raw_bytes = delta._PREFIX.unpack_from(header)[3]
        return seal(data, raw_bytes) if is_sealed else damage(header, chance), chunks
    swapped = chance.random() < 0.3
    chunks[number] = chance.choice(chunks) if swapped else damage(chunks[number], chance)
    return with_chunk(step, number, chunks[number]) if is_sealed else header, chunks


def fuzz_fields(step: Step, chance: random.Random) -> tuple[bytes, list[bytes]]:
    fields = fields_of(step)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if chance.random() < 0.3:
            junk = [None, -1, 0, 1, 2**31, 2**63 - 1, 2**70, "", "x", [], {}, True, 1.5, "0" * 16]
            fields[chance.choice(list(fields))] = chance.choice(junk)
        else:
            table = fields[chance.choice(("checksums", "chunks"))]
            if isinstance(table, list) and table:
                damage_number(chance.choice(table), chance)
    return header_of(fields), step.chunks


def fuzz_stream(step: Step, chance: random.Random) -> tuple[bytes, list[bytes]]:
    """Numbers in a stream that are wrong, packed as they should be."""
    chunks = list(step.chunks)
    number = chance.randrange(len(chunks))
    chunk, streams = step.header.chunks[number], streams_of(step, number)
    which = chance.randrange(len(streams))
    stream = streams[which]
    raw = bytearray(delta.unpack(stream, chunk.num_changed) if stream else chunk.num_changed)
    for _ in range(chance.randrange(1, 4)):
        raw[chance.randrange(len(raw))] = chance.choice((0, 1, 254, 255, chance.randrange(256)))
    data = damage(bytes(raw), chance) if chance.random() < 0.2 else bytes(raw)
    streams[which] = delta.pack(data)
    chunks[number] = body_of(streams)
    return with_chunk(step, number, chunks[number]), chunks


WAYS = (fuzz_bytes, fuzz_fields, fuzz_stream)


@pytest.mark.parametrize("way", WAYS)
def test_fuzz(steps, copier, way, record_property):
    outcomes: dict[str, int] = {}
    tracemalloc.start()
    try:
        for number in range(-(-FUZZ_CASES // len(WAYS))):
            chance = random.Random(f"{way.__name__} {number}")
            step = chance.choice(steps)
            header, chunks = way(step, chance)
            outcome = try_to_apply(step, header, chunks, copier)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    for outcome, count in outcomes.items():
        record_property(f"damaged deltas: {outcome}", count)
    refused = {"header refused", "chunk refused", "found out"}
    assert refused & set(outcomes), "this way of damage hits nothing"


@pytest.mark.parametrize(
    ("prefix", "error"),
    [
        (b"", StoreCorruptError),
        (bytes(27), StoreCorruptError),
        (bytes(28), StoreCorruptError),
        (delta._PREFIX.pack(delta.MAGIC, 2, 100, 100, 0), UnsupportedError),
        (delta._PREFIX.pack(delta.MAGIC, 1, 0, 0, 0), StoreCorruptError),
        (delta._PREFIX.pack(delta.MAGIC, 1, 100, 99, 0), StoreCorruptError),
        (delta._PREFIX.pack(delta.MAGIC, 1, 9, delta.MAX_HEADER_BYTES + 1, 0), StoreCorruptError),
    ],
)
def test_a_wrong_prefix_is_refused(steps, prefix, error):
    with pytest.raises(error):
        decoded(prefix, steps[0])


class TestHeader:
    def test_for_another_layout(self, steps):
        step, few = steps[0], Layout.of([TensorSpec("a", "bfloat16", (3,))])
        with pytest.raises(StoreCorruptError, match="made for the layout"):
            decoded(step.encoded, step._replace(layout_xxh3="1" * 16))
        with pytest.raises(StoreCorruptError, match="not in the layout"):
            decoded(step.encoded, step._replace(layout=few))

    def test_with_a_chunk_or_a_tensor_twice(self, steps):
        for step in steps:
            for name in ("chunks", "checksums"):
                fields = fields_of(step)
                fields[name].insert(1, fields[name][0])
                with pytest.raises(StoreCorruptError):
                    decoded(header_of(fields), step)

    @pytest.mark.parametrize("name", [name for name in Chunk._fields if name != "xxh3"])
    def test_each_field_of_a_chunk_counts(self, steps, copier, name):
        for step in steps:
            chunk = step.header.chunks[-1]
            for value in {*NUMBERS, *range(9)} - {getattr(chunk, name)}:
                fields = fields_of(step)
                fields["chunks"][-1] = chunk._replace(**{name: value})
                outcome = try_to_apply(step, header_of(fields), step.chunks, copier)
                assert outcome in ("header refused", "chunk refused", "found out")


class TestStreams:
    def test_that_are_not_what_they_say(self):
        bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 24))
        assert len(bomb) < 1 << 16
        unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
        packed = delta.pack(bytes(1000))
        assert delta.unpack(packed, 1000) == bytes(1000)
        behind = (packed + b"x", packed * 2)
        for wrong in (bomb, unsized, *behind, packed[:-1], b"x" * 1001, b""):
            for raw_bytes in (1000, 1 << 16, 1 << 20):
                with pytest.raises(StoreCorruptError):
                    delta.unpack(wrong, raw_bytes)

    def test_gaps_that_lead_out_of_the_file(self, copier):
        before, after = torch.zeros(1_000_000), torch.zeros(1_000_000)
        after[[100, 900_000]] = 1
        step = make_step([before], [after], ["float32"], copier)
        streams, (chunk,) = streams_of(step, 0), step.header.chunks
        assert chunk.num_bytes > 4 << 16
        streams[3] = delta.pack(b"\0\xff")
        body = body_of(streams)
        for fields in ({}, {"num_bytes": chunk.num_bytes + (0xFF << 26)}):
            header = with_chunk(step, 0, body, **fields)
            assert try_to_apply(step, header, [body], copier).endswith(" refused")

    def test_words_larger_than_elements(self, copier):
        """They might reach beyond the box that a rank's memory ends with."""
        tensors = [torch.zeros(64).bfloat16(), torch.ones(64).bfloat16()]
        step = make_step(tensors[:1], tensors[1:], ["bfloat16"], copier)
        wide = make_step(*([tensor.view(torch.int64)] for tensor in tensors), ["int64"], copier)
        fields = fields_of(step) | {"chunks": wide.header.chunks}
        outcome = try_to_apply(step, header_of(fields), wide.chunks, copier)
        assert outcome == "chunk refused"

    def test_positions_are_checked_for_who_wants_only_those(self, steps, copier):
        step = steps[0]
        for number in range(len(step.header.chunks)):
            chunks = list(step.chunks)
            chunks[number] = bytes(len(chunks[number]))
            with pytest.raises(StoreCorruptError):
                changed_elements(step.header, chunks.__getitem__, copier)
            header = decoded(with_chunk(step, number, chunks[number]), step)
            with pytest.raises(StoreCorruptError):
                changed_elements(header, chunks.__getitem__, copier)


def test_the_steps_hold_every_kind_of_chunk(steps):
    chunks = [chunk for step in steps for chunk in step.header.chunks]
    assert {chunk.word_bytes for chunk in chunks} == {1, 2, 4, 8}
    assert any(chunk.num_bytes > 1 << 16 for chunk in chunks)
    tensors = [len(words_of(step, chunk)) for step in steps for chunk in step.header.chunks]
    assert min(tensors) == 1 < max(tensors)
    assert any(len(step.header.chunks) > len(step.layout.specs) for step in steps)
