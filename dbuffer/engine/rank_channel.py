"""`RankChannel`: agreement among the ranks of one engine.

It has its own connections, with their own time-out: in the engine's own collectives a rank that is
stopped, and not dead, would hang all others for half an hour, and no error would name it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import queue
import threading
import time
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from dbuffer.errors import RankFailedError
from dbuffer.ranks.agreement import connect
from dbuffer.runtime.timing import TIMING
from dbuffer.store.liveness import Process

AnswerT = TypeVar("AnswerT")

_LOST = "was lost"


RANK_TIMEOUT_S = 600.0
"""Longest wait for a rank that does not come. A load of a large model must fit; the end of a rank
is noticed at once."""

_LENGTH_BYTES = 8
"""Size of a message's length, which is sent before it."""

_LEAVE = b""
"""Message of a rank that closes its connections; no other is empty."""

_FOREVER = datetime.timedelta(days=3650)
_DYING_S = 0.5
"""Time for a rank whose connection broke to end."""


class RankChannel:
    """All ranks of an engine, as one of them sees them. All of them take part in each gather.

    They connect in the first one.

    Args:
        group: a ``GroupCoordinator`` of vLLM or SGLang.
    """

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.process_group: Any = group.cpu_group
        """Group of torch.distributed with these ranks, for tensors in main memory."""
        self.timeout_s = RANK_TIMEOUT_S
        """Longest wait for another rank."""
        self._step = (0, 0)
        """Number of the current gather: gathers that begin something, and those since the last."""
        self._peers: dict[int, _Peer] = {}
        self._processes: list[Process] = []

    @classmethod
    def of(cls, group: Any) -> RankChannel:
        """Return the channel of a group: the same one for as long as its process group lives."""
        if group.world_size == 1:
            return cls(group)
        store = _get_default_store()
        key = (store, *distributed.get_process_group_ranks(group.cpu_group))
        if key not in _channels:
            # After torch.distributed was initialized again, all ranks connect again.
            for old in [old for old in _channels if old[0] is not store]:
                _channels.pop(old).close()
            _channels[key] = cls(group)
        return _channels[key]

    def gather(self, answer: AnswerT, *, begins: bool = False) -> list[AnswerT]:
        """Return all ranks' answers, by rank, on every rank.

        Args:
            answer: a JSON value; a tuple is a list on arrival.
            begins: whether this is the first of several gathers that belong together. A rank that
                comes late to one of them, after others have given it up, fails in it, and is in
                step again with the next that begins.

        Raises:
            RankFailedError: a rank did not come within ``timeout_s``, or was lost; the message says
                which.
        """
        if self.size == 1:
            return [answer]
        if not self._peers:
            self._connect()
        return self._exchange(answer, begins=begins)

    def _connect(self) -> None:
        group = connect(self.process_group, self.rank, self.size, self.timeout_s, purpose="engine")
        self._peers = {rank: _Peer(group, rank) for rank in range(self.size) if rank != self.rank}
        self._step = (0, 0)
        try:
            processes = self._exchange(dataclasses.astuple(Process.here()), begins=False)
        except BaseException:
            self._peers = {}
            raise
        self._processes = [Process(*fields) for fields in processes]

    def close(self) -> None:
        """Leave: the threads for this rank end on the other ranks, as those for them end here."""
        for peer in self._peers.values():
            peer.put(_LEAVE)

    def _exchange(self, answer: Any, *, begins: bool) -> list[Any]:
        first, second = self._step
        self._step = (first + 1, 0) if begins else (first, second + 1)
        data = json.dumps([self._step, answer]).encode()
        sent = [peer.put(data) for peer in self._peers.values()]
        deadline = time.monotonic() + self.timeout_s
        answers, lost = {self.rank: json.loads(data)[1]}, {}
        for rank, peer in self._peers.items():
            try:
                answers[rank] = peer.answer(self._step, deadline)
            except TimeoutError:
                lost[rank] = f"did not answer within {self.timeout_s:g} s"
            except ConnectionError:
                lost[rank] = _LOST
            except LookupError:
                lost[rank] = "has given this step up, and is at another"
        if lost:
            raise RankFailedError("; ".join(map(self._describe, lost, lost.values())))
        # Whatever becomes of this rank next, the others have its answer.
        for is_sent in sent:
            is_sent.wait(max(0.0, deadline - time.monotonic()))
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
                time.sleep(TIMING.look_s)
                state = process.state
        why = f": it {state}" if state else ""
        return f"rank {rank} (process {process.pid} on {process.host}) {problem}{why}"


class _Peer:
    """Messages to and from one other rank, each way in a thread that waits without a time-out.

    A wait that is given up would break all connections; and a rank that is stopped takes nothing
    before it goes on.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._outbox: queue.SimpleQueue[tuple[bytes, threading.Event]] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[tuple[int, ...], Any] | None] = queue.SimpleQueue()
        self._next: tuple[tuple[int, ...], Any] | None = None
        for work, name in ((self._send, "dbuffer-to-rank"), (self._listen, "dbuffer-rank")):
            threading.Thread(
                target=work, args=(group, rank), name=f"{name}-{rank}", daemon=True
            ).start()

    def put(self, data: bytes) -> threading.Event:
        """Send a message; the event is set when the rank has taken it, or is lost."""
        is_sent = threading.Event()
        self._outbox.put((data, is_sent))
        return is_sent

    def answer(self, step: tuple[int, int], deadline: float) -> Any:
        """Return the rank's answer in a step, and skip those in the steps before.

        Raises:
            TimeoutError: the rank does not answer.
            ConnectionError: it is gone.
            LookupError: it has gone on to another step.
        """
        while self._next is None or self._next[0] < step:
            try:
                self._next = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if self._next is None:
                self._inbox.put(None)
                raise ConnectionError
        answered, answer = self._next
        if answered > step:
            raise LookupError
        return answer

    def _send(self, group: Any, rank: int) -> None:
        while True:
            data, is_sent = self._outbox.get()
            with contextlib.suppress(RuntimeError):  # a lost connection is found in _listen()
                for part in (len(data).to_bytes(_LENGTH_BYTES, "little"), data):
                    if part:
                        tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                        group.send([tensor], rank, 0).wait(_FOREVER)
            is_sent.set()
            if data == _LEAVE:
                return

    def _listen(self, group: Any, rank: int) -> None:
        try:
            while (data := _receive_message(group, rank)) != _LEAVE:
                step, answer = json.loads(data)
                self._inbox.put((tuple(step), answer))
        except RuntimeError:
            pass  # the connection is lost
        self._inbox.put(None)


def _receive_message(group: Any, rank: int) -> bytes:
    return _receive(group, rank, int.from_bytes(_receive(group, rank, _LENGTH_BYTES), "little"))


def _receive(group: Any, rank: int, num_bytes: int) -> bytes:
    if not num_bytes:
        return b""
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    group.recv([tensor], rank, 0).wait(_FOREVER)
    return bytes(tensor.numpy())


_channels: dict[tuple[Any, ...], RankChannel] = {}
"""Channels of this process, by torch's store and the global ranks."""
