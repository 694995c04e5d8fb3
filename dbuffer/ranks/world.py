"""`World`: the ranks that publish together take each step together; a sender alone is one rank."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Self


class Step(contextlib.AbstractContextManager["Step"]):
    """A step of all ranks, in a ``with`` block that each of them enters; see `World.step`."""

    def __init__(self, world: World, what: str) -> None:
        self._world = world
        self.what = what
        self.result: Any = None
        """Result of this rank, which the block sets: JSON has a list for a tuple."""
        self.message = b""
        """Bytes for rank 0, which the block may set on other ranks."""
        self.results: list[Any] = []
        """Results of all ranks, by rank, after the block."""
        self.messages: list[memoryview] = []
        """Messages of the other ranks that set one, by rank, on rank 0 after the block."""

    def __enter__(self) -> Self:
        self._world.begin_step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._world.end_step(self, error)


class World:
    """Ranks that take steps together. Here one rank."""

    rank: int = 0
    """Index of this process among the ranks."""
    size: int = 1
    """Number of ranks."""

    def __init__(self) -> None:
        self._is_open = True

    def step(self, what: str) -> Step:
        """Return a step that all ranks take: if it fails on one of them, all of them raise.

        No collective may fail in it on some ranks and be waited for by others.

        Args:
            what: the step, as in "rank 1 could not {what}"; the same on all ranks.
        """
        return Step(self, what)

    def begin_step(self) -> None:
        """Begin a step on this rank."""

    def end_step(self, step: Step, error: BaseException | None) -> None:
        """Exchange the outcomes of a step, which ended with ``error`` on this rank, or with None.

        One rank alone has its result, or its error is raised.
        """
        if error is None:
            step.results = [step.result]

    def share(self, what: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; ``what``: as for `step`."""
        with self.step(what) as step:
            step.result = value
        return step.results

    @property
    def is_open(self) -> bool:
        """Whether steps can be taken."""
        return self._is_open

    def close(self) -> None:
        """Take no more steps."""
        self._is_open = False
