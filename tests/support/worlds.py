"""Process groups for tests: ranks of a real job, gloo between them, that do what they are told."""

from __future__ import annotations

import contextlib
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import distributed

from dbuffer.testing.timings import timings
from tests.support.children import Child
from tests.support.ports import free_port

OUTCOME_TIMEOUT_S = 120.0


class Failure(NamedTuple):
    """What a rank raised."""

    kind: str
    message: str
    traceback: str


class Coordinator:
    """What is used of vLLM's groups of ranks."""

    def __init__(self) -> None:
        self.rank_in_group = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        self.cpu_group = distributed.group.WORLD


class World:
    """So many processes in one process group, killed at the end of the block.

    They meet in a file; with ``tcp``, in a store that the first one has, as an engine's ranks do.
    ``how``: options of :class:`Child`.
    """

    def __init__(self, directory: Path, size: int, *, tcp: bool = False, **how: Any) -> None:
        self._stack = contextlib.ExitStack()
        self._waits: set[int] = set()
        place = f"file://{directory / uuid.uuid4().hex}"
        rendezvous = f"tcp://127.0.0.1:{free_port()}" if tcp else place
        self.ranks = [
            self._stack.enter_context(Child(_serve, rank, size, rendezvous, **how))
            for rank in range(size)
        ]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Let every rank begin ``function(rank, *args)``."""
        assert not self._waits, "an earlier test left ranks in the middle of something"
        self._waits = set(range(len(self.ranks)))
        for child in self.ranks:
            child.send((function, args))

    def outcome(self, rank: int) -> Any:
        """What it returned on a rank, or the :class:`Failure` with which it ended."""
        outcome = self.ranks[rank].receive(OUTCOME_TIMEOUT_S)
        self._waits.discard(rank)
        return outcome

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same for all ranks."""
        self.begin(function, *args)
        return [self.outcome(rank) for rank in range(len(self.ranks))]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank."""
        outcomes = self.outcomes(function, *args)
        for rank, outcome in enumerate(outcomes):
            assert not isinstance(outcome, Failure), f"rank {rank}: {outcome.traceback}"
        return outcomes


def world_of(size: int, scope: str = "module") -> Any:
    """A fixture: so many ranks for each file, or for each test."""

    @pytest.fixture(scope=scope)
    def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
        with World(tmp_path_factory.mktemp("world"), size) as world:
            yield world

    return world


def _serve(connection: Connection, rank: int, size: int, rendezvous: str) -> None:
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    while True:
        function, args = connection.recv()
        try:
            with timings():  # whichever it replaces are restored
                result = function(rank, *args)
        except Exception as error:
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        connection.send(result)
