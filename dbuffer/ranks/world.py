"""`World`: the ranks that publish together, as one that takes steps; and `Solo`, a world of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy.typing as npt

Arrays: TypeAlias = list[npt.NDArray[Any] | None]
"""Flat arrays of numbers, or None in the place of one."""

T = TypeVar("T", bound=bool | int | float | str | list[Any] | dict[str, Any] | None)
"""Values that JSON has: a tuple would come back as a list."""


class World(ABC):
    """Ranks that take each step together, or learn together that one of them failed."""

    rank: int
    """This process's place among them."""
    size: int

    @abstractmethod
    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Let every rank do ``action``, and return its results by rank.

        Args:
            what: the step, as in "rank 1 could not {what}"; the same on all ranks.
            action: no collective may fail in it on some ranks and be waited for by others.
        """

    def first(self, what: str, action: Callable[[], T]) -> T:
        """Let rank 0 do ``action`` while the others wait, and return its result on all of them."""
        values = self.each(what, action if self.rank == 0 else lambda: None)
        return values[0]  # type: ignore[return-value]  # that of rank 0

    @abstractmethod
    def collect(self, what: str, action: Callable[[], Arrays]) -> list[Arrays]:
        """Bring the result of ``action`` on all ranks to rank 0: by rank there, [] elsewhere."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether steps can be taken."""

    @abstractmethod
    def close(self) -> None:
        """Take no more steps."""


class Solo(World):
    """A world of one rank: steps are calls, and errors its own."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._is_open = True

    def each(self, what: str, action: Callable[[], T]) -> list[T]:  # noqa: ARG002
        return [action()]

    def collect(self, what: str, action: Callable[[], Arrays]) -> list[Arrays]:  # noqa: ARG002
        return [action()]

    @property
    def is_open(self) -> bool:
        return self._is_open

    def close(self) -> None:
        self._is_open = False
