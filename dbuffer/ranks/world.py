"""`World`: ranks that take each step of a publish together. A single sender is a world of one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self


class Step(AbstractContextManager["Step"]):
    """Step that all ranks take. Each rank enters it as a ``with`` block; see `World.step`."""

    def __init__(self, world: World, action: str) -> None:
        self._world = world
        self.action = action
        self.result: Any = None
        """Result of this rank, set in the ``with`` block. The result is sent as JSON, so a tuple
        arrives as a list."""
        self.message = b""
        """Bytes to send to rank 0. Any other rank can set them in the ``with`` block."""
        self.results: list[Any] = []
        """Results of all ranks, ordered by rank. Set after the ``with`` block."""
        self.messages: list[memoryview] = []
        """Messages of other ranks to rank 0, ordered by rank. Set on rank 0 after the ``with``
        block."""

    def __enter__(self) -> Self:
        self._world.begin_step()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._world.end_step(self, error)


class World:
    """Ranks that take each step of a publish together: one rank here, several in `Agreement`."""

    rank: int = 0
    size: int = 1
    timeout_s: float = math.inf
    """Longest time that ranks wait for a missing rank."""
    hosts: Sequence[str] = ()
    """Names of the hosts that several ranks run on, in alphabetical order."""

    def __init__(self) -> None:
        self._is_open = True

    def step(self, action: str) -> Step:
        """Return a ``with`` block that all ranks enter. If it fails on one, all raise an error.

        The block must not call a collective that can fail on some ranks while others wait in it.
        ``action`` completes "rank 1 could not …".
        """
        return Step(self, action)

    def begin_step(self) -> None: ...

    def end_step(self, step: Step, error: BaseException | None) -> None:
        """Exchange the ranks' outcomes of a step. ``error`` is this rank's error, or None."""
        if error is None:
            step.results = [step.result]

    def losing_interrupted(self) -> AbstractContextManager[None]:
        """Return a ``with`` block that drops the connections to other ranks if it is interrupted.

        The block also drops the connections if it raises an exception other than a `DBufferError`.
        Otherwise this rank's next call would get the messages of the call that the other ranks have
        not finished.
        """
        return contextlib.nullcontext()

    def share(self, action: str, value: Any) -> list[Any]:
        """Exchange a value of each rank; return all ranks' values, ordered by rank."""
        with self.step(action) as step:
            step.result = value
        return step.results

    @property
    def is_open(self) -> bool:
        return self._is_open

    def close(self) -> None:
        self._is_open = False
