"""`RankChannel`: agreement among the ranks of one engine.

Ranks exchange answers through the store of torch.distributed that they once met in. In the engine's
own collectives a rank that is stopped, and not dead, would hang all others for half an hour, and no
error would name it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any, TypeVar

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dbuffer.errors import RankFailedError
from dbuffer.ranks.agreement import store_of_meeting
from dbuffer.runtime.messages import first_line
from dbuffer.runtime.timing import TIMING
from dbuffer.store.liveness import Process

AnswerT = TypeVar("AnswerT")

RANK_TIMEOUT_S = 600.0
"""Longest wait for a rank that does not come. A load of a large model must fit; the end of a rank
on the same host is noticed at once."""

_LOST = "was lost"
_PROCESS = "process {}"
"""Key of a rank's process."""
_GIVEN_UP = "given up {}"
"""Key of the last step that a rank did not wait for any longer."""

_LOOK_MIN_S = 1e-4
"""Shortest pause between two looks for the answers of other ranks."""


class RankChannel:
    """All ranks of an engine, as one of them sees them. All of them take part in each gather.

    They meet in the first one.

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
        self._store: PrefixStore | None = None
        """Store of the ranks' answers, once they have met."""
        self._readable: list[str] = []
        """Keys of this rank's answers that other ranks may not have read yet."""
        self._processes: list[Process] = []

    @classmethod
    def of(cls, group: Any) -> RankChannel:
        """Return the channel of a group: the same one for as long as its process group lives."""
        if group.world_size == 1:
            return cls(group)
        store = _get_default_store()
        key = (store, *distributed.get_process_group_ranks(group.cpu_group))
        if key not in _channels:
            # After torch.distributed was initialized again, all ranks meet again.
            for old in [old for old in _channels if old[0] is not store]:
                del _channels[old]
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
        if self._store is None:
            self._store = self._meet()
        first, second = self._step
        self._step = (first + 1, 0) if begins else (first, second + 1)
        try:
            return self._exchange(self._store, answer)
        except RuntimeError as error:  # torch's, if the process that has the store ended
            why = f"the store of torch.distributed does not answer: {first_line(error)}"
            deadline = time.monotonic() + TIMING.ranks_end_within_s
            while not (ended := self._ended()) and time.monotonic() < deadline:
                time.sleep(TIMING.look_s)
            problems = [self._describe(rank, _LOST) for rank in ended]
            raise RankFailedError("; ".join([*problems, why])) from error

    def _meet(self) -> PrefixStore:
        store = store_of_meeting(
            self.process_group, self.rank, self.size, self.timeout_s, purpose="engine"
        )
        store.set(_PROCESS.format(self.rank), json.dumps(asdict(Process.here())))
        self._step, self._readable, self._processes = (0, 0), [], []
        return store

    def _exchange(self, store: PrefixStore, answer: Any) -> list[Any]:
        keys = [f"{self._step} {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(answer))
        self._readable.append(keys[self.rank])
        started = time.monotonic()
        look_for_lost_s = 0.0
        while not store.check(keys):
            waited_s = time.monotonic() - started
            if waited_s > min(look_for_lost_s, self.timeout_s):
                self._require_coming(store, keys, is_over=waited_s > self.timeout_s)
                look_for_lost_s = waited_s + TIMING.stop_check_s
            time.sleep(min(max(waited_s / 100, _LOOK_MIN_S), TIMING.look_s))
        answers = [json.loads(text) for text in store.multi_get(keys)]
        # All ranks have answered here, and so have read this rank's answers before.
        for key in self._readable[:-1]:
            store.delete_key(key)
        del self._readable[:-1]
        if not self._processes:
            texts = store.multi_get([_PROCESS.format(rank) for rank in range(self.size)])
            self._processes = [Process(**json.loads(text)) for text in texts]
        return answers

    def _require_coming(self, store: PrefixStore, keys: list[str], *, is_over: bool) -> None:
        """Raise :class:`RankFailedError` if a rank that has not answered will not, or is late."""
        ended, lost = self._ended(), {}
        for rank, key in enumerate(keys):
            if store.check([key]):
                continue
            if rank in ended:
                lost[rank] = _LOST
            elif self._has_given_up(store, rank):
                lost[rank] = "has given this step up, and is at another"
            elif is_over:
                lost[rank] = f"did not answer within {self.timeout_s:g} s"
        if lost:
            store.set(_GIVEN_UP.format(self.rank), json.dumps(self._step))
            raise RankFailedError("; ".join(map(self._describe, lost, lost.values())))

    def _has_given_up(self, store: PrefixStore, rank: int) -> bool:
        key = _GIVEN_UP.format(rank)
        return store.check([key]) and json.loads(store.get(key))[0] >= self._step[0]

    def _ended(self) -> list[int]:
        """Return the ranks whose processes are known to have ended."""
        return [rank for rank, process in enumerate(self._processes) if process.has_ended()]

    def _describe(self, rank: int, problem: str) -> str:
        if not self._processes:
            return f"rank {rank} {problem}"
        process = self._processes[rank]
        state = f": it {process.state}" if process.state else ""
        return f"rank {rank} (process {process.pid} on {process.host}) {problem}{state}"


_channels: dict[tuple[Any, ...], RankChannel] = {}
"""Channels of this process, by torch's store and the global ranks."""
