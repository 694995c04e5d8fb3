"""`LazyTensor`: a tensor made when it is published; `HeldRows`: the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dbuffer.weights.conversion import View


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
