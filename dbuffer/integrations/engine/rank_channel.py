"""`RankChannel`: the ranks of one engine, telling each other how it went.

They have connections of their own for that, with a time-out of their own: in those of the engine a
rank that is stopped, and not dead, would hang all others for half an hour, and nobody would know
which one it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import queue
import threading
import time
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from dbuffer.errors import RankFailedError
from dbuffer.ranks.agreement import connect
from dbuffer.store.liveness import Process

AnswerT = TypeVar("AnswerT")

_LOST = "was lost"

_DYING_S = 0.5
_STATE_CHECK_S = 0.01

RANK_TIMEOUT_S = 600.0
"""How long ranks wait for one that does not come. A load of a large model must fit; the end of a
rank is noticed at once."""

_FRAME_BYTES = 1024
"""What is no longer goes in one message, what is longer in two."""

_LENGTH_BYTES = 8

_LEAVE = b""
"""Message of a rank that closes its connections; no other is empty."""


class RankChannel:
    """All ranks of an engine. A gather is a step that all of them take, or none can go on.

    ``group`` is a ``GroupCoordinator`` of vLLM's, or of SGLang's, which was vLLM's once.
    """

    def __init__(self, group: Any, *, timeout_s: float = RANK_TIMEOUT_S) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.process_group: Any = group.cpu_group
        """The same as a group of torch.distributed, for what lies in main memory."""
        self.timeout_s = timeout_s

    def gather(self, answer: AnswerT, *, begins: bool = False) -> list[AnswerT]:
        """Return all ranks' answers, by rank, on every rank.

        An answer is a JSON value; a tuple is a list on arrival.

        One that ``begins`` is the first of several that belong together. A rank that comes late to
        one of them, after others have given it up, fails in it, and is in step again with the next
        that begins.

        Raises:
            RankFailedError: a rank did not come within ``timeout_s``, or was lost; the message says
                which.
        """
        if self.size == 1:
            return [answer]
        return _Connections.of(self).exchange(answer, self.timeout_s, begins=begins)


class _Message(NamedTuple):
    """What a rank says in one gather."""

    step: tuple[int, int]
    """Which: those that begin something are counted, and those since the last of them."""
    answer: Any

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        step, answer = json.loads(data)
        return cls(tuple(step), answer)


class _Connections:
    """The connections of this process to the other ranks, for as long as their process group."""

    def __init__(self, ranks: RankChannel) -> None:
        self._rank = ranks.rank
        self._group = connect(
            ranks.process_group, ranks.rank, ranks.size, ranks.timeout_s, purpose="engine"
        )
        self._step = (0, 0)
        self._processes: list[Process] = []
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        self._told = [_Sender(self._group, rank) for rank in others]
        self._heard = {rank: _Listener(self._group, rank) for rank in others}
        here = dataclasses.astuple(Process.here())
        processes = self.exchange(here, ranks.timeout_s, begins=False)
        self._processes = [Process(*fields) for fields in processes]

    @classmethod
    def of(cls, ranks: RankChannel) -> _Connections:
        """That of these ranks, which is made by all of them together."""
        store = _get_default_store()
        key = (store, *distributed.get_process_group_ranks(ranks.process_group))
        if key not in _connections:
            # Where torch.distributed was begun anew, all ranks make new connections.
            for old in [old for old in _connections if old[0] is not store]:
                _connections.pop(old).close()
            _connections[key] = cls(ranks)
        return _connections[key]

    def close(self) -> None:
        """Take leave of the other ranks: what listens to this one there ends, as it does here."""
        for told in self._told:
            told.put(_LEAVE)

    def exchange(self, answer: Any, timeout_s: float, *, begins: bool) -> list[Any]:
        first, second = self._step
        self._step = (first + 1, 0) if begins else (first, second + 1)
        data = _Message(self._step, answer).encode()
        taken = [told.put(data) for told in self._told]
        deadline = time.monotonic() + timeout_s
        answers, lost = {self._rank: _Message.decode(data).answer}, {}
        for rank, heard in self._heard.items():
            try:
                answers[rank] = heard.answer(self._step, deadline)
            except TimeoutError:
                lost[rank] = f"did not answer within {timeout_s:g} s"
            except ConnectionError:
                lost[rank] = _LOST
            except LookupError:
                lost[rank] = "has given this step up, and is at another"
        if lost:
            raise RankFailedError("; ".join(map(self._describe, lost, lost.values())))
        # Whatever becomes of this rank next, the others have its answer.
        for is_taken in taken:
            is_taken.wait(max(0.0, deadline - time.monotonic()))
        return [answers[rank] for rank in sorted(answers)]

    def _describe(self, rank: int, problem: str) -> str:
        if not self._processes:
            return f"rank {rank} {problem}"
        process = self._processes[rank]
        state = process.state
        if problem == _LOST:
            # The kernel closes a dead process's connections before it counts as dead.
            deadline = time.monotonic() + _DYING_S
            while not state and time.monotonic() < deadline:
                time.sleep(_STATE_CHECK_S)
                state = process.state
        why = f": it {state}" if state else ""
        return f"rank {rank} (process {process.pid} on {process.host}) {problem}{why}"


class _Sender:
    """What one rank is told, by a thread that waits until it takes that.

    A wait that is given up breaks all connections, and a rank that is stopped takes nothing before
    it goes on.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._messages: queue.SimpleQueue[tuple[bytes, threading.Event]] = queue.SimpleQueue()
        tell = functools.partial(self._tell, group, rank)
        threading.Thread(target=tell, name=f"dbuffer-to-rank-{rank}", daemon=True).start()

    def put(self, data: bytes) -> threading.Event:
        """Tell it; what is set when it has taken that, or is lost."""
        is_taken = threading.Event()
        self._messages.put((data, is_taken))
        return is_taken

    def _tell(self, group: Any, rank: int) -> None:
        while True:
            data, is_taken = self._messages.get()
            framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
            # That a connection is lost, who listens to that rank learns.
            with contextlib.suppress(RuntimeError):
                for part in (framed[:_FRAME_BYTES].ljust(_FRAME_BYTES), framed[_FRAME_BYTES:]):
                    if part:
                        tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                        group.send([tensor], rank, 0).wait(_FOR_EVER)
            is_taken.set()
            if data == _LEAVE:
                return


class _Listener:
    """What one rank has said. A thread listens, so that waiting for it breaks no connection."""

    def __init__(self, group: Any, rank: int) -> None:
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._next: _Message | None = None
        name = f"dbuffer-rank-{rank}"
        listen = functools.partial(self._listen, group, rank)
        threading.Thread(target=listen, name=name, daemon=True).start()

    def answer(self, step: tuple[int, int], deadline: float) -> Any:
        """What it says in a step; what it said in those before is passed over.

        Raises:
            TimeoutError: it says nothing.
            ConnectionError: it is gone.
            LookupError: it has gone on to another step.
        """
        while self._next is None or self._next.step < step:
            try:
                self._next = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if self._next is None:
                self._messages.put(None)
                raise ConnectionError
        if self._next.step > step:
            raise LookupError
        return self._next.answer

    def _listen(self, group: Any, rank: int) -> None:
        try:
            while (data := _receive_message(group, rank)) != _LEAVE:
                self._messages.put(_Message.decode(data))
        except RuntimeError:
            pass  # the connection is lost
        self._messages.put(None)


def _receive_message(group: Any, rank: int) -> bytes:
    head = _receive(group, rank, _FRAME_BYTES)
    num_bytes = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
    more = _receive(group, rank, num_bytes - _FRAME_BYTES)
    return (head + more)[_LENGTH_BYTES:num_bytes]


def _receive(group: Any, rank: int, num_bytes: int) -> bytes:
    if num_bytes <= 0:
        return b""
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    group.recv([tensor], rank, 0).wait(_FOR_EVER)
    return bytes(tensor.numpy())


_FOR_EVER = datetime.timedelta(days=3650)

_connections: dict[tuple[Any, ...], _Connections] = {}
