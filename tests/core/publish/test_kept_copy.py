"""The copy of the last version that a rank keeps: what changes in it, and its checksums."""

from __future__ import annotations

import pytest
import torch

from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.io.changes import Changes, find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.delta import apply_delta, encode_delta
from dbuffer.io.tensors import DTYPE_NAMES, FileTensors, join_blocks
from dbuffer.publish import kept_copy
from dbuffer.publish.assignment import Assignment, Box
from dbuffer.publish.kept_copy import KeptCopy
from dbuffer.publish.part import Part
from tests.support.deltas import BASE, ID, Step
from tests.support.patterns import odd_tensors

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(scope="module")
def copier():
    copier = Copier(2)
    yield copier
    copier.close()


@pytest.fixture(params=[1000, 10_000, kept_copy._BATCH_BYTES])
def batches(request, monkeypatch):
    monkeypatch.setattr(kept_copy, "_BATCH_BYTES", request.param)
    monkeypatch.setattr(kept_copy, "MAX_CHANGED_SHARE", 9.0)


def update(copy: KeptCopy, tensors: list[torch.Tensor]) -> Changes:
    copy.take_changes()
    copy.write(range(len(tensors)), tensors)
    return copy.take_changes()


def contents_of(layout: Layout, tensors: list[torch.Tensor], copier: Copier) -> FileTensors:
    contents = FileTensors(torch.zeros(layout.checksums_offset, dtype=torch.uint8), layout)
    copier.write(contents, tensors)
    return contents


@pytest.mark.usefixtures("batches")
def test_odd_tensors_are_cast_as_a_publish_would_and_found_where_they_changed(copier):
    tensors = odd_tensors(1000)
    layout = Layout.of(
        TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape))
        for name, (tensor, dtype) in tensors.items()
    )
    after = [tensor for tensor, _ in tensors.values()]
    before = [torch.zeros_like(tensor) for tensor in after]
    expected = contents_of(layout, after, copier)
    copy = KeptCopy(Part(layout), copier)
    copy.write(range(len(before)), before)
    assert all(not view.any() for view in copy.contents.views if view.numel())
    changes = update(copy, after)
    wanted = find_changes(contents_of(layout, before, copier).data, expected.data, layout, copier)
    assert changes.num_bytes
    assert changes.tensors == wanted.tensors
    for view, right in zip(copy.contents.views, expected.views, strict=True):
        assert torch.equal(view.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


@pytest.mark.usefixtures("batches")
def test_what_did_not_change_is_not_hashed_again(copier, monkeypatch):
    specs = [TensorSpec(f"{index}", "bfloat16", (700,)) for index in range(9)]
    layout = Layout.of([*specs, TensorSpec("empty", "bfloat16", (0,))])
    weights = [torch.randn(700).bfloat16() for _ in specs]
    weights.append(torch.empty(0).bfloat16())
    copy = KeptCopy(Part(layout), copier)
    copy.write(range(10), weights)
    hashed: list[int] = []
    hash_block = FileTensors.hash_block
    monkeypatch.setattr(
        FileTensors,
        "hash_block",
        lambda contents, block: (hashed.append(block.tensor), hash_block(contents, block))[1],
    )
    for changed in ([*range(9)], [2, 7], []):
        for index in changed:
            weights[index][5] += 1
        update(copy, weights)
        hashed.clear()
        digests = copy.digests()
        assert sorted(hashed) == changed
        blocks = [block for block in layout.blocks if block.num_bytes]
        expected = copier.checksums(contents_of(layout, weights, copier), range(9))
        assert join_blocks(blocks, digests) == expected


@pytest.mark.usefixtures("batches")
def test_rows_of_tensors_are_changes_of_the_whole_tensors(copier):
    """Two ranks together find the same changes as a sender alone."""
    layout = Layout.of(
        [TensorSpec(f"{index}", "float32" if index % 3 else "int8", (31, 7)) for index in range(9)]
    )
    before = [torch.randint(-9, 9, (31, 7)).to(torch.int8) for _ in range(9)]
    after = [tensor.clone() for tensor in before]
    for index, tensor in enumerate(after):
        tensor[index::4, 3] += 1
    rows = [slice(0, 16), slice(16, 31)]
    boxes = [
        tuple(Box(index, (part.start, 0), (part.stop - part.start, 7)) for index in range(9))
        for part in rows
    ]
    assignment, found = Assignment(layout.specs, {}, tuple(boxes)), []
    for rank, part in enumerate(rows):
        copy = KeptCopy(Part(layout, assignment, rank), copier)
        copy.write(range(9), [tensor[part] for tensor in before])
        found.append(update(copy, [tensor[part] for tensor in after]))
    sides = [contents_of(layout, side, copier) for side in (before, after)]
    layout_xxh3 = layout.xxh3
    encoded, *chunks = encode_delta(
        Changes.joined(found), None, base=BASE, version=ID, layout_xxh3=layout_xxh3
    )
    step = Step(layout, layout_xxh3, before, after, encoded, chunks)
    apply_delta(step.header, chunks.__getitem__, sides[0].data, copier)
    assert torch.equal(sides[0].data, sides[1].data)


@pytest.mark.usefixtures("batches")
def test_too_many_changes_are_kept_and_not_encoded(copier, monkeypatch):
    monkeypatch.setattr(kept_copy, "MAX_CHANGED_SHARE", 0.1)
    layout = Layout.of([TensorSpec(f"{index}", "int8", (3000,)) for index in range(20)])
    copy = KeptCopy(Part(layout), copier)
    copy.write(range(20), [torch.zeros(3000, dtype=torch.int8)] * 20)
    copy.digests()
    changes = update(copy, [torch.ones(3000, dtype=torch.int8)] * 20)
    assert changes.num_bytes > 6000
    assert all((view == 1).all() for view in copy.contents.views)
    assert join_blocks(layout.blocks, copy.digests()) == copier.checksums(copy.contents)
