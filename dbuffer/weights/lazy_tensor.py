"""`LazyTensor`: tensor that is made when it is published. `HeldRows`: a rank's rows of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class View:
    """Place of a tensor in a larger tensor: a box, with its dimensions reordered or left out."""

    index: tuple[int | slice, ...]
    """Index of the box: a slice per dimension, or a number if the dimension is left out."""
    order: tuple[int, ...]
    """Dimensions of the box, in the view's order."""
    shape: tuple[int, ...]
    """Shape of the view, which can have additional dimensions of size 1."""
    is_whole: bool = False
    """Whether the view is the complete larger tensor, unchanged."""

    @classmethod
    def find(cls, part: torch.Tensor, source: torch.Tensor) -> Self | None:
        """Return the place of the view ``part`` in the contiguous tensor ``source``.

        Return None if ``part`` is not a box of ``source``, for instance if dimensions were joined.
        """
        shape, offset = tuple(part.shape), int(part.storage_offset())
        if shape == source.shape and part.stride() == source.stride():
            slices = tuple(slice(0, extent) for extent in shape)
            return cls(slices, tuple(range(len(shape))), shape, is_whole=True)
        index: list[int | slice] = []
        dimension_at = {}
        for dimension, (stride, size) in enumerate(zip(source.stride(), source.shape, strict=True)):
            start, offset = divmod(offset, stride) if size > 1 else (0, offset)
            index.append(start)
            if size > 1:
                dimension_at[stride] = dimension
        dimensions = []
        for stride, size in zip(part.stride(), shape, strict=True):
            if size == 1:
                continue
            dimension = dimension_at.pop(stride, -1)
            first = index[dimension]
            if dimension < 0 or isinstance(first, slice) or first + size > source.shape[dimension]:
                return None
            index[dimension] = slice(first, first + size)
            dimensions.append(dimension)
        ascending = sorted(dimensions)
        return cls(tuple(index), tuple(map(ascending.index, dimensions)), shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this view of a tensor, without a copy."""
        part = tensor[self.index]
        if self.order != tuple(range(part.ndim)):
            part = part.permute(self.order)
        return part if part.shape == self.shape else part.view(self.shape)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is made when it is published, and dropped after that.

    The mapping or list of pairs that you publish can contain lazy tensors, so that not all weights
    are in memory at the same time.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    """Returns the tensor, with exactly this dtype and shape. Called once per publish, possibly in
    another thread."""
    identity: int = 0
    """A negative number that all names of a tied tensor share, or 0 if ties are unknown."""
    sharded: Any = None
    """The sharded tensor that `fetch` gathers, or this rank's rows of it (`HeldRows`). None if the
    tensor is not sharded."""
    view: View | None = None
    """Place of the tensor in ``sharded``, or None if it is all of ``sharded``."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of a tensor that this rank holds, if a DTensor cannot describe the ranks' parts."""

    local: torch.Tensor
    first: int
    """Index in the tensor of this rank's first row."""
    ranks: tuple[int, ...]
    """Ranks of the job that together hold all rows of the tensor."""

    def to_local(self) -> torch.Tensor:
        return self.local


Tensors: TypeAlias = Mapping[str, torch.Tensor | LazyTensor]
