"""`World`: the ranks that publish together take each step together; a sender alone is one rank."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self


class Step(AbstractContextManager["Step"]):
    """A step of all ranks, in a ``with`` block that each of them enters; see `World.step`."""

    def __init__(self, world: World, action: str) -> None:
        self._world = world
        self.action = action
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
    timeout_s: float = math.inf
    """Time that ranks wait for a missing rank."""

    def __init__(self) -> None:
        self._is_open = True

    def step(self, action: str) -> Step:
        """Return a step that all ranks take: if it fails on one of them, all of them raise.

        No collective may fail in it on some ranks and be waited for by others.

        ``action`` is the same on all ranks, and completes "rank 1 could not …".
        """
        return Step(self, action)

    def begin_step(self) -> None: ...

    def end_step(self, step: Step, error: BaseException | None) -> None:
        """Exchange the outcomes of a step, which ended with ``error`` on this rank, or with None.

        One rank alone has its result, or its error is raised.
        """
        if error is None:
            step.results = [step.result]

    def losing_interrupted(self) -> AbstractContextManager[None]:
        """Lose this rank if a collective call is interrupted in a ``with`` block before a step.

        It would make the next call together with ranks that still make this one.
        """
        return contextlib.nullcontext()

    def share(self, action: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        with self.step(action) as step:
            step.result = value
        return step.results

    @property
    def is_open(self) -> bool:
        return self._is_open

    def close(self) -> None:
        self._is_open = False
