"""`RankChannel`: exchange of answers among the ranks of one engine.

The ranks write their answers into the key-value store of torch.distributed. They avoid collectives:
if a rank is stopped, but not dead, a collective hangs on all other ranks for half an hour, and no
error names the stopped rank.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, TypeVar

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dbuffer.errors import RankFailedError
from dbuffer.ranks.agreement import name_of, store_of_meeting, wait_for_lost
from dbuffer.runtime.messages import first_line
from dbuffer.runtime.options import MAX_SECONDS
from dbuffer.runtime.timing import TIMING
from dbuffer.store.liveness import Process

AnswerT = TypeVar("AnswerT")

RANK_TIMEOUT_S = 600.0
"""Longest wait for a rank, enough to load a large model. If a process on the same host ends, its
rank is reported at once."""

_GIVEN_UP = "given up {}"
"""Key in torch's store; the number of a rank replaces the braces. The value is a step: this rank
last stopped waiting for the others there."""

_STORE_S = 1.0
_LOOK_MIN_S = 1e-4


class RankChannel:
    """Connection of one rank to all ranks of its engine. All ranks must take part in each gather.

    ``group`` is a ``GroupCoordinator`` of vLLM or SGLang.
    """

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.process_group: Any = group.cpu_group
        """Group of torch.distributed with the ranks of this channel, for tensors in main memory."""
        self.timeout_s = RANK_TIMEOUT_S
        self._step = (0, 0)
        """Number of the current sequence of gathers, and of the gather in this sequence. Each call
        of :meth:`gather` with ``begins`` begins a sequence."""
        self._store: PrefixStore | None = None
        """Store of the ranks' answers, or None before the first gather."""
        self._readable: list[str] = []
        """Keys of this rank's answers that other ranks may not have read yet."""
        self._processes: list[Process] = []

    @classmethod
    def of(cls, group: Any) -> RankChannel:
        """Return the channel of a group. A group of several ranks has one channel in a process."""
        if group.world_size == 1:
            return cls(group)
        store = _get_default_store()
        key = (store, *distributed.get_process_group_ranks(group.cpu_group))
        if key not in _channels:
            # If torch.distributed was initialized again, its store is new. Drop the channels of the
            # old store.
            for old in [old for old in _channels if old[0] is not store]:
                del _channels[old]
            _channels[key] = cls(group)
        return _channels[key]

    def gather(self, answer: AnswerT, *, begins: bool = False) -> list[AnswerT]:
        """Send this rank's answer to all ranks; return all ranks' answers, ordered by rank.

        Answers are JSON values. ``begins``: whether this is the first of several gathers that
        belong together. Such a gather brings ranks back in step if an earlier gather failed on some
        ranks. Raise :class:`RankFailedError`, which names the rank, if a rank did not answer in
        time, or if its process has ended.
        """
        if self.size == 1:
            return [answer]
        result: queue.SimpleQueue[Any] = queue.SimpleQueue()
        is_given_up = threading.Event()

        def exchange() -> None:
            try:
                result.put(self._exchange(answer, begins, is_given_up))
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                result.put(error)

        # Use a thread: a call to torch's store hangs while the store's process is stopped.
        threading.Thread(target=exchange, name="dbuffer-ranks", daemon=True).start()
        try:
            answers = result.get(timeout=min(self.timeout_s + _STORE_S, MAX_SECONDS))
        except queue.Empty:
            answers = TimeoutError(f"no answer within {self.timeout_s:g} s")
        finally:
            is_given_up.set()  # after an interrupt, too
        if isinstance(answers, RuntimeError | TimeoutError) and not isinstance(
            answers, RankFailedError
        ):
            raise self._store_failure(answers) from answers
        if isinstance(answers, Exception):
            raise answers
        gathered: list[AnswerT] = answers
        return gathered

    def _exchange(self, answer: Any, begins: bool, is_given_up: threading.Event) -> list[Any]:
        if self._store is None:
            store = store_of_meeting(
                self.process_group, self.rank, self.size, self.timeout_s, purpose="engine"
            )
            self._step, self._readable, self._processes = (0, 0), [], []
            processes = self._exchange_in(store, astuple(Process.here()), is_given_up)
            self._processes = [Process(*fields) for fields in processes]
            self._store = store
        first, second = self._step
        self._step = (first + 1, 0) if begins else (first, second + 1)
        return self._exchange_in(self._store, answer, is_given_up)

    def _exchange_in(
        self, store: PrefixStore, answer: Any, is_given_up: threading.Event
    ) -> list[Any]:
        step = self._step
        keys = [f"{step} {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(answer))
        self._readable.append(keys[self.rank])
        started = time.monotonic()
        # Wait before the first look for lost ranks: a look takes time, and a pause may be running.
        look_for_lost_s = TIMING.look_s
        while not (store.check(keys) or is_given_up.is_set()):
            waited_s = time.monotonic() - started
            if waited_s > min(look_for_lost_s, self.timeout_s):
                self._require_coming(store, step, keys, is_over=waited_s > self.timeout_s)
                look_for_lost_s = waited_s + TIMING.stop_check_s
            time.sleep(min(max(waited_s / 100, _LOOK_MIN_S), TIMING.look_s))
        if is_given_up.is_set():
            raise self._give_up(store, step, ())
        answers = [json.loads(text) for text in store.multi_get(keys)]
        # All ranks have answered in this step, so they have read this rank's earlier answers.
        for key in self._readable[:-1]:
            store.delete_key(key)
        del self._readable[:-1]
        return answers

    def _require_coming(
        self, store: PrefixStore, step: tuple[int, int], keys: list[str], *, is_over: bool
    ) -> None:
        """Raise :class:`RankFailedError` if a rank without an answer will not answer this step.

        The rank has ended, or has given the step up, or the time for answers is over (``is_over``).
        """
        problems = []
        for rank, key in enumerate(keys):
            given_up = _GIVEN_UP.format(rank)
            if store.check([key]):
                continue
            if self._processes and self._processes[rank].has_ended():
                problems.append(self._describe(rank, "was lost"))
            elif store.check([given_up]) and json.loads(store.get(given_up)) >= [step[0]]:
                problems.append(self._describe(rank, "has given this step up, and is at another"))
            elif is_over:
                problems.append(self._describe(rank, self._late))
        if problems:
            raise self._give_up(store, step, problems)

    def _give_up(
        self, store: PrefixStore, step: tuple[int, int], problems: Sequence[str]
    ) -> RankFailedError:
        store.set(_GIVEN_UP.format(self.rank), json.dumps(step))
        return RankFailedError("; ".join(problems))

    def _store_failure(self, error: Exception) -> RankFailedError:
        lost = wait_for_lost(self._processes, lambda process: process.state)
        problem = self._late if isinstance(error, TimeoutError) else "was lost"
        cause = f"the store of torch.distributed does not answer: {first_line(error)}"
        return RankFailedError("; ".join([self._describe(n, problem) for n in lost] or [cause]))

    @property
    def _late(self) -> str:
        return f"did not answer within {self.timeout_s:g} s"

    def _describe(self, rank: int, problem: str) -> str:
        state = self._processes[rank].state if self._processes else ""
        suffix = f": it {state}" if state else ""
        return f"{name_of(rank, self._processes)} {problem}{suffix}"


_channels: dict[tuple[Any, ...], RankChannel] = {}
"""This process's channels, keyed by torch's store and the global ranks of the group."""
