"""Deltas: what differs is found, and leads from one version to the other."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbuffer.errors import DBufferError
from dbuffer.format import delta as delta_format
from dbuffer.format.layout import BLOCK_BYTES, ITEM_BYTES, Layout, TensorSpec
from dbuffer.io import changes as io_changes
from dbuffer.io.changes import (
    Changes,
    Patch,
    apply_patch,
    encode_found,
    find_changes,
    find_on_device,
)
from dbuffer.io.copier import Copier
from dbuffer.io.delta import apply_delta, changed_elements, encode_delta, merge_elements
from dbuffer.io.tensors import DTYPES
from tests.support import deltas
from tests.support.deltas import (
    BASE,
    ID,
    make_step,
    verify_result,
)
from tests.support.patterns import bits
from tests.support.soak import is_soak

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SHARES = (0.0, 0.0001, 0.01, 0.2, 0.45, 0.9, 1.0)
EXAMPLES = 2_000 if is_soak() else 15
NUMEL = 4_000_000 if is_soak() else 1_000_000


@pytest.fixture(scope="module")
def copier():
    copier = Copier(2)
    yield copier
    copier.close()


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few words."""
    monkeypatch.setattr(io_changes, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(io_changes, "MAX_CHANGED_BYTES", 256)


def positions_of(step, copier):
    parts = changed_elements(step.header, step.chunks.__getitem__, copier)
    return merge_elements(parts, copier)


def assert_right(step, copier):
    """The delta leads to the version after, and its positions and checksums are right."""
    contents, read_chunk = step.contents(), step.chunks.__getitem__
    apply_delta(step.header, read_chunk, contents.data, copier)
    assert torch.equal(contents.data, step.contents(of_after=True).data)
    contents.assert_guarded()
    if step.header.record.checksums is not None:
        verify_result(step.header, contents, copier)
    found = positions_of(step, copier)
    for index, (old, new) in enumerate(zip(step.before, step.after, strict=True)):
        sides = [np.frombuffer(bits(each), f"V{old.itemsize}") for each in (old, new)]
        differing = np.flatnonzero(sides[0] != sides[1])
        assert found.get(index, np.array([])).tolist() == differing.tolist()


def random_step(seed, dtypes, sizes, shares, copier, **options):
    rng = np.random.default_rng(seed)
    return deltas.random_step(rng, dtypes, sizes, shares, copier, **options)


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 2**32),
    tensors=st.lists(
        st.tuples(st.sampled_from(list(ITEM_BYTES)), st.integers(0, 5000), st.sampled_from(SHARES)),
        max_size=12,
    ),
    hashed=st.booleans(),
)
def test_round_trip_of_mixed_tensors_in_small_chunks(copier, small_chunks, seed, tensors, hashed):
    columns = zip(*tensors, strict=True) if tensors else ((), (), ())
    step = random_step(seed, *columns, copier, hashed=hashed)
    assert_right(step, copier)
    assert (step.header.record.checksums is not None) == hashed


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
def test_tensors_of_several_blocks(copier, dtype):
    words = BLOCK_BYTES // DTYPES[dtype].itemsize
    sizes = [2 * words + 17, words, words + 1, 5, words // 4 - 1]
    for shares in ([0.01] * 5, [0.3, 0.9, 0.0, 1.0, 1e-9], [0.6] * 5):
        step = random_step(5, [dtype] * 5, sizes, shares, copier)
        assert_right(step, copier)


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
    [positions] = positions_of(step, copier).values()
    assert positions.tolist() == list(places)
    assert_right(step, copier)


def test_what_lies_between_tensors_is_no_change(copier):
    """Memory there is anything: it is in no tensor."""
    step = random_step(3, ["bfloat16", "float32", "int8"], [1001, 77, 3], [0.1, 0.0, 1.0], copier)
    old, new = step.contents(), step.contents(of_after=True)
    for size, offset in zip(step.layout.sizes, step.layout.offsets, strict=True):
        new.data[offset + size : offset + size + 64 - size % 64] ^= 0xFF
    found = find_changes(old.data, new.data, step.layout, copier)
    assert [body for _, body in found.chunks] == step.chunks
    assert found.tensors == {0, 2}


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 2**32),
    tensors=st.lists(
        st.tuples(st.sampled_from(list(ITEM_BYTES)), st.integers(0, 5000), st.sampled_from(SHARES)),
        min_size=1,
        max_size=12,
    ),
    window=st.sampled_from((1024, 4096, 1 << 26)),
)
def test_a_device_encodes_the_same_bytes(copier, small_chunks, seed, tensors, window):
    """The memory between tensors has no defined content, and may differ: then it only counts."""
    step = random_step(seed, *zip(*tensors, strict=True), copier)
    contents = step.contents(), step.contents(of_after=True)
    old, new = (each.data for each in contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io_changes, "DEVICE_BYTES", window)
        num_bytes = sum(changes.num_bytes for changes in find_on_device(old, new, step.layout))
    for size, offset in zip(step.layout.sizes, step.layout.offsets, strict=True):
        new[offset + size : offset + size + -size % 64] ^= 0xFF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io_changes, "DEVICE_BYTES", window)
        found = find_on_device(old, new, step.layout)
    starts = [offset + (5 << 32) for offset in step.layout.offsets]
    encoded = encode_found(found, step.layout, copier, starts)
    expected = find_changes(old, new, step.layout, copier, file_starts=starts)
    assert encoded == expected
    assert [body for _, body in encoded.chunks] == step.chunks
    assert num_bytes == expected.num_bytes


def test_a_chunk_changes_no_more_than_its_limit(copier, small_chunks):
    step = random_step(3, ["bfloat16"], [5000], [0.2], copier)
    sizes = [chunk.num_changed * chunk.word_bytes for chunk in step.header.chunks]
    assert max(sizes) <= 256 < sum(sizes[:2])
    assert_right(step, copier)
    old, new = step.contents().data, step.contents(of_after=True).data
    found = find_on_device(old, new, step.layout)
    encoded = encode_found(found, step.layout, copier, step.layout.offsets)
    assert [body for _, body in encoded.chunks] == step.chunks


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [1, 3, 100])
def test_ranks_share_the_work(copier, size):
    step = random_step(3, ["bfloat16", "float32"], [9001, 7777], [0.1, 0.2], copier)
    sides = step.contents().data, step.contents(of_after=True).data
    shares = [find_changes(*sides, step.layout, copier, share=(rank, size)) for rank in range(size)]
    assert [body for _, body in Changes.joined(shares).chunks] == step.chunks


def test_boxes_of_a_rank_are_far_apart_in_the_file(copier):
    """In its memory they lie side by side; in the file, 2**32 words and more are between them."""
    file = Layout.of(
        [TensorSpec(str(n), "uint8", (size,)) for n, size in enumerate([9, 5 << 32, 9])]
    )
    starts = file.offsets[0], file.offsets[2]
    boxes = Layout.of([file.specs[0], file.specs[2]])
    before = torch.zeros(boxes.checksums_offset, dtype=torch.uint8)
    after = before.clone()
    after[[3, boxes.offsets[1] + 4]] = 1
    changes = find_changes(before, after, boxes, copier, file_starts=starts)
    encoded, *chunks = encode_delta(
        changes.chunks, None, base=BASE, version=ID, layout_xxh3=file.xxh3
    )
    header = delta_format.decode_header(
        lambda start, size: encoded[start : start + size], file, file.xxh3
    )
    [elements] = changed_elements(header, chunks.__getitem__, copier)
    assert {index: each.tolist() for index, each in elements.items()} == {0: [3], 2: [4]}


def test_comparing_ends_when_too_much_differs(copier):
    layout = Layout.of([TensorSpec("a", "uint8", (20 * BLOCK_BYTES,))])
    before = torch.zeros(layout.checksums_offset, dtype=torch.uint8)
    found = find_changes(before, before + 1, layout, copier, max_bytes=1000)
    assert 1000 < found.num_bytes < 20 * BLOCK_BYTES


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", range(10))
def test_patches_are_what_a_comparison_finds(copier, seed):
    """Patches may name words that do not change."""
    rng = np.random.default_rng(seed)
    step = random_step(seed, ["bfloat16", "int16", "float16"], [5000, 900, 70], [0.1] * 3, copier)
    before, after = step.contents(), step.contents(of_after=True)
    old, new = (np.frombuffer(side.raw, np.uint16) for side in (before, after))
    places = np.arange(len(new))[(new != old) | (rng.random(len(new)) < 0.1)]
    places = places[step.layout.byte_ranges.in_words(2).owners(places) >= 0]
    changes = apply_patch(Patch(places, new[places]), before.data, step.layout, copier)
    assert torch.equal(before.data, after.data)
    assert [body for _, body in changes.chunks] == step.chunks
    assert changes.tensors == {0, 1, 2}


class TestSize:
    """Bytes for each changed element, of bf16 weights N(0, 0.02) with Gaussian updates."""

    @pytest.mark.parametrize(
        ("spread", "most"), [(1e-7, 1.46), (7e-7, 1.12), (3e-6, 0.98), (1e-5, 0.84), (4e-5, 0.70)]
    )
    def test_of_updates(self, copier, spread, most):
        rng = np.random.default_rng(0)
        weights = torch.from_numpy(rng.normal(0, 0.02, NUMEL).astype(np.float32))
        update = torch.from_numpy(rng.normal(0, spread, NUMEL).astype(np.float32))
        before, after = weights.bfloat16(), (weights + update).bfloat16()
        num_changed = int((before.view(torch.int16) != after.view(torch.int16)).sum())
        step = make_step([before], [after], ["bfloat16"], copier)
        assert step.num_bytes / num_changed <= 1.15 * most, num_changed / NUMEL


def test_without_zstandard(copier, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(delta_format, "_of_thread", threading.local())
    with pytest.raises(DBufferError, match=r"pip install zstandard"):
        random_step(3, ["bfloat16"], [100], [0.1], copier)
