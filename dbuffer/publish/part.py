"""`Part`: the tensors that one process writes of each version, and their elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dbuffer.format.layout import Layout
from dbuffer.weights.lazy_tensor import LazyTensor
from dbuffer.weights.sources import Source, fetch


class Part:
    """Tensors that a sender alone writes of each version of a layout: all of them, whole.

    A rank of a sharded trainer has a `RankPart`, with boxes of tensors.

    Args:
        layout: layout of the versions.
    """

    rank = 0
    """Index of this process among the writing ranks."""
    has_all = True
    """Whether it has all tensors, whole."""
    gathered: tuple[tuple[int, int], ...] = ()
    """Tensors that all ranks gather, each with the rank that writes it."""

    def __init__(self, layout: Layout) -> None:
        self.whole = layout
        """Layout of the versions."""
        self.layout = layout
        """Layout in which each box is a tensor: the layout of a rank's own file, or copy."""
        self.file_starts: Sequence[int] = layout.offsets
        """First byte of each box in the data of all ranks, if boxes are rows of their tensors."""

    def views_in(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the views of some boxes in all of the layout's tensors."""
        return [tensors[number] for number in numbers]

    def held(self, source: Source) -> Iterator[tuple[Sequence[int], list[torch.Tensor]]]:
        """Yield the numbers of boxes that this rank holds, with their elements.

        All boxes in memory come together, then each lazy tensor's box by itself.

        Raises:
            InvalidWeightsError: a tensor is not what was declared, or has values that are refused.
        """
        if not source.is_lazy:  # checked before the version was begun
            yield range(len(source.specs)), source.eager
            return
        numbers, elements = list[int](), list[torch.Tensor]()
        for number, tensor in enumerate(source.tensors):
            if not isinstance(tensor, LazyTensor):
                numbers.append(number)
                elements.append(tensor)
        if numbers:
            source.refuse_values([source.specs[number] for number in numbers], elements)
            yield numbers, elements
        for number, tensor in enumerate(source.tensors):
            if isinstance(tensor, LazyTensor):
                yield [number], [self.fetched(number, tensor, source)]

    def fetched(self, number: int, tensor: LazyTensor, source: Source) -> torch.Tensor:
        """Return the elements of a box that are made now."""
        elements = fetch(tensor)
        source.refuse_values([self.layout.specs[number]], [elements])
        return elements

    def gather(self, source: Source) -> Iterator[tuple[int, torch.Tensor]]:  # noqa: ARG002
        """Yield the gathered tensors that this rank writes, by box: a sender alone gathers none."""
        yield from ()
