"""`BoxShare`: the share of one rank of a sharded trainer, which writes boxes of tensors.

A box is a region of a tensor (`shards.Box`). The assignment gives each rank two kinds of boxes to
write: *local* ones, whose elements it holds, and whole tensors, which all ranks must gather first.
The boxes of a rank are numbered, the local ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dbuffer.format.layout import ITEM_BYTES
from dbuffer.io.changes import Changes
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.publish import shards
from dbuffer.publish.delta_chain import max_changed
from dbuffer.publish.draft import ClaimInfo
from dbuffer.publish.kept_copy import ElementsIn, KeptCopy
from dbuffer.publish.shard_writer import ShardWriter, SharedFileWriter
from dbuffer.publish.shards import WriteAssignment
from dbuffer.publish.shares import PublishRequest, Share
from dbuffer.ranks.world import World
from dbuffer.weights.sources import Source

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
        world: World,
        writer: ShardWriter,
        copier: Copier,
        assignment: WriteAssignment,
        *,
        hashed: bool,
        is_kept: bool,
    ) -> None:
        self._layout = footer.layout
        self._writer = writer
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
        is_copied = is_kept and not isinstance(writer, SharedFileWriter)
        copy = KeptCopy(self._boxes, footer.layout, copier) if is_copied else None
        super().__init__(footer, world, copier, copy)

    def update(self, request: PublishRequest, *, is_compared: bool) -> Changes | None:
        copy, most = self.copy, max_changed(self._layout)
        found: list[Changes] = []

        def compare(numbers: range, elements_in: ElementsIn) -> None:
            found.append(copy.update(numbers, elements_in, most))

        if not is_compared:
            self._each_box("copy", request.source, copy.fill)
            return None
        self._each_box("compare", request.source, compare)
        return self._of_all_ranks(lambda: Changes.joined(found))

    def write(self, request: PublishRequest, info: ClaimInfo) -> list[int] | None:
        def write(numbers: range, elements_in: ElementsIn) -> None:
            if numbers.stop <= self._num_local:
                self._writer.begin(info, self.footer)
            self._write_boxes(numbers, elements_in)

        if self._copy is None:
            self._each_box("write", request.source, write)
        elif info.inode is not None:
            self._world.each("write what it holds", lambda: self._write_copy(info))
        else:
            return self._checksums_of_copy() if self._hashed else None
        if self._is_kept and isinstance(self._writer, SharedFileWriter):
            self._keep_file(self._writer.mapped)
        return self._writer.finish(self._world, hashed=self._hashed)

    def _each_box(
        self, what: str, source: Source, action: Callable[[range, ElementsIn], None]
    ) -> None:
        """Do ``action`` with the boxes of all ranks.

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
            source.refuse_values([spec], [elements])
            return elements

        def act_on_whole(index: int, whole: torch.Tensor) -> None:
            number = self._number_of[index]
            source.refuse_values([self._layout.specs[index]], [whole])
            action(range(number, number + 1), lambda _: whole)

        world = self._world
        world.each(
            f"{what} what it holds", lambda: action(range(self._num_local), elements_of_local)
        )
        if self._assignment.gathered:
            world.each(
                f"gather and {what}",
                lambda: shards.each_gathered(source, self._assignment, world.rank, act_on_whole),
            )

    def _write_copy(self, info: ClaimInfo) -> None:
        """Write all boxes into the claimed file, from the copy."""
        self._writer.begin(info, self.footer)
        self._write_boxes(range(len(self._boxes)), self.copy.contents.views.__getitem__)

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
