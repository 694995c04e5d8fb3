"""`KeptCopy`: one rank's part of the last version, in memory, to compare the next version with.

On a local mount the published buffer serves instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from dbuffer.format.layout import ITEM_BYTES, Layout
from dbuffer.io.changes import Changes, Patch, apply_patch, cut_work, find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, new_memory
from dbuffer.publish.shards import Box, flat_index, whole_box
from dbuffer.runtime.lazy import cached_property

ElementsIn: TypeAlias = Callable[[int], torch.Tensor]
"""Function that returns the trainer's elements in the box of this number."""

_BATCH_BYTES = 32 << 20
"""Memory for new elements that are compared; a single box may be larger."""


class KeptCopy:
    """Copy of boxes of tensors. In the copy's layout each box is a tensor.

    A box has a number: its place among the boxes, and its tensor's index in the copy's layout.

    Args:
        boxes: the boxes, or None for all tensors, whole.
        layout: layout of the tensors that they are boxes of.
        copier: its threads do the work.
    """

    def __init__(self, boxes: Sequence[Box] | None, layout: Layout, copier: Copier) -> None:
        specs = layout.specs
        if boxes is None:
            boxes = [whole_box(index, spec.shape) for index, spec in enumerate(specs)]
        self._file_starts = [
            layout.offsets[box.tensor]
            + flat_index(box.start, specs[box.tensor].shape) * ITEM_BYTES[specs[box.tensor].dtype]
            for box in boxes
        ]
        """Place of each box in the weights file, where boxes are rows of tensors."""
        self.boxes = boxes
        self._specs = [specs[box.tensor]._replace(shape=box.shape) for box in boxes]
        self._copier = copier
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._digests: dict[int, list[int]] = {}
        """Digests of the blocks of each box that did not change since it was hashed, by number."""

    @cached_property
    def contents(self) -> FileTensors:
        """Memory of the copy, allocated at its first use.

        The first use is in a step of all ranks, which fails on all of them if one has no memory.
        """
        return FileTensors.in_memory(Layout.of(self._specs))

    def fill(self, numbers: range, elements_in: ElementsIn, *, one_by_one: bool = False) -> None:
        """Copy the elements of some boxes, with the arguments of `update`."""
        for batch in self._batches(numbers):
            self._copy(batch, self._views_of(batch), elements_in, one_by_one=one_by_one)

    def update(
        self,
        numbers: range,
        elements_in: ElementsIn,
        max_changed: float,
        *,
        one_by_one: bool = False,
    ) -> Changes:
        """Copy the elements of some boxes, which follow each other; return what that changed.

        It reads each of the trainer's elements once, so that the delta and the copy agree.

        Args:
            numbers: numbers of the boxes.
            elements_in: returns the elements in each of them, called in their order.
            max_changed: once more words changed, they are not encoded any more.
            one_by_one: whether elements may be gone when the next are asked for.
        """
        contents, parts, num_changed = self.contents, list[Changes](), 0
        for batch in self._batches(numbers):
            layout = Layout.of(self._specs[batch.start : batch.stop])
            new = FileTensors(self._scratch_of(layout.checksums_offset), layout)
            self._copy(batch, new.views, elements_in, one_by_one=one_by_one)
            if num_changed <= max_changed:
                start = contents.layout.offsets[batch.start]
                found = find_changes(
                    contents.data[start : start + len(new.data)],
                    new.data,
                    layout,
                    self._copier,
                    file_starts=self._file_starts[batch.start : batch.stop],
                    max_changed=max_changed - num_changed,
                )
                found = Changes(found.chunks, {batch.start + index for index in found.tensors})
                parts.append(found)
                num_changed += found.num_changed
            self._copier.copy_tensors(self._views_of(batch), new.views)
        changes = Changes.joined(parts)
        self._forget_digests(changes.tensors if num_changed <= max_changed else set(self._digests))
        return changes

    def _copy(
        self, batch: range, views: list[torch.Tensor], elements_in: ElementsIn, *, one_by_one: bool
    ) -> None:
        """Copy the trainer's elements of some boxes, cast where dtypes differ."""
        if one_by_one:
            for view, number in zip(views, batch, strict=True):
                self._copier.copy_tensors([view], [elements_in(number)])
        else:
            self._copier.copy_tensors(views, list(map(elements_in, batch)))

    def _views_of(self, batch: range) -> list[torch.Tensor]:
        return self.contents.views[batch.start : batch.stop]

    def patch(self, patch: Patch) -> Changes:
        """Write a patch of whole tensors; return what that changed."""
        contents = self.contents
        changes = apply_patch(patch, contents.data, contents.layout, self._copier)
        self._forget_digests(changes.tensors)
        return changes

    def _forget_digests(self, numbers: set[int]) -> None:
        for number in numbers:
            self._digests.pop(number, None)

    def digests(self) -> list[int]:
        """Return the digests of the blocks of all boxes, in the order of the whole tensors.

        A box is hashed if it changed since the last time. Empty ones have no digests here.
        """
        contents = self.contents
        missing = [
            block
            for block in contents.layout.blocks
            if block.num_bytes and block.tensor not in self._digests
        ]
        digests = [0] * len(missing)

        def work(first: int, end: int) -> None:
            digests[first:end] = map(contents.hash_block, missing[first:end])

        sizes = [block.num_bytes for block in missing]
        self._copier.in_parallel(work, cut_work(sizes, self._copier))
        for block, digest in zip(missing, digests, strict=True):
            self._digests.setdefault(block.tensor, []).append(digest)
        in_order = sorted(self._digests, key=lambda number: self.boxes[number].tensor)
        return [digest for number in in_order for digest in self._digests[number]]

    def _batches(self, numbers: range) -> Iterator[range]:
        """Cut boxes into batches of bounded size that follow each other in the file."""
        first, num_bytes = numbers.start, 0
        for number in numbers:
            size, starts = self._specs[number].num_bytes, self._file_starts
            is_full = num_bytes + size > _BATCH_BYTES
            if number > first and (is_full or starts[number] < starts[number - 1]):
                yield range(first, number)
                first, num_bytes = number, 0
            num_bytes += size
        if first < numbers.stop:
            yield range(first, numbers.stop)

    def _scratch_of(self, num_bytes: int) -> torch.Tensor:
        if len(self._scratch) < num_bytes:
            self._scratch = new_memory(num_bytes)
        return self._scratch[:num_bytes]
