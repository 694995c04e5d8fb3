"""`BoxShare`: the boxes of tensors that one rank of a sharded trainer writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.format.delta import words_per_element
from dbuffer.format.layout import ITEM_BYTES, Layout, TensorSpec
from dbuffer.io.changes import Diff, TensorDiff, cut_work, find_changes, narrowed
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors
from dbuffer.publish import shards
from dbuffer.publish.draft import Draft, Progress
from dbuffer.publish.shard_writer import ShardWriter, join_shares
from dbuffer.publish.shards import Box, WriteAssignment
from dbuffer.publish.shares import ClaimInfo, Share, apply_detached
from dbuffer.ranks.world import Arrays, World
from dbuffer.store.hold import Held
from dbuffer.weights.sources import Source

Positions: TypeAlias = npt.NDArray[np.integer[Any]]

T = TypeVar("T")


class BoxShare(Share):
    """The boxes of tensors that one rank writes: of what it holds, then of what is gathered.

    With deltas, every rank keeps a copy of its boxes as they were published last, finds what
    differs, and tells rank 0, which writes the delta.

    Args:
        footer: as for `Share`.
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
        super().__init__(footer)
        self._written = footer
        self._layout = footer.layout
        self._world = world
        self._writer = writer
        self._copier = copier
        self._assignment = assignment
        self._hashed = hashed
        self._is_kept = is_kept
        specs = footer.layout.specs
        held, gathered = assignment.boxes[world.rank], assignment.gathered
        mine = [index for index, writer_rank in gathered if writer_rank == world.rank]
        self._num_held = len(held)
        self._boxes = [*held, *(shards.whole_box(index, specs[index].shape) for index in mine)]
        self._number = {index: number for number, index in enumerate(mine, len(held))}
        """Number of the box of each tensor that is gathered and written here."""
        self._changes: list[TensorDiff] = []
        """Differences from the copy, each with the number of its box in place of the tensor."""
        self._diff: list[TensorDiff] = []
        """Differences from the copy, each as a change of its whole tensor."""
        self._last_diff: list[TensorDiff] | None = None
        """Differences of the version before, to be written again; None: not known."""
        self._joined_diff: list[TensorDiff] = []
        """Differences of all ranks; on rank 0."""
        self._digests: dict[int, list[int]] = {}
        """Digests of the copy's blocks, by the number of the box."""

    def _allocate(self) -> None:
        """Make room for the copy, in a step: one rank may have none."""
        self._copy = FileTensors.in_memory(_layout_of(self._boxes, self._layout.specs))
        self._held_copy = self._copy_of(0, self._num_held)

    def _copy_of(self, first: int, end: int) -> FileTensors:
        """Return the copy of some of the boxes."""
        layout = self._copy.layout
        start = layout.offsets[first] if first < end else 0
        boxes = _layout_of(self._boxes[first:end], self._layout.specs)
        return FileTensors(self._copy.data[start:], boxes)

    def _held_elements(self, source: Source) -> list[torch.Tensor]:
        return [self._elements_in(box, source) for box in self._boxes[: self._num_held]]

    def _elements_in(self, box: Box, source: Source) -> torch.Tensor:
        name = self._layout.specs[box.tensor].name
        return shards.held_elements(source.tensors[box.tensor], box, name)

    def _each_gathered(self, source: Source, action: Callable[[int, torch.Tensor], T]) -> list[T]:
        """Gather tensors one by one; ``action`` gets the box number and the whole of its own."""
        return shards.each_gathered(
            source.tensors,
            self._assignment,
            self._world.rank,
            lambda index, whole: action(self._number[index], whole),
        )

    def read_back(self, held: Held) -> None:
        self._allocate()
        self._writer.read_back(held, self._written, self._boxes, self._copy, self._copier)

    def checksums(self) -> list[int] | None:
        found = self._writer.checksums_read(self._world, self._layout, self._hash_copy)
        self._writer.drop()
        return found

    def find(self, source: Source) -> int:
        self._changes = []
        counts = self._world.each("find what changed in what it holds", lambda: self._find(source))
        if self._assignment.gathered:
            what = "gather and find what changed"
            counts += self._world.each(what, lambda: self._find_gathered(source))
        return sum(counts)

    def _find(self, source: Source) -> int:
        elements = self._held_elements(source)
        found = find_changes(self._held_copy, elements, self._copier, hashed=False)
        self._changes += found.changes
        return found.num_changed

    def _find_gathered(self, source: Source) -> int:
        return sum(self._each_gathered(source, self._find_one))

    def _find_one(self, number: int, whole: torch.Tensor) -> int:
        copy = self._copy_of(number, number + 1)
        found = find_changes(copy, [whole], self._copier, hashed=False)
        for change in found.changes:
            # What was gathered is dropped.
            values = change.values.copy() if change.positions is None else change.values
            self._changes.append(replace(change, tensor=number, values=values))
        return found.num_changed

    def write_all(
        self,
        source: Source,
        info: ClaimInfo,
        draft: Draft | None,  # noqa: ARG002
        progress: Progress | None,  # noqa: ARG002
    ) -> list[int] | None:
        world, has_gathered = self._world, bool(self._assignment.gathered)
        if self._is_kept:
            world.each("copy what it holds", lambda: self._copy_held(source))
            if has_gathered:
                world.each("gather and copy", lambda: self._copy_gathered(source))
            world.each("write what it holds", lambda: self._write_copy(info))
        else:
            world.each("write what it holds", lambda: self._write_held(info, source))
            if has_gathered:
                world.each("gather and write", lambda: self._write_gathered(source))
        return self._writer.finish(world, hashed=self._hashed)

    def _copy_held(self, source: Source) -> None:
        self._allocate()
        self._copier.write(self._held_copy, self._held_elements(source))

    def _copy_gathered(self, source: Source) -> None:
        def copy(number: int, whole: torch.Tensor) -> None:
            self._copier.write(self._copy_of(number, number + 1), [whole])

        self._each_gathered(source, copy)

    def _write_copy(self, info: ClaimInfo) -> None:
        self._writer.begin(info, self._written)
        self._write_boxes(self._boxes, self._copy.views.__getitem__)

    def _write_held(self, info: ClaimInfo, source: Source) -> None:
        self._writer.begin(info, self._written)
        boxes = self._boxes[: self._num_held]
        self._write_boxes(boxes, lambda number: self._elements_in(boxes[number], source))

    def _write_boxes(
        self, boxes: Sequence[Box], elements_in: Callable[[int], torch.Tensor]
    ) -> None:
        def work(first: int, end: int) -> None:
            for number in range(first, end):
                self._writer.write(boxes[number], elements_in(number))

        specs = self._layout.specs
        sizes = [math.prod(box.shape) * ITEM_BYTES[specs[box.tensor].dtype] for box in boxes]
        self._copier.in_parallel(work, cut_work(sizes, self._copier))

    def _write_gathered(self, source: Source) -> None:
        def write(number: int, whole: torch.Tensor) -> None:
            self._writer.write(self._boxes[number], whole)

        self._each_gathered(source, write)

    def write_diff(self, info: ClaimInfo, draft: Draft | None) -> list[int] | None:  # noqa: ARG002
        world = self._world
        by_rank = world.collect("tell what changed", self._update_copy)
        self._joined_diff = _joined(change for arrays in by_rank for change in _changes_in(arrays))
        if info.identity is not None:
            world.each("write what it holds", lambda: self._write_changes(info))
            return self._writer.finish(world, hashed=self._hashed)
        if not self._hashed:
            return None
        return join_shares(self._layout, world.each("hash what changed", self._hash_copy))

    def _update_copy(self) -> Arrays:
        """Bring the copy up to date, and return the arrays of what changed, out of it."""
        self._changes = apply_detached(self._changes, self._copy, self._copier)
        for change in self._changes:
            self._digests.pop(change.tensor, None)
        self._diff = list(map(self._in_whole, self._changes))
        return list(_flat(self._diff))

    def _in_whole(self, change: TensorDiff) -> TensorDiff:
        """Return a change of a box as one of its tensor."""
        box = self._boxes[change.tensor]
        spec = self._layout.specs[box.tensor]
        if box.shape != spec.shape:
            positions = change.positions
            if positions is None:
                positions = np.arange(len(change.values))
            return replace(change, tensor=box.tensor, positions=_in_whole(positions, box, spec))
        # A whole tensor is told without what it replaces, in half the bytes.
        replaced = None if change.positions is None else change.replaced
        return replace(change, tensor=box.tensor, replaced=replaced)

    def _write_changes(self, info: ClaimInfo) -> None:
        if self._last_diff is None or not info.is_patched:
            self._write_copy(info)
        else:
            self._writer.begin(info, self._written)
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
        copy = self._copy
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


def _layout_of(boxes: Iterable[Box], specs: Sequence[TensorSpec]) -> Layout:
    """Return a layout of boxes as tensors of their own."""
    return Layout.of(specs[box.tensor]._replace(shape=box.shape) for box in boxes)


def _in_whole(positions: Positions, box: Box, spec: TensorSpec) -> Positions:
    """Return where words at these positions in a box are in the tensor: in the same order."""
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
