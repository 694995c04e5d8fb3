"""`BoxShare`: the share of one rank of a sharded trainer, which writes boxes of tensors.

A box is a region of a tensor (`shards.Box`). The assignment gives each rank two kinds of boxes to
write: *local* ones, whose elements it holds, and whole tensors, which all ranks must gather first.
The boxes of a rank are numbered, the local ones first.

Without deltas, a rank writes the trainer's elements of its boxes into the claimed file, and keeps
nothing. With deltas, it keeps a copy of its boxes, and reads the trainer's memory only once for
each version: `compare` finds what differs from the copy, `write_diff` applies that to the copy and
sends it to rank 0, and the claimed file, if there is one, is written from the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.format.layout import ITEM_BYTES
from dbuffer.io.changes import Diff, TensorDiff
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import refuse_overflow
from dbuffer.publish import shards
from dbuffer.publish.box_copy import BoxCopy
from dbuffer.publish.draft import Progress
from dbuffer.publish.shard_writer import ShardWriter, join_digests_of_parts
from dbuffer.publish.shards import WriteAssignment
from dbuffer.publish.shares import ClaimInfo, Share
from dbuffer.ranks.agreement import Agreement, Arrays
from dbuffer.store.hold import Held
from dbuffer.weights.sources import Source

ElementsIn: TypeAlias = Callable[[int], torch.Tensor]
"""Function that returns the trainer's elements in the box of this number."""

_WRITTEN_BYTES = 256 << 20
"""Boxes of about so many bytes are written at a time."""


class BoxShare(Share):
    """The boxes of tensors that one rank writes.

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
        local, specs = assignment.boxes[world.rank], footer.layout.specs
        to_gather = [index for index, rank in assignment.gathered if rank == world.rank]
        self._num_local = len(local)
        self._boxes = [
            *local,
            *(shards.whole_box(index, specs[index].shape) for index in to_gather),
        ]
        self._number_of = {index: number for number, index in enumerate(to_gather, len(local))}
        """Number of the box of each tensor that is gathered and written here."""
        self._copy = BoxCopy(self._boxes, footer.layout, copier)
        """Boxes as they were in the last version, if they are kept."""
        self._changes: list[TensorDiff] = []
        """Changes of this rank's boxes in the version that is written."""
        self._last_changes: list[TensorDiff] | None = None
        """Changes of the version before, which the other buffer lacks; None: not known."""
        self._all_changes: list[TensorDiff] = []
        """Changes of all ranks' boxes in the version that is written; on rank 0."""

    def read_back(self, held: Held) -> None:
        self._writer.read_back(held, self.footer, self._boxes, self._copy.contents, self._copier)

    def checksums(self) -> list[int] | None:
        checksums = self._writer.checksums_read(self._world, self._layout, self._copy.digests)
        self._writer.drop()
        return checksums

    def compare(self, source: Source) -> int:
        def compare(numbers: range, elements_in: ElementsIn) -> int:
            elements = list(map(elements_in, numbers))
            are_kept = numbers.stop <= self._num_local  # a gathered tensor is dropped
            return self._copy.find_changes(numbers, elements, are_kept=are_kept)

        return self._each_box("compare", source, compare)

    def write_all(
        self,
        source: Source,
        info: ClaimInfo,
        progress: Progress | None,  # noqa: ARG002
    ) -> list[int] | None:
        def copy(numbers: range, elements_in: ElementsIn) -> int:
            self._copy.fill(numbers, list(map(elements_in, numbers)))
            return 0

        def write(numbers: range, elements_in: ElementsIn) -> int:
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

    def write_diff(self, info: ClaimInfo) -> list[int] | None:
        world = self._world
        by_rank = world.collect("send what changed", self._apply_changes)
        self._all_changes = _joined(change for arrays in by_rank for change in _unpacked(arrays))
        if info.inode is not None:
            world.each("write what it holds", lambda: self._write_changes(info))
            return self._writer.finish(world, hashed=self._hashed)
        if not self._hashed:
            return None
        by_rank_digests = world.each("hash what changed", self._copy.digests)
        return join_digests_of_parts(self._layout, by_rank_digests)

    def take_diff(self) -> Diff:
        changes, self._all_changes = self._all_changes, []
        return Diff(self._layout, changes, sum(len(change.values) for change in changes))

    def _each_box(
        self, what: str, source: Source, action: Callable[[range, ElementsIn], int]
    ) -> int:
        """Do ``action`` with the boxes of all ranks; return the sum of its results.

        The local boxes are one step, and the gathered tensors another: a rank that fails with a
        local box must not leave others waiting in a gather.

        Args:
            what: the step, as in "rank 1 could not {what} what it holds".
            source: the trainer's weights.
            action: called with the numbers of all local boxes, then of one gathered tensor after
                another.
        """
        parts = shards.HeldParts()

        def elements_of_local(number: int) -> torch.Tensor:
            index = self._boxes[number].tensor
            spec = self._layout.specs[index]
            elements = parts.elements(source.tensors[index], spec.name)
            refuse_overflow([spec], [elements])
            return elements

        def act_on_local() -> int:
            return action(range(self._num_local), elements_of_local)

        def act_on_whole(index: int, whole: torch.Tensor) -> int:
            number = self._number_of[index]
            refuse_overflow([self._layout.specs[index]], [whole])
            return action(range(number, number + 1), lambda _: whole)

        def act_on_gathered() -> int:
            return shards.each_gathered(source, self._assignment, self._world.rank, act_on_whole)

        results = self._world.each(f"{what} what it holds", act_on_local)
        if self._assignment.gathered:
            results += self._world.each(f"gather and {what}", act_on_gathered)
        return sum(results)

    def _apply_changes(self) -> Arrays:
        """Bring the copy up to date; return what changed, for rank 0."""
        self._changes = self._copy.apply_changes()
        return list(_packed(self._changes))

    def _write_changes(self, info: ClaimInfo) -> None:
        """Bring the claimed file up to date.

        It may hold the version before the last: then it lacks the changes of two versions.
        """
        if self._last_changes is None or not info.is_patched:
            self._write_copy(info)
        else:
            self._writer.begin(info, self.footer)
            for changes in (self._last_changes, self._changes):
                self._writer.patch(changes, self._copier)
        self._last_changes = self._changes

    def _write_copy(self, info: ClaimInfo) -> None:
        """Write all boxes into the claimed file, from the copy."""
        self._writer.begin(info, self.footer)
        self._write_boxes(range(len(self._boxes)), self._copy.contents.views.__getitem__)

    def _write_boxes(self, numbers: range, elements_in: ElementsIn) -> None:
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


def _packed(changes: Iterable[TensorDiff]) -> Iterator[npt.NDArray[Any] | None]:
    """Yield changes as arrays, four each."""
    for change in changes:
        yield from (np.array([change.tensor]), change.positions, change.values, change.replaced)


def _unpacked(arrays: Arrays) -> list[TensorDiff]:
    """Return the changes that were packed into arrays."""
    rows = zip(*(arrays[first::4] for first in range(4)), strict=True)
    return [
        TensorDiff(int(tensor[0]), positions, values, replaced)
        for tensor, positions, values, replaced in rows
    ]


def _joined(changes: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Join the changes of all ranks: one for each tensor, in the order of the tensors."""
    by_tensor: dict[int, list[TensorDiff]] = {}
    for change in changes:
        by_tensor.setdefault(change.tensor, []).append(change)
    return [_joined_one(parts) for _, parts in sorted(by_tensor.items())]


def _joined_one(parts: list[TensorDiff]) -> TensorDiff:
    """Join changes of one tensor."""
    if len(parts) == 1:
        return parts[0]
    positions, values, replaced = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("positions", "values", "replaced")
    )
    order = np.argsort(positions, kind="stable")
    return TensorDiff(parts[0].tensor, positions[order], values[order], replaced[order])
