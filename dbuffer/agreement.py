"""`Agreement`: the ranks of a trainer take each step together, or learn together that one failed.

A rank that raises on its own leaves the others waiting in the next collective. So every step ends
in an exchange that carries its outcome on each rank; where one failed, all of them raise its
error. The exchange has a process group of its own: the trainer's collectives cannot get between,
and dropping it closes its connections, by which the other ranks notice at once.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dbuffer import errors
from dbuffer.errors import ClosedError, DBufferError, OptionError, RankFailedError

_FRAME_BYTES = 1024
"""What is no longer goes in one collective, what is longer in two."""

_LENGTH_BYTES = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """How a step went on one rank."""

    value: T | None
    error: str | None = None
    """The message, where it failed."""
    kind: str = RankFailedError.__name__
    """The error's class, where it is one of ours."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank runs."""

    host: str
    machine: str
    """The same for all containers of one machine, and for no other machine."""
    processes: str
    """Which processes it sees: containers have their own."""
    pid: int

    @classmethod
    def here(cls) -> Peer:
        """This process."""
        host, boot, space = socket.gethostname(), "", ""
        with contextlib.suppress(OSError):  # not Linux
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = str(Path("/proc/self/ns/pid").readlink())
        return cls(host, boot or host, space, os.getpid())

    def has_ended(self) -> bool:
        """Whether it is known to be gone, or to wait for its parent to notice."""
        here = Peer.here()
        if (self.machine, self.processes) != (here.machine, here.processes):
            return False
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"


class Agreement:
    """The ranks of a process group, as one that takes steps.

    Making one is collective, as every step is.

    Args:
        group: a group of torch.distributed; None: all ranks.
        timeout_s: how long the ranks wait for one that does not come.

    Raises:
        OptionError: torch.distributed was not initialised, or this rank is not in the group.
        RankFailedError: a rank did not come.
    """

    def __init__(self, group: distributed.ProcessGroup | None, *, timeout_s: float) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise OptionError(
                "torch.distributed is not initialised in this process: call "
                "torch.distributed.init_process_group() first (torchrun sets what it needs)"
            )
        self.rank = distributed.get_rank(group)
        if self.rank < 0:
            raise OptionError("this process is not in the group: let only its ranks make a sender")
        self.size = distributed.get_world_size(group)
        self.peers: list[Peer] = []
        self._group = _connect(group, self.rank, self.size, timeout_s)
        self.peers = self.each("say where it runs", Peer.here)

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
        """Let rank 0 do ``action`` while the others wait; what it returned, on all of them.

        Raises:
            DBufferError, RankFailedError: as :meth:`each`.
        """
        value: T = self.each(what, action if self.rank == 0 else _nothing)[0]
        return value

    @property
    def is_open(self) -> bool:
        """Whether steps can be taken."""
        return self._group is not None

    def close(self) -> None:
        """Drop the connections; ranks that wait in a step raise."""
        self._group = None

    def _exchange(
        self, what: str, outcome: _Outcome[T], cause: Exception | None
    ) -> list[_Outcome[T]]:
        if not self.is_open:
            raise ClosedError("this sender is closed, or has lost a rank; make a new one")
        try:
            return [pickle.loads(data) for data in self._gather(pickle.dumps(outcome))]  # noqa: S301
        except RuntimeError as error:
            self._lose(what, cause or error)
        except BaseException:
            self.close()  # interrupted, and out of step with the others for good
            raise

    def _gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank."""
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
        ended = [
            f"rank {rank} (process {peer.pid} on {peer.host})"
            for rank, peer in enumerate(self.peers)
            if rank != self.rank and peer.has_ended()
        ]
        who = " and ".join(ended) + " has ended" if ended else "a rank was lost"
        raise RankFailedError(
            f"{who} when the ranks were to {what} ({str(cause).splitlines()[0]:.200}); "
            "make a new sender in a new process group"
        ) from cause


_num_groups: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made of which ranks."""


def _connect(group: distributed.ProcessGroup | None, rank: int, size: int, timeout_s: float) -> Any:
    """A group of our own of the same ranks; its connections close when it is dropped.

    It is one of CPUs, whatever the trainer's is of: what is exchanged lies in main memory.
    `torch.distributed.new_group` would let a second one of the same ranks hang: it looks for the
    addresses of the first, which are still in the store.
    """
    ranks = tuple(distributed.get_process_group_ranks(group))
    _num_groups[ranks] += 1
    name = f"dbuffer/{'-'.join(map(str, ranks))}/{_num_groups[ranks]}"
    store = PrefixStore(name, _get_default_store())
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise RankFailedError(f"the ranks cannot find each other: {error}") from error


def _nothing() -> Any:
    """What the ranks do that only wait."""
