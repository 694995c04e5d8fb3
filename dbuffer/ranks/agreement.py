"""`Agreement`: the ranks of a trainer take each step together, or learn together that one failed.

A rank that raises on its own leaves the others waiting in the next collective. So every step ends
in an exchange that carries its outcome on each rank; where one failed, all of them raise its
error. The exchange has a process group of its own: the trainer's collectives cannot get between,
and dropping it closes its connections, by which the other ranks notice at once.
"""

from __future__ import annotations

import datetime
import pickle
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dbuffer import errors
from dbuffer.errors import ClosedError, DBufferError, OptionError, RankFailedError
from dbuffer.ranks.rendezvous import meet
from dbuffer.runtime.translated import TranslatedErrors
from dbuffer.store.liveness import Process

_FRAME_BYTES = 1024
"""A message of at most this size takes one collective, a longer one two."""

_LENGTH_BYTES = 8

_MESSAGE_BYTES = 1 << 30
"""Of what is collected, in one message."""

_ENDS_WITHIN_S = 1.0
_LOOK_S = 0.01

_MAX_TIMEOUT_S = 1e9
"""gloo adds a time-out to its clock, in nanoseconds of 64 bits."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """How a step went on one rank."""

    value: T | None
    error: str | None = None
    """The message, where it failed."""
    kind: str = RankFailedError.__name__
    """The error's class, where it is one of ours."""


class Agreement:
    """The ranks of a process group, as one that takes steps.

    Making one is collective, as every step is.

    Args:
        group: a group of torch.distributed; None: all ranks.
        timeout_s: how long the ranks wait for one that does not come.

    Raises:
        OptionError: torch.distributed was not initialised, or this rank is not in the group.
        RankTimeoutError: (a ``TimeoutError`` and ``RuntimeError``) a rank did not come in time.
        RankFailedError: the ranks cannot connect to each other.
    """

    def __init__(self, group: distributed.ProcessGroup | None, *, timeout_s: float) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise OptionError(
                "torch.distributed is not initialised in this process: call "
                "torch.distributed.init_process_group() first (torchrun sets what it needs)"
            )
        self.rank = distributed.get_rank(group)
        if self.rank < 0:
            raise OptionError("this process is not in the group: make a sender on its ranks only")
        self.size = distributed.get_world_size(group)
        self.peers: list[Process] = []
        self._group = connect(group, self.rank, self.size, timeout_s)
        self.peers = self.each("say where it runs", Process.here)

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Let every rank do ``action``; what it returned on each, by rank.

        Args:
            what: the step, as in "rank 1 could not {what}".
            action: no collective may fail in it on some ranks and be waited for by others.

        Raises:
            DBufferError: the error of the first rank that failed, on all of them.
            RankFailedError: that error was none of ours, or a rank was lost.
        """
        cause: Exception | None = None
        outcome: _Outcome[T]
        try:
            outcome = _Outcome(action())
        except DBufferError as error:
            cause, outcome = error, _Outcome(None, str(error), type(error).__name__)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait
            cause, outcome = error, _Outcome(None, f"{type(error).__name__}: {error}")
        outcomes = self._exchange(what, outcome, cause)
        for rank, one in enumerate(outcomes):
            if one.error is not None:
                kind: type[DBufferError] = getattr(errors, one.kind)
                raise kind(f"rank {rank} could not {what}: {one.error}") from cause
        return [one.value for one in outcomes]  # type: ignore[misc]  # it has one: no error

    def first(self, what: str, action: Callable[[], T]) -> T:
        """Let rank 0 do ``action`` while the others wait; what it returned, on all of them."""
        values = self.each(what, action if self.rank == 0 else lambda: None)
        return values[0]  # type: ignore[return-value]  # that of rank 0

    def collect(self, what: str, action: Callable[[], T]) -> list[T]:
        """As :meth:`each`; what was returned reaches rank 0 alone: for what is large."""
        mine = b""

        def pack() -> int:
            nonlocal mine
            mine = pickle.dumps(action())
            return len(mine)

        sizes = self.each(what, pack)
        told: list[T] = []
        with self._in_step(what):
            if self.rank:
                data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
                for message in torch.split(data, _MESSAGE_BYTES):
                    self._group.send([message], 0, 0).wait()
                return told
            told.append(pickle.loads(mine))  # noqa: S301
            for rank, num_bytes in enumerate(sizes[1:], 1):
                data = torch.empty(num_bytes, dtype=torch.uint8)
                for message in torch.split(data, _MESSAGE_BYTES):
                    self._group.recv([message], rank, 0).wait()
                told.append(pickle.loads(data.numpy().data))  # noqa: S301
        return told

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def close(self) -> None:
        """Drop the connections; ranks that wait in a step raise."""
        self._group = None

    def _exchange(
        self, what: str, outcome: _Outcome[T], cause: Exception | None
    ) -> list[_Outcome[T]]:
        if not self.is_open:
            raise ClosedError("this sender is closed, or has lost a rank; make a new one")
        with self._in_step(what, cause):
            return [pickle.loads(data) for data in self._gather(pickle.dumps(outcome))]  # noqa: S301

    def _in_step(self, what: str, cause: Exception | None = None) -> TranslatedErrors:
        """Talk to the other ranks in a ``with`` block; who is lost in it is named."""

        def translate(error: BaseException) -> None:
            if isinstance(error, RuntimeError):
                self._lose(what, cause or error)
            self.close()  # interrupted, and out of step with the others for good

        return TranslatedErrors(translate)

    def _gather(self, data: bytes) -> list[bytes]:
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        frames = self._gather_frames(framed, _FRAME_BYTES)
        ends = [_LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES], "little") for frame in frames]
        if max(ends) > _FRAME_BYTES:
            frames = self._gather_frames(framed, max(ends))
        return [frame[_LENGTH_BYTES:end] for frame, end in zip(frames, ends, strict=True)]

    def _gather_frames(self, data: bytes, num_bytes: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data[:num_bytes].ljust(num_bytes)), dtype=torch.uint8)
        frames = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(self.size)]
        self._group.allgather([frames], [mine]).wait()
        return [frame.numpy().tobytes() for frame in frames]

    def _lose(self, what: str, cause: Exception) -> NoReturn:
        self.close()
        others = [(rank, peer) for rank, peer in enumerate(self.peers) if rank != self.rank]
        # A process that is killed closes its connections a moment before it counts as ended.
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while not any(peer.has_ended() for _, peer in others) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        ended = [
            f"rank {rank} (process {peer.pid} on {peer.host})"
            for rank, peer in others
            if peer.has_ended()
        ]
        who = " and ".join(ended) + " has ended" if ended else "a rank was lost"
        raise RankFailedError(
            f"{who} while the ranks tried to {what} ({str(cause).splitlines()[0]:.200}); "
            "make a new sender in a new process group"
        ) from cause


_num_groups: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""How many groups this process has made of which ranks, and what for."""


def connect(
    group: distributed.ProcessGroup | None,
    rank: int,
    size: int,
    timeout_s: float,
    *,
    purpose: str = "trainer",
) -> Any:
    """A group of our own of the same ranks; its connections close when it is dropped.

    It is one of CPUs, whatever the trainer's is of: what is exchanged lies in main memory.
    `torch.distributed.new_group` would let a second one of the same ranks hang: it looks for the
    addresses of the first, which are still in the store.

    Raises:
        RankFailedError: a rank did not come in time.
    """
    ranks = tuple(distributed.get_process_group_ranks(group))
    number = _num_groups[purpose, ranks] + 1
    name = f"dbuffer/{purpose}/{'-'.join(map(str, ranks))}/{number}"
    store = PrefixStore(name, _get_default_store())
    timeout_s = min(timeout_s, _MAX_TIMEOUT_S)
    meet(PrefixStore("here", store), rank, size, timeout_s=timeout_s)
    # On all ranks, now that all are there; not where some have not come.
    _num_groups[purpose, ranks] = number
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise RankFailedError(f"the ranks cannot connect to each other: {error}") from error
