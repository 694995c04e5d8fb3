"""`Agreement`: the ranks of a trainer take each step together, or learn together that one failed.

If one rank raised an error in a step, the other ranks would wait in the next collective. So at the
end of each step, all ranks exchange their outcomes of the step, as JSON, over a process group of
their own. If a rank has failed, all ranks raise its error.

A call can also fail on one rank only, between two steps. This rank then drops its connections, so
that the other ranks fail at once. Otherwise its next call would exchange messages with the other
ranks' current call.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import distributed
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dbuffer import errors
from dbuffer.errors import ClosedError, DBufferError, OptionError, RankFailedError
from dbuffer.io.tensors import as_bytes
from dbuffer.ranks.world import Step, World
from dbuffer.runtime.messages import described, first_line, listed
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import TranslatedErrors
from dbuffer.store.liveness import Process

_FRAME_BYTES = 1024
"""Largest outcome, in bytes, that is sent in one collective. A larger outcome takes two."""

_LENGTH_BYTES = 8

_MESSAGE_BYTES = 1 << 30
"""Maximum number of bytes that are sent to rank 0 at once. A longer message is sent in parts."""

_MAX_TIMEOUT_S = 1e9
"""Longest time-out: gloo adds it to its clock, as nanoseconds in 64 bits."""

_LAST = "last"


class _Outcome(NamedTuple):
    """Outcome of a step on one rank."""

    number: int
    step: str
    value: Any
    error: str | None = None
    kind: str = RankFailedError.__name__
    """Name of the error's class, if dbuffer defines that class."""
    may_follow: bool = False
    """Whether another rank's error may have caused this error, for instance a time-out."""
    num_bytes: int = 0

    def failed(self, error: Exception) -> Self:
        ours = [kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind]
        lost = (TimeoutError, ConnectionError, RankFailedError, distributed.DistError)
        return self._replace(
            error=str(error) if ours else described(error),
            kind=(ours or [RankFailedError])[0].__name__,
            # A plain RuntimeError can come from gloo, because another rank failed and was lost.
            may_follow=isinstance(error, lost) or type(error) is RuntimeError,
        )


class Agreement(World):
    """Ranks of a process group or of the job, which take each step of a publish together.

    Raises:
        OptionError: torch.distributed was not initialized, or this rank is not in the group.
        RankFailedError: a rank did not join, or the ranks cannot connect.
    """

    def __init__(self, group: distributed.ProcessGroup | None, *, timeout_s: float) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise OptionError(
                "torch.distributed is not initialized in this process: call "
                "torch.distributed.init_process_group() first (torchrun sets its variables)"
            )
        self.rank = distributed.get_rank(group)
        if self.rank < 0:
            raise OptionError(
                "this process is not in the group: make a sender on the group's ranks only"
            )
        self.size = distributed.get_world_size(group)
        self.timeout_s = timeout_s
        self.peers: list[Process] = []
        self._number = 0
        self._fails_together = False
        """Whether all ranks raise the error that leaves the current call."""
        self._group = connect(group, self.rank, self.size, timeout_s)
        with self.step("say where it runs") as step:
            step.result = asdict(Process.here())
        self.peers = [Process(**fields) for fields in step.results]
        self.hosts = sorted({peer.machine: peer.host for peer in self.peers}.values())

    def call(self) -> TranslatedErrors:
        """Return a ``with`` block for one collective call, whose steps all ranks take together.

        If only this rank leaves the block with an error, it drops its connections, so that the
        other ranks do not wait for it.
        """
        self._number += 1
        self._fails_together = False
        return TranslatedErrors(self._close_unless_together)

    def losing_interrupted(self) -> TranslatedErrors:
        def lose(error: BaseException) -> None:
            if not isinstance(error, DBufferError):
                self.close()

        return TranslatedErrors(lose)

    def begin_step(self) -> None:
        self._number += 1
        self._fails_together = False
        if not self.is_open:
            raise ClosedError("this sender is closed, or has lost a rank; make a new one")

    def end_step(self, step: Step, error: BaseException | None) -> None:
        """Exchange the ranks' outcomes of a step. ``error`` is this rank's error, or None.

        If a rank failed, all ranks raise its error. A lost connection or a time-out is raised only
        if no rank failed in another way.
        """
        if error is not None and not isinstance(error, Exception):
            self.close()
            return
        with TranslatedErrors(self._close_unless_together):
            encoded, cause = self._encode_outcome(step, error)
            outcomes = self._exchange(step.action, encoded, cause)
            failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
            if failed:
                self._fails_together = True
                rank = min(failed, key=lambda rank: outcomes[rank].may_follow)
                raised: type[DBufferError] = getattr(errors, outcomes[rank].kind)
                message = f"rank {rank} could not {step.action}: {outcomes[rank].error}"
                raise raised(message) from cause
            step.results = [outcome.value for outcome in outcomes]
            step.messages = self._pass_messages(step, outcomes)

    def _encode_outcome(self, step: Step, error: Exception | None) -> tuple[str, Exception | None]:
        """Return the step's outcome on this rank as JSON, and its error (None if it succeeded)."""
        outcome = _Outcome(self._number, step.action, step.result, num_bytes=len(step.message))
        if error is None:
            try:
                return json.dumps(outcome), None
            except (TypeError, ValueError, RecursionError) as not_json:
                error = not_json
        return json.dumps(outcome._replace(value=None).failed(error)), error

    def _pass_messages(self, step: Step, outcomes: Sequence[_Outcome]) -> list[memoryview]:
        """Send this rank's message to rank 0. On rank 0, return the messages received, else []."""
        messages: list[memoryview] = []
        with self._in_step(step.action):
            if self.rank and step.message:
                data = torch.frombuffer(bytearray(step.message), dtype=torch.uint8)
                for part in torch.split(data, _MESSAGE_BYTES):
                    self._group.send([part], 0, 0).wait()
            for rank, outcome in enumerate(outcomes):
                if self.rank == 0 and rank and outcome.num_bytes:
                    data = torch.empty(outcome.num_bytes, dtype=torch.uint8)
                    for part in torch.split(data, _MESSAGE_BYTES):
                        self._group.recv([part], rank, 0).wait()
                    messages.append(as_bytes(data))
        return messages

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def close(self) -> None:
        """Drop the connections. Ranks that wait in a step raise an error."""
        self._group = None

    def _close_unless_together(self, _: BaseException) -> None:
        if not self._fails_together:
            self.close()

    def _exchange(self, action: str, encoded: str, cause: Exception | None) -> list[_Outcome]:
        with self._in_step(action, cause):
            outcomes = [_Outcome(*json.loads(frame)) for frame in self._gather(encoded.encode())]
        first = outcomes[0]
        for rank, outcome in enumerate(outcomes):
            if outcome[:2] != first[:2]:
                self.close()
                raise RankFailedError(
                    f"the ranks are out of step: rank {rank} tries to {outcome.step} (its step "
                    f"{outcome.number}), but rank 0 tries to {first.step} (its step "
                    f"{first.number}), so they did not make the same calls; on all ranks, close "
                    "the object (such as a sender) whose call raised this error, and make a new one"
                ) from cause
        return outcomes

    def _in_step(self, action: str, cause: Exception | None = None) -> TranslatedErrors:
        """Return a ``with`` block that turns an error of gloo into an error with the lost ranks."""

        def translate(error: BaseException) -> None:
            if isinstance(error, RuntimeError):
                self._lose(action, cause or error)

        return TranslatedErrors(translate)

    def _gather(self, data: bytes) -> list[bytes]:
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        frames = self._gather_frames(framed, _FRAME_BYTES)
        ends = [_LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES], "little") for frame in frames]
        if max(ends) > _FRAME_BYTES:
            frames = self._gather_frames(framed, max(ends))
        return [frame[_LENGTH_BYTES:end] for frame, end in zip(frames, ends, strict=True)]

    def _gather_frames(self, data: bytes, num_bytes: int) -> list[bytes]:
        frame = torch.frombuffer(bytearray(data[:num_bytes].ljust(num_bytes)), dtype=torch.uint8)
        frames = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(self.size)]
        self._group.allgather([frames], [frame]).wait()
        return [frame.numpy().tobytes() for frame in frames]

    def _lose(self, action: str, cause: Exception) -> NoReturn:
        self.close()
        ended = [name_of(rank, self.peers) for rank in wait_for_lost(self.peers, Process.has_ended)]
        lost = "a rank was lost (it hangs, was interrupted, or has closed its sender)"
        loss = " and ".join(ended) + " has ended" if ended else lost
        raise RankFailedError(
            f"{loss} while the ranks tried to {action} ({first_line(cause)}); "
            "make a new sender in a new process group"
        ) from cause


def wait_for_lost(peers: Sequence[Process], is_lost: Callable[[Process], object]) -> list[int]:
    """Wait until some ranks are lost, for a second at most, and return these ranks.

    ``peers`` are the processes of all ranks. A killed process ends a moment after its connections
    close.
    """
    deadline = time.monotonic() + TIMING.ranks_end_within_s
    while True:
        lost = [rank for rank, peer in enumerate(peers) if is_lost(peer)]
        if lost or time.monotonic() >= deadline:
            return lost
        time.sleep(TIMING.look_s)


def name_of(rank: int, peers: Sequence[Process]) -> str:
    """Return a rank's name for messages. ``peers``: processes of all ranks; empty if unknown."""
    return (
        f"rank {rank} (process {peers[rank].pid} on {peers[rank].host})"
        if peers
        else f"rank {rank}"
    )


def connect(group: distributed.ProcessGroup | None, rank: int, size: int, timeout_s: float) -> Any:
    """Make a process group of the same ranks. Dropping the new group closes its connections.

    The new group uses gloo, whatever the trainer's backend. `torch.distributed.new_group` cannot
    make such a group: a second group of the same ranks finds the addresses of the first group in
    torch's store, and hangs.
    """
    timeout_s = min(timeout_s, _MAX_TIMEOUT_S)
    store = store_of_meeting(group, rank, size, timeout_s, purpose="trainer")
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise RankFailedError(f"the ranks cannot connect to each other: {error}") from error


def store_of_meeting(
    group: distributed.ProcessGroup | None,
    rank: int,
    size: int,
    timeout_s: float,
    *,
    purpose: str,
) -> PrefixStore:
    """Wait for all ranks of a group; return an empty part of torch's store for this meeting."""
    ranks = "-".join(map(str, distributed.get_process_group_ranks(group)))
    store = PrefixStore(f"dbuffer/{purpose}/{ranks}", _get_default_store())
    # Number the meetings in torch's store: a rank that was interrupted during a meeting, or that
    # restarted, gets the same number as the other ranks.
    number = store.add(_LAST, 0) + 1
    store_of_one = PrefixStore(str(number), store)
    meet(PrefixStore("here", store_of_one), rank, size, timeout_s=timeout_s)
    # Count the meeting only now: until all ranks have met, a rank that tries again must get the
    # same number.
    store.set(_LAST, str(number))
    return store_of_one


_HERE, _CAME = "here", "came"
"""Beginnings of two keys that each rank writes into torch's store in `meet`. A rank deletes its
`_HERE` key if it stops waiting for the others, and never deletes its `_CAME` key."""


def meet(store: Store, rank: int, size: int, *, timeout_s: float) -> None:
    """Wait until all ranks have called this function.

    Each meeting needs a new ``store``, because the keys of a meeting stay in it.

    Raises:
        RankFailedError: some ranks did not come in time (the message names them), or torch's store
            does not answer, probably because its process has ended.
    """
    where, timeout = place_of(store), datetime.timedelta(seconds=timeout_s)
    try:
        for word in (_CAME, _HERE):
            store.set(f"{word} {rank}", "")
        store.wait([f"{_HERE} {other}" for other in range(size)], timeout)
    except RuntimeError as error:
        away = _ranks_without(_HERE, store, range(size))
        never = _ranks_without(_CAME, store, away or [])
        if away is None or never is None:
            raise RankFailedError(
                f"rank {rank} of {size} cannot meet the others at {where}, which does not answer "
                f"({first_line(error)}): has the process that hosts it ended?"
            ) from error
        if not away:
            return  # the last rank came just now
        # This rank stops waiting, so it deletes its `_HERE` key. Otherwise a rank that comes later
        # would find all ranks' keys, and continue without this rank.
        store.delete_key(f"{_HERE} {rank}")
        missing = never or away
        reason = "did not come" if never else "came, but stopped waiting before all were there"
        raise RankFailedError(
            f"rank {rank} of {size} waited {timeout_s:g} s at {where} for "
            f"{'rank' if len(missing) == 1 else 'ranks'} {listed(missing)}, which {reason}; "
            "check that each of them runs, makes the same calls, and has the same address and "
            "number of ranks; rank_timeout_s is how long ranks wait"
        ) from error


def place_of(store: Store) -> str:
    """Return the address or path of torch's store, for messages."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, FileStore):
        return str(store.path)  # type: ignore[attr-defined]  # it has
    return f"a {type(store).__name__}"


def _ranks_without(word: str, store: Store, ranks: Iterable[int]) -> list[int] | None:
    """Return the ranks without a key ``word`` in torch's store, or None if it can't be reached."""
    try:
        return [rank for rank in ranks if not store.check([f"{word} {rank}"])]
    except RuntimeError:
        return None
