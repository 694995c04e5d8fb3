"""`BoxCopy`: one rank's boxes of tensors as they were published last, and what changed in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dbuffer.format.delta import words_per_element
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.io.changes import Positions, TensorDiff, cut_work, narrowed
from dbuffer.io.copier import Copier
from dbuffer.io.find_changes import find_changes
from dbuffer.io.tensors import FileTensors
from dbuffer.publish.shards import Box
from dbuffer.publish.shares import apply_detached
from dbuffer.runtime.lazy import cached_property


class BoxCopy:
    """Copy of boxes of tensors, each of which is a tensor of its own in the copy's layout.

    A box has a number: its place among the boxes, and its tensor's index in the copy's layout.

    Args:
        boxes: the boxes.
        layout: layout of the tensors that they are boxes of.
        copier: its threads do the work.
    """

    def __init__(self, boxes: Sequence[Box], layout: Layout, copier: Copier) -> None:
        self._boxes = boxes
        self._specs = layout.specs
        self._copier = copier
        self._runs: dict[range, FileTensors] = {}
        self._changes: list[TensorDiff] = []
        """Changes that the copy lacks, each with the number of its box as its tensor."""
        self._digests: dict[int, list[int]] = {}
        """Digests of the blocks of each box that did not change since it was hashed, by number."""

    @cached_property
    def contents(self) -> FileTensors:
        """Memory of the copy, allocated at its first use.

        The first use is in a step of all ranks, which fails on all of them if one has no memory.
        """
        return FileTensors.in_memory(self._layout_of(self._boxes))

    def fill(self, numbers: range, elements: list[torch.Tensor]) -> None:
        """Copy the elements of some boxes, which follow each other."""
        self._copier.write(self._run_of(numbers), elements)

    def find_changes(self, numbers: range, elements: list[torch.Tensor], *, are_kept: bool) -> int:
        """Find what differs from the copy in some boxes, which follow each other.

        Args:
            numbers: numbers of the boxes.
            elements: elements in each of them.
            are_kept: whether the elements stay in memory until `apply_changes`.

        Returns:
            The number of changed words.
        """
        diff = find_changes(self._run_of(numbers), elements, self._copier)
        for change in diff.changes:
            is_lent = change.positions is None and not are_kept  # `values` are the elements
            values = change.values.copy() if is_lent else change.values
            number = numbers.start + change.tensor
            self._changes.append(change._replace(tensor=number, values=values))
        return diff.num_changed

    def apply_changes(self) -> list[TensorDiff]:
        """Bring the copy up to date; return what changed, as changes of the whole tensors."""
        changes = apply_detached(self._changes, self.contents, self._copier)
        self._changes = []
        for change in changes:
            self._digests.pop(change.tensor, None)
        return [self._in_whole_tensor(change) for change in changes]

    def digests(self) -> list[int]:
        """Return the digests of the blocks of all boxes, in the order of the whole tensors.

        A box is hashed if it changed since the last time.
        """
        contents = self.contents
        missing = [block for block in contents.layout.blocks if block.tensor not in self._digests]
        digests = [0] * len(missing)

        def work(first: int, end: int) -> None:
            digests[first:end] = map(contents.hash_block, missing[first:end])

        sizes = [block.num_bytes for block in missing]
        self._copier.in_parallel(work, cut_work(sizes, self._copier))
        for block, digest in zip(missing, digests, strict=True):
            self._digests.setdefault(block.tensor, []).append(digest)
        in_order = sorted(self._digests, key=lambda number: self._boxes[number].tensor)
        return [digest for number in in_order for digest in self._digests[number]]

    def _run_of(self, numbers: range) -> FileTensors:
        """Return the copy of some of the boxes, which follow each other."""
        if numbers not in self._runs:
            start = self.contents.layout.offsets[numbers.start] if numbers else 0
            layout = self._layout_of(self._boxes[numbers.start : numbers.stop])
            self._runs[numbers] = FileTensors(self.contents.data[start:], layout)
        return self._runs[numbers]

    def _layout_of(self, boxes: Sequence[Box]) -> Layout:
        return Layout.of(self._specs[box.tensor]._replace(shape=box.shape) for box in boxes)

    def _in_whole_tensor(self, change: TensorDiff) -> TensorDiff:
        """Return a change of a box as one of the tensor that the box is a part of."""
        box = self._boxes[change.tensor]
        spec = self._specs[box.tensor]
        positions, replaced = change.positions, change.replaced
        if box.shape != spec.shape:
            if positions is None:
                positions = np.arange(len(change.values))
            positions = _positions_in_whole(positions, box, spec)
        elif positions is None:
            replaced = None  # half the bytes for the way to rank 0
        return change._replace(tensor=box.tensor, positions=positions, replaced=replaced)


def _positions_in_whole(positions: Positions, box: Box, spec: TensorSpec) -> Positions:
    """Return the positions in the whole tensor of words at these positions in a box of it."""
    words = words_per_element(spec)
    elements, word = np.divmod(positions.astype(np.int64), words)
    index_in_box = np.unravel_index(elements, box.shape)
    index = tuple(at + start for at, start in zip(index_in_box, box.start, strict=True))
    return narrowed(np.ravel_multi_index(index, spec.shape) * words + word, spec.num_bytes)
