"""`Part`: the rectangular parts ("boxes") of tensors that one rank writes into each version."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from dbuffer.format.layout import Layout
from dbuffer.publish.assignment import Assignment, file_offset, whole_box
from dbuffer.weights.lazy_tensor import LazyTensor
from dbuffer.weights.sources import Source, fetch


class Part:
    """Parts ("boxes") of tensors that one rank writes of each version, numbered in tensor order.

    A sender without other ranks has no assignment: each tensor is one box.
    """

    def __init__(self, layout: Layout, assignment: Assignment | None = None, rank: int = 0) -> None:
        self.whole = layout
        self.rank = rank
        self.has_all = assignment is None
        self.layout = layout
        """Layout of this rank's file or copy. Each part ("box") of a tensor is one tensor there."""
        self.file_starts: Sequence[int] = layout.offsets
        """Offset of each part ("box") of a tensor in the data of all ranks. Valid only if each box
        is contiguous in its tensor."""
        self.gathered: tuple[tuple[int, int], ...] = ()
        specs = layout.specs
        if assignment is None:
            self.boxes = [whole_box(index, spec.shape) for index, spec in enumerate(specs)]
            return
        self.boxes, self.gathered = assignment.boxes_of(rank), assignment.gathered
        self.layout = Layout.of(specs[box.tensor]._replace(shape=box.shape) for box in self.boxes)
        self.file_starts = [
            layout.offsets[box.tensor] + file_offset(box, specs[box.tensor]) for box in self.boxes
        ]

    def local_boxes(self, source: Source) -> Iterator[tuple[Sequence[int], list[torch.Tensor]]]:
        """Yield the numbers of tensors' parts ("boxes") that this rank holds, with their elements.

        All boxes in memory come first, together. After them comes the box of each lazy tensor.
        """
        if self.has_all and not source.is_lazy:  # was checked before the version was begun
            yield range(len(source.specs)), source.eager
            return
        from dbuffer.publish.shards import HeldParts  # for lazy and sharded tensors alone

        parts, specs = HeldParts(), self.layout.specs
        numbers, elements = list[int](), list[torch.Tensor]()
        lazy: list[tuple[int, LazyTensor]] = []
        to_gather = {index for index, _ in self.gathered}
        for number, box in enumerate(self.boxes):
            tensor = source.tensors[box.tensor]
            if box.tensor in to_gather:
                continue
            if isinstance(tensor, LazyTensor) and (self.has_all or tensor.sharded is None):
                lazy.append((number, tensor))
            else:
                numbers.append(number)
                elements.append(parts.elements(tensor, specs[number].name))
        if numbers or not lazy:  # also if this rank writes nothing, so that it maps the file
            source.refuse_values([specs[number] for number in numbers], elements)
            yield numbers, elements
        for number, tensor in lazy:
            fetched = fetch(tensor)
            source.refuse_values([specs[number]], [fetched])
            yield [number], [fetched]

    def gather(self, source: Source) -> Iterator[tuple[int, torch.Tensor]]:
        """Gather tensors one by one; yield number and elements of each part that this rank writes.

        Every rank must consume the iterator to its end, since the other ranks wait in the next
        gather.
        """
        from dbuffer.publish.shards import gathered, sharded_in, viewed

        tensors = source.tensors
        number_of = {box.tensor: number for number, box in enumerate(self.boxes)}

        def whole_of(pair: tuple[int, int]) -> int:
            tensor = tensors[pair[0]]
            sharded = sharded_in(tensor)
            return id(tensor if sharded is None else sharded)

        try:
            # If several views of a tensor are published, it is gathered once.
            for _, pairs in itertools.groupby(self.gathered, whole_of):
                views = list(pairs)
                tensor = tensors[views[0][0]]
                written = [index for index, writer in views if writer == self.rank]
                if sharded_in(tensor) is None and not written:
                    continue  # other ranks hold it, or each rank holds all of it
                with gathered(tensor) as whole_tensor:
                    for index in written:
                        yield number_of[index], viewed(tensors[index], whole_tensor)
                del whole_tensor  # so that its memory is free before the next gather
        except Exception:
            source.finish()
            raise
        source.finish()
