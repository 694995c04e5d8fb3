"""`LazyTensor`, made when it is published, and `HeldRows`, a rank's rows of a sharded tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class View:
    """Place of a view in a larger tensor: a rectangular part ("box") with reordered dimensions."""

    index: tuple[int | slice, ...]
    """Index into the larger tensor: a slice for each dimension that the view keeps, and a number
    for each other dimension."""
    order: tuple[int, ...]
    """Permutation of dimensions that turns the indexed part into the view."""
    shape: tuple[int, ...]
    """Shape of the view. It can have dimensions of size 1 that the larger tensor does not have."""
    is_whole: bool = False
    """Whether the view is the complete larger tensor, with its dimensions in order."""
    stride: tuple[int, ...] = ()
    """Stride of the view in a contiguous larger tensor. Empty if stride and offset are unknown."""
    offset: int = 0
    """Number of elements before the view in a contiguous larger tensor."""

    @classmethod
    def find(cls, part: torch.Tensor, source: torch.Tensor) -> Self | None:
        """Return the place of the view ``part`` in the contiguous tensor ``source``.

        The part can be a rectangular part ("box") of ``source``, also with its dimensions in
        another order. Return None for any other part, for instance after a reshape that has joined
        two dimensions.
        """
        shape, offset = tuple(part.shape), int(part.storage_offset())
        part_stride, part_offset = tuple(part.stride()), offset
        if shape == source.shape and part_stride == source.stride():
            slices = tuple(slice(0, extent) for extent in shape)
            return cls(slices, tuple(range(len(shape))), shape, True, part_stride)
        index: list[int | slice] = []
        dimension_at = {}
        for dimension, (stride, size) in enumerate(zip(source.stride(), source.shape, strict=True)):
            start, offset = divmod(offset, stride) if size > 1 else (0, offset)
            index.append(start)
            if size > 1:
                dimension_at[stride] = dimension
        dimensions = []
        for stride, size in zip(part_stride, shape, strict=True):
            if size == 1:
                continue
            dimension = dimension_at.pop(stride, -1)
            first = index[dimension]
            if dimension < 0 or isinstance(first, slice) or first + size > source.shape[dimension]:
                return None
            index[dimension] = slice(first, first + size)
            dimensions.append(dimension)
        ascending = sorted(dimensions)
        order = tuple(map(ascending.index, dimensions))
        return cls(tuple(index), order, shape, stride=part_stride, offset=part_offset)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that this view describes, without a copy."""
        if self.stride and tensor.is_contiguous():
            # as_strided takes a third of the time of indexing, which matters for 18,000 experts.
            start = tensor.storage_offset() + self.offset
            return tensor.as_strided(self.shape, self.stride, start)
        part = tensor[self.index]
        if self.order != tuple(range(part.ndim)):
            part = part.permute(self.order)
        return part if part.shape == self.shape else part.view(self.shape)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """Tensor that is made when it is published, and dropped after the publish.

    You can publish a mapping or a list of pairs with lazy tensors, so that not all weights are in
    memory at the same time.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    """Function that returns the tensor, with exactly `dtype` and `shape`. It is called once per
    publish, possibly in another thread."""
    identity: int = 0
    """Negative number that the names of a tied tensor share, or 0 if the tensor is not tied."""
    sharded: Any = None
    """Sharded tensor that `fetch` gathers, or this rank's rows of a sharded tensor (`HeldRows`).
    None if the tensor is not sharded."""
    view: View | None = None
    """Place of the lazy tensor in ``sharded``, or None if the lazy tensor is all of ``sharded``."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """This rank's rows of a sharded tensor whose split between ranks no DTensor can represent."""

    local: torch.Tensor
    first: int
    """Index of this rank's first row in the complete tensor."""
    ranks: tuple[int, ...]
    """Ranks of the job that together have all rows of the tensor."""

    def to_local(self) -> torch.Tensor:
        return self.local


Tensors: TypeAlias = Mapping[str, torch.Tensor | LazyTensor]
