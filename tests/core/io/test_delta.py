"""Deltas: what differs is found, and leads from one version to the other."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbuffer.errors import DBufferError, InvalidWeightsError, StoreCorruptError
from dbuffer.format import delta as delta_format
from dbuffer.format.layout import BLOCK_BYTES, ITEM_BYTES, Layout, Piece, TensorSpec
from dbuffer.io import changes as io_changes
from dbuffer.io import devices
from dbuffer.io import find_changes as io_find_changes
from dbuffer.io.changes import Diff, TensorDiff, write_changes
from dbuffer.io.copier import Copier
from dbuffer.io.delta import Excerpt, apply_delta, changed_positions, encode_delta
from dbuffer.io.find_changes import find_changes
from dbuffer.io.tensors import DTYPE_NAMES, DTYPES
from tests.support import deltas
from tests.support.deltas import (
    BASE,
    ID,
    Guarded,
    layout_of,
    make_step,
    random_tensor,
    verify_result,
)
from tests.support.patterns import bits, odd_tensors
from tests.support.soak import is_soak

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SHARES = (0.0, 0.0001, 0.01, 0.2, 0.45, 0.9, 1.0)
EXAMPLES = 200 if is_soak() else 8


@pytest.fixture(scope="module")
def copier():
    copier = Copier(2)
    yield copier
    copier.close()


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few words, and blocks that are compared one by one."""
    monkeypatch.setattr(io_changes, "_GROUP_CHANGES", 50)
    monkeypatch.setattr(io_changes, "_WHOLE_BYTES", 400)
    monkeypatch.setattr(delta_format, "MAX_CHUNK_WORDS", 3000)
    monkeypatch.setattr(delta_format, "MIN_CHUNK_BYTES", 1)
    monkeypatch.setattr(io_find_changes, "_SHORT_BYTES", 512)


def assert_right(step, copier, *, times=1):
    """The delta leads to the version after, and its positions and checksums are right."""
    contents, read_chunk = step.contents(), step.encoded.chunks.__getitem__
    for _ in range(times):
        apply_delta(step.header, read_chunk, contents, copier)
    assert torch.equal(contents.data, step.contents(of_after=True).data)
    contents.assert_guarded()
    if step.header.checksums is not None:
        verify_result(step.header, contents, copier)
    found = dict(changed_positions(step.header, read_chunk, copier))
    for index, (old, new) in enumerate(zip(step.before, step.after, strict=True)):
        words = [np.frombuffer(bits(each), f"<u{min(old.itemsize, 8)}") for each in (old, new)]
        differing = np.flatnonzero(words[0] != words[1])
        positions = found.get(index, np.array([], np.int64))
        if positions is not None:
            assert positions.tolist() == differing.tolist()
        else:
            assert 2 * len(differing) > len(words[0])


def encode(layout, changes, copier):
    fields = {"base": BASE, "version": ID, "layout_xxh3": "0" * 16}
    return encode_delta(Diff(layout, changes, 10), copier, checksums=None, **fields)


def random_step(seed, dtypes, sizes, shares, copier, **options):
    rng = np.random.default_rng(seed)
    return deltas.random_step(rng, dtypes, sizes, shares, copier, **options)


@settings(max_examples=10 * EXAMPLES)
@given(
    seed=st.integers(0, 2**32),
    tensors=st.lists(
        st.tuples(st.sampled_from(list(ITEM_BYTES)), st.integers(0, 5000), st.sampled_from(SHARES)),
        max_size=12,
    ),
    absolute=st.booleans(),
    hashed=st.booleans(),
)
def test_round_trip_of_mixed_tensors_in_small_chunks(
    copier, small_chunks, seed, tensors, absolute, hashed
):
    columns = zip(*tensors, strict=True) if tensors else ((), (), ())
    step = random_step(seed, *columns, copier, absolute=absolute, hashed=hashed)
    assert_right(step, copier, times=2 if absolute else 1)
    assert (step.header.checksums is not None) == hashed


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("in_pieces", [False, True], ids=["in-place", "in-pieces"])
def test_tensors_of_several_blocks(copier, monkeypatch, in_pieces, dtype):
    """Compared where they are, or as those on a GPU, in pieces that it is sent."""
    if in_pieces:
        monkeypatch.setattr(devices, "_PIECE_BYTES", (BLOCK_BYTES // 3 * 8,))
        monkeypatch.setattr(
            io_find_changes,
            "_sorted_by_place",
            lambda _, after, **__: ({}, dict(enumerate(after)), []),
        )
    words = BLOCK_BYTES // DTYPES[dtype].itemsize
    sizes = [3 * words + 17, words, words + 1, 5, words // 4 - 1]
    for shares in ([0.01] * 5, [0.3, 0.9, 0.0, 1.0, 1e-9], [0.6] * 5):
        step = random_step(5, [dtype] * 5, sizes, shares, copier, hashed=not in_pieces)
        assert_right(step, copier)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
def test_short_and_long_tensors_of_all_dtypes_among_each_other(copier, hashed, absolute):
    """Some lie side by side and are compared where they are, some have others between them."""
    rng = np.random.default_rng(7)
    dtypes = [str(dtype) for dtype in rng.choice([*ITEM_BYTES], 80)]
    sizes = rng.choice([0, 1, 31, 32, 4096, 10_001, 60_000, 400_000], 80).tolist()
    shares = rng.choice([0.0, 1e-4, 0.01, 0.4, 0.51, 1.0], 80).tolist()
    step = random_step(7, dtypes, sizes, shares, copier, hashed=hashed, absolute=absolute)
    assert_right(step, copier, times=2 if absolute else 1)
    contents = step.contents()
    found = find_changes(contents, step.after, copier)
    for _ in range(2):
        write_changes(found.changes, contents, copier)
        assert torch.equal(contents.data, step.contents(of_after=True).data)
    contents.assert_guarded()


def test_many_short_tensors_side_by_side(copier):
    """More than are compared at once; the first, the last and every seventh did not change."""
    shares = [0.01 if index % 7 else 0.0 for index in range(1000)] + [0.0]
    step = random_step(8, ["bfloat16"] * 1001, [4096] * 1001, shares, copier)
    assert step.header.tensors["tensor"].tolist() == [i for i in range(1000) if i % 7]
    assert_right(step, copier)
    # Two names of one memory are two tensors here.
    after = [*step.after[:3], *[step.after[500]] * 2, *step.after[5:]]
    assert_right(make_step(step.before, after, ["bfloat16"] * 1001, copier), copier)


@pytest.mark.parametrize(
    "places",
    [
        range(BLOCK_BYTES, 2 * BLOCK_BYTES),
        # Gaps longer than 16 bits, and the last byte, behind the last eight.
        [0, 1, 65535, 65536, 65536 + 65535, 65536 + 65535 + 65536, 4 * BLOCK_BYTES + 2],
    ],
    ids=["all of one block", "far apart"],
)
def test_places_in_a_long_tensor(copier, places):
    before = torch.zeros(4 * BLOCK_BYTES + 3, dtype=torch.uint8)
    after = before.clone()
    after[list(places)] = 3
    step = make_step([before], [after], ["uint8"], copier)
    ((_, positions),) = changed_positions(step.header, step.encoded.chunks.__getitem__, copier)
    assert positions.tolist() == list(places)
    assert_right(step, copier)


def test_bits_are_compared(copier):
    nan, other = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    before = torch.stack([nan, nan, torch.tensor(0.0).bfloat16(), torch.tensor(1.0).bfloat16()])
    after = torch.stack([nan, other, torch.tensor(-0.0).bfloat16(), torch.tensor(1.0).bfloat16()])
    contents = Guarded(layout_of([before], ["bfloat16"]), [before])
    found = find_changes(contents, [after], copier)
    (change,) = found.changes
    assert change.positions.tolist() == [1, 2]
    assert change.values.tolist() == [0x7FC1, 0x8000]
    assert found.num_changed == 2


def test_the_header_says_what_it_is_for(copier):
    step = random_step(3, ["bfloat16"] * 3, [1000] * 3, [0.1] * 3, copier)
    header, record = step.header, step.header.record
    assert (record.base, record.id) == (BASE, ID)
    whole = step.encoded.header + b"".join(step.encoded.chunks)
    assert header.num_bytes == step.encoded.num_bytes == len(whole)
    places = header.places
    cut = [whole[start:end] for start, end in itertools.pairwise(places)]
    assert cut == step.encoded.chunks


class TestOtherTensors:
    @pytest.mark.parametrize("batch_bytes", [1000, 10_000, io_find_changes._BATCH_BYTES])
    def test_are_cast_as_a_publish_would_a_batch_at_a_time(self, copier, monkeypatch, batch_bytes):
        monkeypatch.setattr(io_find_changes, "_BATCH_BYTES", batch_bytes)
        tensors = odd_tensors(1000)
        layout = Layout.of(
            TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape))
            for name, (tensor, dtype) in tensors.items()
        )
        after = [tensor for tensor, _ in tensors.values()]
        before, expected = Guarded(layout, []), Guarded(layout, [])
        copier.write(expected, after)
        found = find_changes(before, after, copier)
        changed = [index for index, tensor in enumerate(after) if tensor.numel()]
        assert [change.tensor for change in found.changes] == changed
        write_changes(found.changes, before, copier)
        assert torch.equal(before.data, expected.data)

    def test_that_do_not_begin_at_a_multiple_of_eight(self, copier):
        before = torch.zeros(300_001, dtype=torch.bfloat16)
        after = before.clone()
        after[[3, 299_999]] = 1
        contents = Guarded(layout_of([before[1:]], ["bfloat16"]), [before[1:]])
        (change,) = find_changes(contents, [after[1:]], copier).changes
        assert change.positions.tolist() == [2, 299_998]

    @pytest.mark.parametrize("after", [[], [torch.zeros(3)], [torch.zeros(4)] * 2])
    def test_of_other_shapes_are_refused(self, copier, after):
        contents = Guarded(layout_of([torch.zeros(4)], ["float32"]), [torch.zeros(4)])
        with pytest.raises(InvalidWeightsError, match=r"shape|give one for each"):
            find_changes(contents, after, copier)


def test_a_layout_of_parts_has_its_own_blocks(copier):
    spec = TensorSpec("a", "float32", (1000,))
    pieces = (Piece(0, 0, 1600, 0, 0), Piece(0, 1600, 2400, 0, 0))
    layout = Layout((spec,), (0,), {}, (), pieces)
    before, after = Guarded(layout, []), torch.randn(1000)
    expected = Guarded(layout, [after])
    write_changes(find_changes(before, [after], copier).changes, before, copier)
    assert copier.checksums(before, [0]) == copier.checksums(expected)


class TestWriteChanges:
    def test_what_does_not_fit_is_named_among_many(self, copier):
        step = random_step(4, ["bfloat16"] * 50, [100] * 50, [0.1] * 50, copier)
        changes = find_changes(step.contents(), step.after, copier).changes
        encode(step.layout, changes, copier)
        wrong = changes[30].positions.copy()
        wrong[-1] = 100
        changes[30] = TensorDiff(30, wrong, changes[30].values)
        with pytest.raises(InvalidWeightsError, match=" t30 "):
            encode(step.layout, changes, copier)

    @pytest.mark.parametrize(
        "change",
        [
            TensorDiff(2, np.array([0]), np.zeros(1, np.uint16)),
            TensorDiff(-1, np.array([0]), np.zeros(1, np.uint16)),
            TensorDiff(0, np.array([10]), np.zeros(1, np.uint16)),
            TensorDiff(0, np.array([-1]), np.zeros(1, np.uint16)),
            TensorDiff(0, np.array([3, 3]), np.zeros(2, np.uint16)),
            TensorDiff(0, np.array([4, 3]), np.zeros(2, np.uint16)),
            TensorDiff(0, np.array([3, 3], np.uint32), np.zeros(2, np.uint16)),
            TensorDiff(0, np.array([0, 9, 3, 9], np.uint32), np.zeros(4, np.uint16)),
            TensorDiff(0, np.array([3]), np.zeros(2, np.uint16)),
            TensorDiff(0, np.array([3]), np.zeros(1, np.uint8)),
            TensorDiff(0, np.array([], np.int64), np.zeros(0, np.uint16)),
            TensorDiff(0, None, np.zeros(9, np.uint16)),
        ],
    )
    def test_what_does_not_fit_is_refused(self, copier, change):
        tensors = [torch.ones(10).bfloat16(), torch.ones(3).bfloat16()]
        layout = layout_of(tensors, ["bfloat16"] * 2)
        right = TensorDiff(1, np.array([0]), np.zeros(1, np.uint16))
        whole = TensorDiff(1, None, np.zeros(3, np.uint16))
        with pytest.raises(InvalidWeightsError):
            encode(layout, [right, change], copier)
        for twice in ([right, right], [whole, right], [whole, whole]):
            with pytest.raises(InvalidWeightsError):
                encode(layout, twice, copier)
        encode(layout, [right], copier)

    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize("dtype", [np.int64, np.uint32])
    @pytest.mark.parametrize(
        "positions",
        [[*range(100, 150), *range(110, 160)], [*range(50), *range(100, 149), 5]],
        ids=["from chunk to chunk", "in the last chunk"],
    )
    def test_positions_that_do_not_ascend_are_refused(self, copier, positions, dtype):
        layout = layout_of([torch.ones(1000).bfloat16()], ["bfloat16"])
        change = TensorDiff(0, np.array(positions, dtype), np.zeros(100, np.uint16))
        with pytest.raises(InvalidWeightsError):
            encode(layout, [change], copier)


class TestApply:
    def test_what_it_cannot_read_or_fit_is_raised(self, copier):
        step = random_step(3, ["bfloat16"], [100], [0.1], copier)
        other = Guarded(layout_of([torch.zeros(50)], ["float32"]), [torch.zeros(50)])
        with pytest.raises(StoreCorruptError):
            apply_delta(step.header, step.encoded.chunks.__getitem__, other, copier)

        def fail(number):
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            apply_delta(step.header, fail, step.contents(), copier)

    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize("absolute", [False, True])
    @pytest.mark.parametrize("seed", range(20))
    def test_to_an_excerpt(self, copier, seed, absolute):
        """As what a rank writes: a part of some tensors, and nothing of the others."""
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 3000, 12).tolist()
        dtypes = rng.choice(["bfloat16", "float32", "uint8", "complex128"], 12).tolist()
        shares = rng.choice([0.0, 0.01, 0.4, 1.0], 12).tolist()
        step = random_step(seed, dtypes, sizes, shares, copier, absolute=absolute)
        starts, tensors = [], []
        for index in sorted(rng.choice(12, 5, replace=False)):
            first, end = sorted(rng.integers(0, sizes[index] + 1, 2))
            starts.append(step.layout.offsets[index] + first * step.before[index].itemsize)
            tensors.append((step.before[index][first:end], step.after[index][first:end]))
        before, after = zip(*tensors, strict=True)
        own = layout_of(before, [str(tensor.dtype).removeprefix("torch.") for tensor in before])
        contents = Guarded(own, before)
        ends = np.array(starts) + own.sizes
        excerpt = Excerpt(np.array(starts), ends, np.array(own.offsets))
        read: list[int] = []

        def read_chunk(number):
            read.append(number)
            return step.encoded.chunks[number]

        apply_delta(step.header, read_chunk, contents, copier, excerpt)
        assert torch.equal(contents.data, Guarded(own, after).data)
        contents.assert_guarded()
        assert len(read) < len(step.encoded.chunks), "some change nothing in it"


class TestSize:
    """Bytes for each changed element, of bf16 weights N(0, 0.02) with Gaussian updates."""

    @pytest.mark.parametrize(
        ("spread", "most"), [(1e-7, 1.46), (7e-7, 1.12), (3e-6, 0.98), (1e-5, 0.84), (4e-5, 0.70)]
    )
    def test_of_updates(self, copier, spread, most):
        rng = np.random.default_rng(0)
        weights = torch.from_numpy(rng.normal(0, 0.02, 4_000_000).astype(np.float32))
        update = torch.from_numpy(rng.normal(0, spread, 4_000_000).astype(np.float32))
        before, after = weights.bfloat16(), (weights + update).bfloat16()
        num_changed = int((before.view(torch.int16) != after.view(torch.int16)).sum())
        step = make_step([before], [after], ["bfloat16"], copier)
        assert step.encoded.num_bytes / num_changed <= 1.15 * most, num_changed / 4e6

    def test_of_small_tensors(self, copier):
        rng = np.random.default_rng(0)
        before = [torch.randn(28_800).mul(0.02).bfloat16() for _ in range(300)]
        after = [tensor.clone() for tensor in before]
        for tensor in after:
            which = torch.from_numpy(rng.random(28_800) < 0.01)
            tensor.view(torch.int16)[which] += 1
        step = make_step(before, after, ["bfloat16"] * 300, copier)
        whole = sum(tensor.nbytes for tensor in before)
        assert step.encoded.num_bytes <= 0.008 * whole
        assert len(step.encoded.header) <= 12 * 300
        assert_right(step, copier)

    def test_of_what_cannot_be_made_smaller(self, copier):
        step = random_step(0, ["float32"], [300_000], [0.0], copier, absolute=True)
        rng = np.random.default_rng(1)
        after = [random_tensor("float32", 300_000, rng)]
        step = make_step(step.before, after, ["float32"], copier, absolute=True)
        assert step.encoded.num_bytes <= 1.001 * after[0].nbytes
        assert_right(step, copier, times=2)


def test_without_zstandard(copier, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(delta_format, "_tools", delta_format._Tools())
    with pytest.raises(DBufferError, match=r"pip install zstandard"):
        random_step(3, ["bfloat16"], [100], [0.1], copier)
