"""The copy of the last version that a rank keeps: what changes in it, and its checksums."""

from __future__ import annotations

import pytest
import torch

from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.io.changes import Changes
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, join_blocks
from dbuffer.publish import kept_copy
from dbuffer.publish.kept_copy import KeptCopy
from dbuffer.publish.part import Part

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
