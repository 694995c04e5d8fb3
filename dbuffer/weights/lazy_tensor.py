"""`LazyTensor`: a tensor made when it is published; `HeldRows`: the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class View:
    """Place of a tensor in a larger one: a box of it, with dimensions reordered or left out."""

    index: tuple[int | slice, ...]
    """Index of the box in the whole; of a dimension that is left out, a number."""
    order: tuple[int, ...]
    """Dimensions of the box, in the view's order."""
    shape: tuple[int, ...]
    """Shape of the view, which may have more dimensions of size 1."""
    is_whole: bool = False
    """Whether the view is the whole tensor, unchanged."""

    @classmethod
    def of_all(cls, shape: tuple[int, ...]) -> Self:
        index = tuple(slice(0, extent) for extent in shape)
        return cls(index, tuple(range(len(shape))), shape, is_whole=True)

    @classmethod
    def find(cls, part: torch.Tensor, source: torch.Tensor) -> Self | None:
        """Return the place of ``part``, a view, in its contiguous tensor.

        Return None if it is no box of the tensor, for instance because dimensions were joined.
        """
        shape, offset = tuple(part.shape), int(part.storage_offset())
        if shape == source.shape and part.stride() == source.stride():
            return cls.of_all(shape)
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
        """Return the view of a tensor; nothing is copied."""
        part = tensor[self.index]
        if self.order != tuple(range(part.ndim)):
            part = part.permute(self.order)
        return part if part.shape == self.shape else part.view(self.shape)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is fetched when its turn comes to be published, and dropped after.

    A mapping, or a list of pairs, may hold some: weights that are made as they are written.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    """Makes it, of just this dtype and shape. Called once a publish, maybe in another thread."""
    identity: int = 0
    """A negative number shared by all names of one tensor; 0 if unknown."""
    sharded: Any = None
    """The tensor itself, where each rank of a trainer holds a part of it and `fetch` gathers it, or
    this rank's rows of it."""
    view: View | None = None
    """Place of the tensor in ``sharded``, or None if it is all of ``sharded``."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of a tensor that this rank holds, if no DTensor could describe the ranks' shares."""

    local: torch.Tensor
    first: int
    """Number of the first row in the tensor."""
    ranks: tuple[int, ...]
    """Ranks of the job that hold rows of the tensor; together, all of them."""

    def to_local(self) -> torch.Tensor:
        return self.local


Tensors: TypeAlias = Mapping[str, torch.Tensor | LazyTensor]
