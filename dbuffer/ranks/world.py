"""`World`: the ranks that publish together take each step together; a sender alone is one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=bool | int | float | str | list[Any] | dict[str, Any] | None)
"""Values that JSON has: a tuple would come back as a list."""

V = TypeVar("V")
"""Values that can be encoded."""


class World:
    """Ranks that take steps together. Here one rank: a step is a call, and its error is raised."""

    rank: int = 0
    """Index of this process among the ranks."""
    size: int = 1
    """Number of ranks."""

    def __init__(self) -> None:
        self._is_open = True

    def each(self, what: str, action: Callable[[], T]) -> list[T]:  # noqa: ARG002
        """Let every rank do ``action``, and return its results by rank.

        Args:
            what: the step, as in "rank 1 could not {what}"; the same on all ranks.
            action: no collective may fail in it on some ranks and be waited for by others.
        """
        return [action()]

    def first(self, what: str, action: Callable[[], T]) -> T:
        """Let rank 0 do ``action`` while the others wait, and return its result on all of them."""
        values = self.each(what, action if self.rank == 0 else lambda: None)
        return values[0]  # type: ignore[return-value]  # rank 0's

    def collect(
        self,
        what: str,  # noqa: ARG002
        action: Callable[[], V],
        encode: Callable[[V], bytes],  # noqa: ARG002
        decode: Callable[[memoryview], V],  # noqa: ARG002
    ) -> list[V]:
        """Bring the result of ``action`` on all ranks to rank 0: by rank there, [] elsewhere.

        Args:
            what: the step, as for `each`.
            action: work of each rank.
            encode: encodes a result as bytes, one at least, for another process.
            decode: decodes them there.
        """
        return [action()]

    @property
    def is_open(self) -> bool:
        """Whether steps can be taken."""
        return self._is_open

    def close(self) -> None:
        """Take no more steps."""
        self._is_open = False
