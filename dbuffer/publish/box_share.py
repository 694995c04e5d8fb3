"""`BoxShare`: the boxes of tensors that one rank of a sharded trainer writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.format.delta import words_per_element
from dbuffer.format.layout import ITEM_BYTES, Layout, TensorSpec
from dbuffer.io.changes import Diff, Positions, TensorDiff, cut_work, find_changes, narrowed
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors
from dbuffer.publish import shards
from dbuffer.publish.draft import Progress
from dbuffer.publish.shard_writer import ShardWriter, join_digests_of_parts
from dbuffer.publish.shards import Box, WriteAssignment
from dbuffer.publish.shares import ClaimInfo, Share, apply_detached
from dbuffer.ranks.agreement import Agreement, Arrays
from dbuffer.store.hold import Held
from dbuffer.weights.sources import Source

GetElements: TypeAlias = Callable[[int], torch.Tensor]
"""Function that returns the elements in the box of this number."""


_WRITTEN_BYTES = 256 << 20
"""Boxes of about so many bytes are written at a time."""


class BoxShare(Share):
    """The boxes of tensors that one rank writes: its local ones, then those that are gathered.

    With deltas, every rank keeps a copy of its boxes as they were published last, finds the
    differences, and sends them to rank 0, which writes the delta.

    Args:
        footer: footer of the versions.
        world: the ranks.
        writer: this rank's.
        copier: its threads do the work.
        assignment: the boxes of all ranks.
        hashed: whether versions have checksums.
        is_kept: whether the next version is compared with this one.
    """

    def __init__(
        self,
        footer: Footer,
        world: Agreement,
        writer: ShardWriter,
        copier: Copier,
        assignment: WriteAssignment,
        *,
        hashed: bool,
        is_kept: bool,
    ) -> None:
        super().__init__(footer)
        self._layout = footer.layout
        self._world = world
        self._writer = writer
        self._copier = copier
        self._assignment = assignment
        self._hashed = hashed
        self._is_kept = is_kept
        specs = footer.layout.specs
        local, gathered = assignment.boxes[world.rank], assignment.gathered
        mine = [index for index, writer_rank in gathered if writer_rank == world.rank]
        self._num_local = len(local)
        self._boxes = [*local, *(shards.whole_box(index, specs[index].shape) for index in mine)]
        self._number = {index: number for number, index in enumerate(mine, len(local))}
        """Number of the box of each tensor that is gathered and written here."""
        self._changes: list[TensorDiff] = []
        """Differences from the copy, each with the number of its box in place of the tensor."""
        self._diff: list[TensorDiff] = []
        """Differences from the copy, each as a change of its whole tensor."""
        self._last_diff: list[TensorDiff] | None = None
        """Last version's ``_diff``, to be written again into the other buffer; None: not known."""
        self._joined_diff: list[TensorDiff] = []
        """Differences of all ranks; on rank 0."""
        self._digests: dict[int, list[int]] = {}
        """Digests of the copy's blocks, by the number of the box."""
        self._parts: dict[range, FileTensors] = {}

    @functools.cached_property
    def _contents(self) -> FileTensors:
        """Copy of this rank's boxes in the last version, each as a tensor.

        It is allocated in a step: a rank may have no memory for it.
        """
        return FileTensors.in_memory(_layout_of(self._boxes, self._layout.specs))

    def _contents_of(self, numbers: range) -> FileTensors:
        """Return the copy of some of the boxes, which follow each other."""
        if numbers not in self._parts:
            start = self._contents.layout.offsets[numbers.start] if numbers else 0
            layout = _layout_of(self._boxes[numbers.start : numbers.stop], self._layout.specs)
            self._parts[numbers] = FileTensors(self._contents.data[start:], layout)
        return self._parts[numbers]

    def _each_box(
        self, what: str, source: Source, action: Callable[[range, GetElements], int]
    ) -> int:
        """Do ``action`` with this rank's boxes on all ranks; return the sum of its results.

        In one step with all local boxes, in another with each tensor that is gathered: a rank that
        fails or is lost in the first must not let others wait in a gather. ``action`` gets the
        numbers of boxes, and a function that returns the elements in one of them.
        """

        def with_gathered(index: int, whole: torch.Tensor) -> int:
            number = self._number[index]
            return action(range(number, number + 1), lambda _: whole)

        def with_all_gathered() -> int:
            rank, assignment = self._world.rank, self._assignment
            return shards.each_gathered(source, assignment, rank, with_gathered)

        parts = shards.HeldParts()

        def local_elements(number: int) -> torch.Tensor:
            index = self._boxes[number].tensor
            return parts.elements(source.tensors[index], self._layout.specs[index].name)

        local = range(self._num_local)
        results = self._world.each(f"{what} what it holds", lambda: action(local, local_elements))
        if self._assignment.gathered:
            results += self._world.each(f"gather and {what}", with_all_gathered)
        return sum(results)

    def read_back(self, held: Held) -> None:
        self._writer.read_back(held, self.footer, self._boxes, self._contents, self._copier)

    def checksums(self) -> list[int] | None:
        checksums = self._writer.checksums_read(self._world, self._layout, self._hash_copy)
        self._writer.drop()
        return checksums

    def compare(self, source: Source) -> int:
        self._changes = []

        def compare(numbers: range, elements_in: GetElements) -> int:
            elements = list(map(elements_in, numbers))
            diff = find_changes(self._contents_of(numbers), elements, self._copier, hashed=False)
            changes = diff.changes
            if numbers.stop > self._num_local:  # numbered anew, and out of what will be dropped
                changes = [_moved(change, numbers.start) for change in changes]
            self._changes += changes
            return diff.num_changed

        return self._each_box("compare", source, compare)

    def write_all(
        self,
        source: Source,
        info: ClaimInfo,
        progress: Progress | None,  # noqa: ARG002
    ) -> list[int] | None:
        def copy(numbers: range, elements_in: GetElements) -> int:
            self._copier.write(self._contents_of(numbers), list(map(elements_in, numbers)))
            return 0

        def write(numbers: range, elements_in: GetElements) -> int:
            if numbers.stop <= self._num_local:
                self._writer.begin(info, self.footer)
            self._write_boxes(numbers, elements_in)
            return 0

        if self._is_kept:
            self._each_box("copy", source, copy)
            self._world.each("write what it holds", lambda: self._write_copy(info))
        else:
            self._each_box("write", source, write)
        return self._writer.finish(self._world, hashed=self._hashed)

    def _write_copy(self, info: ClaimInfo) -> None:
        self._writer.begin(info, self.footer)
        self._write_boxes(range(len(self._boxes)), self._contents.views.__getitem__)

    def _write_boxes(self, numbers: range, elements_in: GetElements) -> None:
        """Write boxes, a few at a time: elements may be made only when they are read."""
        some: list[int] = []
        num_bytes = 0
        for number in numbers:
            some.append(number)
            box = self._boxes[number]
            num_bytes += math.prod(box.shape) * ITEM_BYTES[self._layout.specs[box.tensor].dtype]
            if num_bytes >= _WRITTEN_BYTES or number == numbers[-1]:
                boxes = [self._boxes[each] for each in some]
                self._writer.write(boxes, list(map(elements_in, some)), self._copier)
                some, num_bytes = [], 0

    def write_diff(self, info: ClaimInfo) -> list[int] | None:
        world = self._world
        by_rank = world.collect("send what changed", self._update_copy)
        self._joined_diff = _joined(change for arrays in by_rank for change in _changes_in(arrays))
        if info.inode is not None:
            world.each("write what it holds", lambda: self._write_changes(info))
            return self._writer.finish(world, hashed=self._hashed)
        if not self._hashed:
            return None
        return join_digests_of_parts(self._layout, world.each("hash what changed", self._hash_copy))

    def _update_copy(self) -> Arrays:
        """Bring the copy up to date, and return the arrays of what changed, out of it."""
        self._changes = apply_detached(self._changes, self._contents, self._copier)
        for change in self._changes:
            self._digests.pop(change.tensor, None)
        self._diff = list(map(self._as_tensor_diff, self._changes))
        return list(_flat(self._diff))

    def _as_tensor_diff(self, change: TensorDiff) -> TensorDiff:
        """Return a change of a box as one of its tensor."""
        box = self._boxes[change.tensor]
        spec = self._layout.specs[box.tensor]
        if box.shape != spec.shape:
            positions = change.positions
            if positions is None:
                positions = np.arange(len(change.values))
            return change._replace(tensor=box.tensor, positions=_in_tensor(positions, box, spec))
        # A whole tensor is sent to rank 0 without its old words, in half the bytes.
        replaced = None if change.positions is None else change.replaced
        return change._replace(tensor=box.tensor, replaced=replaced)

    def _write_changes(self, info: ClaimInfo) -> None:
        if self._last_diff is None or not info.is_patched:
            self._write_copy(info)
        else:
            self._writer.begin(info, self.footer)
            for changes in (self._last_diff, self._diff):
                self._writer.patch(changes, self._copier)
        self._last_diff = self._diff

    def take_diff(self, checksums: list[int] | None) -> Diff:
        changes, self._joined_diff = self._joined_diff, []
        changed = None
        if checksums is not None:
            changed = {change.tensor: checksums[change.tensor] for change in changes}
        num_changed = sum(len(change.values) for change in changes)
        return Diff(self._layout, changes, changed, num_changed)

    def _hash_copy(self) -> list[int]:
        """Return the digests of the copy's blocks, in the layout's order.

        A box is hashed if it changed since the last time.
        """
        copy = self._contents
        missing = [block for block in copy.layout.blocks if block.tensor not in self._digests]
        digests = [0] * len(missing)

        def work(first: int, end: int) -> None:
            digests[first:end] = map(copy.hash_block, missing[first:end])

        self._copier.in_parallel(
            work, cut_work([block.num_bytes for block in missing], self._copier)
        )
        for block, digest in zip(missing, digests, strict=True):
            self._digests.setdefault(block.tensor, []).append(digest)
        in_order = sorted(self._digests, key=lambda number: self._boxes[number].tensor)
        return [digest for number in in_order for digest in self._digests[number]]


def _moved(change: TensorDiff, first: int) -> TensorDiff:
    """Return a change with the number of its box, and in memory of its own."""
    values = change.values.copy() if change.positions is None else change.values
    return change._replace(tensor=first + change.tensor, values=values)


def _layout_of(boxes: Iterable[Box], specs: Sequence[TensorSpec]) -> Layout:
    """Return a layout of boxes as tensors of their own."""
    return Layout.of(specs[box.tensor]._replace(shape=box.shape) for box in boxes)


def _in_tensor(positions: Positions, box: Box, spec: TensorSpec) -> Positions:
    """Return the positions in a tensor of words at positions in a box, in the same order."""
    words = words_per_element(spec)
    elements, rest = np.divmod(positions.astype(np.int64), words)
    inside = np.unravel_index(elements, box.shape)
    index = tuple(one + start for one, start in zip(inside, box.start, strict=True))
    return narrowed(np.ravel_multi_index(index, spec.shape) * words + rest, spec.num_bytes)


def _flat(changes: Iterable[TensorDiff]) -> Iterator[npt.NDArray[Any] | None]:
    """Yield the arrays of changes, four for each; `_changes_in` puts them together."""
    for change in changes:
        yield from (np.array([change.tensor]), change.positions, change.values, change.replaced)


def _changes_in(arrays: Arrays) -> list[TensorDiff]:
    """Return the changes whose arrays `_flat` has given."""
    rows = zip(*(arrays[first::4] for first in range(4)), strict=True)
    return [
        TensorDiff(int(tensor[0]), positions, values, replaced)
        for tensor, positions, values, replaced in rows
    ]


def _joined(changes: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Join the changes of all ranks: one a tensor."""
    by_tensor: dict[int, list[TensorDiff]] = {}
    for change in changes:
        by_tensor.setdefault(change.tensor, []).append(change)
    return [_joined_one(parts) for _, parts in sorted(by_tensor.items())]


def _joined_one(parts: list[TensorDiff]) -> TensorDiff:
    if len(parts) == 1:
        return parts[0]
    positions, values, replaced = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("positions", "values", "replaced")
    )
    order = np.argsort(positions, kind="stable")
    return TensorDiff(parts[0].tensor, positions[order], values[order], replaced[order])
