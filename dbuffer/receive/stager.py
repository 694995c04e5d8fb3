"""`Stager`: keeps a version ready in the background, so that an engine only has to load it.

A thread follows the store, and opens and checks each newest version. It keeps the version mapped,
or copies it into the stager's memory if the store is on a network or a device copies faster from
pinned memory. The engine takes the version with :meth:`Stager.take`, applies it, and releases it.
`State` and `TRANSITIONS` describe the states.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from dbuffer import errors
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import (
    MAX_NUMBER,
    Lineage,
    Relation,
    VersionId,
    describe_fork,
    number_of,
    relation,
)
from dbuffer.format.manifest import Pointer
from dbuffer.io.devices import PageLock, fork_streams, free_on
from dbuffer.io.tensors import new_memory
from dbuffer.receive.follow_loop import FollowLoop, Forked
from dbuffer.receive.reader import Snapshot, SnapshotTensors
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.closing import ProcessBound, join
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.messages import first_line, format_bytes
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

RESERVED_S = 10.0
"""Duration of a reservation of a ready version for an engine that is about to pause."""

DEVICE_RESERVE_BYTES = 1 << 30
"""Free device memory that staging leaves unused, for instance for the engine's next batch."""


class Prepared(Protocol):
    """Weights of a version, or a rank's part of them, in the form that an engine loads."""

    @property
    def replaces_tensors(self) -> bool:
        """Whether the engine loads only these weights, and not the version's tensors."""

    @property
    def num_bytes(self) -> int: ...

    def leave_device(self) -> None:
        """Free memory on the engine's device that speeds up loading, and is not needed for it."""

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        """Return these weights, but made from ``tensors``, which are copies of their sources."""

    def staging_bytes(self, device_bytes: int) -> tuple[int, int]:
        """Return how many bytes to stage on the device, and how many in main memory.

        The device has room for ``device_bytes``.
        """

    def copied_into(
        self,
        memories: tuple[torch.Tensor, torch.Tensor],
        copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    ) -> Prepared:
        """Return a copy of these weights, made in ``memories``: device memory and main memory.

        The memories have the sizes that :meth:`staging_bytes` returned. The function
        ``copy(targets, sources)`` copies each source tensor into the target with the same index.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Version that is ready to be loaded, with its tensors."""

    lineage: Lineage
    """The version, and the runs that lead to it."""
    metadata: Mapping[str, Any]
    layout: Layout
    tensors: Mapping[str, torch.Tensor] | None
    """Tensors in main memory, valid until the version is released. None if only ``prepared`` was
    copied."""
    prepared: Prepared | None
    """The version's weights in the form that the engine loads, or None. The :class:`Stager`'s
    argument ``prepare`` makes them."""
    num_bytes: int
    duration_s: float
    """Time spent on staging the version."""

    @property
    def id(self) -> VersionId:
        return self.lineage.id

    @property
    def version(self) -> int:
        """The version's number."""
        return self.lineage.id.number


class State(enum.Enum):
    """State of a stager. Only the stager's thread gets versions ready, and only in `EMPTY`."""

    EMPTY = enum.auto()
    """No version is staged."""
    READY = enum.auto()
    """A version is staged. A newer version can replace it, unless a call waits for the staged
    version or has reserved it."""
    TAKEN = enum.auto()
    """The engine uses the staged version. No other version is staged meanwhile."""
    APPLIED = enum.auto()
    """The engine has applied the version. The stager's thread compares the engine's weights with
    the version, then releases it.

    The engine's pause does not wait for the release: unmapping takes 17 ms per GB.
    """
    CLOSED = enum.auto()


TRANSITIONS = {
    State.EMPTY: (State.READY, State.CLOSED),
    State.READY: (State.TAKEN, State.APPLIED, State.EMPTY, State.CLOSED),
    State.TAKEN: (State.TAKEN, State.READY, State.CLOSED),
    State.APPLIED: (State.EMPTY, State.CLOSED),
    State.CLOSED: (),
}


@dataclass(slots=True)
class _Request:
    """Version that a waiting call of :meth:`Stager.take` needs, or that a later call will need."""

    number: int
    id: VersionId | None
    """Id of the requested version, or None if the version is not published yet."""
    newest: Lineage | None
    is_exact: bool
    """Whether only the requested version meets the request, and no later version."""
    needs_tensors: bool
    error: Exception | None = None
    """Error of the attempt to get a version ready for this request."""

    def is_met_by(self, staged: Staged) -> bool:
        if (self.needs_tensors and staged.tensors is None) or not self.concerns(staged.version):
            return False
        if self.id is not None:
            return staged.lineage.reaches(self.id)
        # No version had this number when `take` was called. If the store has forked since then, the
        # version with this number is from another run, and is not the requested version.
        return self.newest is None or relation(staged.lineage, self.newest) != Relation.FORKED

    def concerns(self, number: int) -> bool:
        return number == self.number if self.is_exact else number >= self.number


class StagingMemory:
    """Memory for one version; with ``pinned``, page-locked for a GPU to copy from."""

    def __init__(self, *, pinned: bool) -> None:
        self.is_pinned = pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._lock: PageLock | None = None

    def resized(self, num_bytes: int) -> torch.Tensor:
        """Return memory of this size. New memory is allocated only if the size changes."""
        if self._bytes.numel() != num_bytes:
            self.free()  # first, so that memory for two versions is never allocated at once
            memory = new_memory(num_bytes)
            if self.is_pinned and num_bytes > PageLock.max_bytes:
                message = "a version of %d bytes is too large to page-lock: switches take longer"
                log_once(logger, message, num_bytes)
            elif self.is_pinned and num_bytes:
                # Don't use torch's pinned memory: its size is rounded up to a power of two.
                self._lock = PageLock(memory.data_ptr(), num_bytes)
            self._bytes = memory
        return self._bytes

    def free(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._bytes = torch.empty(0, dtype=torch.uint8)


class DeviceMemory:
    """Memory on an engine's device for a version or a part of a version."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.may_use = False
        """Whether the engine is awake and has allocated its memory, so that versions may use the
        device's remaining memory."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self) -> int:
        """Return the number of bytes to use for a version: 0 while `may_use` is False."""
        if not self.may_use:
            return 0
        in_use = self._bytes.numel()
        num_bytes = max(0, free_on(self.device) - DEVICE_RESERVE_BYTES + in_use)
        # Keep the current size if little more is free: free memory changes all the time, and using
        # all of it would reallocate the memory for each version.
        is_near = in_use <= num_bytes < in_use + DEVICE_RESERVE_BYTES
        return in_use if in_use and is_near else num_bytes

    def resized(self, num_bytes: int) -> torch.Tensor:
        """Return memory of this size, or an empty tensor if the device has too little left."""
        if self._bytes.numel() != num_bytes:
            self._free()
            try:
                self._bytes = new_memory(num_bytes, self.device)
            except errors.StoreAccessError as error:
                message = "no room on the device: staging in main memory, switches take longer: %s"
                log_once(logger, message, first_line(error))
        return self._bytes

    def leave(self) -> None:
        """Free the memory, and use none until ``may_use`` is set again."""
        self.may_use = False
        self._free()

    def _free(self) -> None:
        if self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
            if self._bytes.is_cuda:
                torch.cuda.empty_cache()  # otherwise torch keeps the memory for this process


class Stager(ProcessBound):
    """Follows a store in a thread, and keeps the store's newest version ready.

    The stager's thread calls ``check``, ``prepare``, ``on_found`` and ``attest``.

    Args:
        receiver: receiver of the store. The stager closes it.
        check: called with a snapshot if the version's layout has changed. If it raises, the version
            is not staged, and :meth:`take` raises the error.
        prepare: called with a snapshot of each version. A result other than None is staged with the
            version's tensors. If versions are copied and the result replaces the tensors, only the
            result is staged.
        device: an engine's device. As much of a version as fits is copied into its memory.
        copy: whether to copy a mapped version into the stager's memory. ``"auto"``: copy if
            ``pin_memory`` or ``device`` is set. But a version whose tensors are staged with a
            result of ``prepare`` stays mapped: later versions stage only the result, so memory for
            the tensors would be wasted.
        pin_memory: page-lock the stager's memory, for faster copies to a device.
        version: stage only this version until it has been applied. Default: stage each newest
            version.
        choose: called with the store's newest version. It returns the version to stage, or None to
            stage none. Default: the newest version.
        applied: version that the engine has at the start. Only later versions are staged.
        forked: ``"follow"`` stages the newest version after a fork; ``"refuse"`` reports a problem.
        on_found: called before each version is staged.
        attest: called with each applied version before its release, to compare the engine's weights
            with it. It returns the names of parameters and layers that differ, or None if it cannot
            compare them. It stops early once its second argument, a function, returns False.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        *,
        check: Callable[[Snapshot], None] | None = None,
        prepare: Callable[[Snapshot], Prepared | None] | None = None,
        copy: bool | Literal["auto"] = "auto",
        device: torch.device | None = None,
        pin_memory: bool = False,
        version: int | None = None,
        choose: Callable[[Lineage], Lineage | None] = lambda newest: newest,
        applied: VersionId | None = None,
        forked: Forked = "refuse",
        on_found: Callable[[], None] | None = None,
        attest: Callable[[Staged, Callable[[], bool]], Sequence[str] | None] | None = None,
    ) -> None:
        super().__init__()
        self._receiver = receiver
        receiver.reader.keeps_snapshots = True
        self._check = check
        self._checked: Layout | None = None
        self._prepare = prepare
        self._on_found = on_found
        self._attest = attest
        self.compared: VersionId | None = None
        """Version that the engine's weights were compared with last, or None."""
        self.differing: Sequence[str] | None = None
        """Parameters and layers that differed from ``compared``, or None if comparing failed."""
        self._copy = copy
        self._memory = StagingMemory(pinned=pin_memory)
        self._device_memory = None if device is None else DeviceMemory(device)
        self._sizes = (0, 0)
        """Numbers of the last staged version's bytes that were copied to the device, and into main
        memory."""
        self._memories = threading.Lock()
        """Lock held while the thread stages a version, or compares the engine's weights with it."""
        self._version = version
        self._choose = choose
        self._loop = FollowLoop(receiver, "staging", logger, forked=forked)
        self._interrupt = threading.Event()
        self._condition = threading.Condition()
        self._state = State.EMPTY
        self._staged: Staged | None = None
        self._is_outdated = False
        """Whether the version that the thread gets ready must be staged again."""
        self._snapshot = contextlib.ExitStack()
        """Snapshot of the staged version, open if the version was not copied."""
        self._request: _Request | None = None
        self._reserved: tuple[_Request, float] | None = None
        """Request whose ready version no newer version may replace, and the time when this ends."""
        self._applied = applied
        """Version that the engine has. Only versions after this version are staged."""
        self._skipped: VersionId | None = None
        """Newest version seen, if it was skipped, or None. Only a newer version can be staged."""
        receiver.record.count(staged=0, staged_bytes=0, stage_s=0.0, evictions=0, failures=0)
        receiver.record.count(device_bytes=0, memory_bytes=0)
        receiver.record.write()
        self._thread = threading.Thread(target=self._run, name="dbuffer-stager", daemon=True)
        self._thread.start()
        _stagers.add(self)

    def newest(self) -> Pointer | None:
        return self._receiver.newest()

    def goal(self) -> VersionId | None:
        """Return the version to stage while no call of `take` waits, or None if there is none."""
        pointer = self.newest()
        chosen = None if pointer is None else self._choose(pointer.lineage)
        return None if chosen is None else chosen.id

    def reserve(self, at_least: int | VersionId) -> bool:
        """For 10 s, do not replace a ready version that is ``at_least`` or later.

        Return whether such a version is ready now.
        """
        with self._condition:
            self._require_open()
            request = self._request_for(None, at_least, needs_tensors=False)
            self._reserved = request, time.monotonic() + RESERVED_S
            self._condition.notify_all()
            return self._reserved_s > 0

    def take(
        self,
        version: int | VersionId | None = None,
        *,
        at_least: int | VersionId | None = None,
        needs_tensors: bool = False,
        timeout_s: float,
    ) -> Staged:
        """Wait until a version is ready, and take it.

        No other version is staged until :meth:`release`.

        Args:
            version: take exactly this version, by number or id.
            at_least: take this version or a later one. Default: the version that the stager was
                made for, or the newest version when the call is made.
            needs_tensors: whether the version must be staged with all its tensors.
            timeout_s: how long to wait. After this time, :class:`WaitTimeoutError` is raised.

        Any other error means that the version or the store cannot be used.
        """
        self._require_open()  # before the lock, which can stay locked forever in a forked process
        with self._condition:
            self._require_open()
            request = self._request_for(version, at_least, needs_tensors=needs_tensors)
            self._loop.retry_now()  # the cause of an earlier failure may be gone
            if self._applied is not None and self._applied.number >= request.number:
                # The caller wants to apply a version again. The thread stages only versions above
                # the applied version's number, so lower this number.
                self._applied = self._applied._replace(number=request.number - 1)
            self._request = request
            try:
                self._wake()
                self._condition.wait_for(lambda: self._is_closed or self._is_answered(), timeout_s)
                self._require_open()
                if not self._is_answered():
                    newest = self.newest()
                    having = f"the newest is {newest.version}" if newest else "it has no version"
                    raise errors.WaitTimeoutError(
                        f"version {request.number} of {self._receiver.store} was not ready within "
                        f"{timeout_s:g} s; {having}"
                    )
                if request.error is not None:
                    raise request.error
                assert self._staged is not None  # noqa: S101 - that was the answer
                self._enter(State.TAKEN)
                self._reserved = None
                return self._staged
            finally:
                self._request = None
                self._wake()

    def release(self, *, applied: VersionId | None = None) -> None:
        """Release the taken version.

        If ``applied`` is given, stage only versions after ``applied``.
        """
        with self._condition:
            if self._state is State.TAKEN:
                self._enter(State.READY)
            if applied is not None and self._leads_on(applied):
                self._applied = applied
                staged = self._staged if self._state is State.READY else None
                if staged is not None and staged.version <= applied.number:
                    self._enter(State.APPLIED)
            self._wake()

    def stage_again(self, *, applied: VersionId | None = None) -> None:
        """Drop the staged version, unless the engine is loading it, and stage the newest version.

        If ``applied``, the engine's version, is given, stage only a version after it.
        """
        with self._condition:
            self._applied = applied
            self._is_outdated = True
            if self._drop_unless_taken():
                self._receiver.record.write()
            self._wake()

    def use_device(self) -> None:
        """Stage into the device's memory from now on, if a device was given and has room."""
        if self._device_memory is not None:
            self._device_memory.may_use = True

    def leave_device(self) -> None:
        """Free the device's memory, and use none until :meth:`use_device`."""
        with self._condition:
            if self._staged is not None and self._staged.prepared is not None:
                self._staged.prepared.leave_device()
        if self._device_memory is None:
            return
        with self._memories:
            with self._condition:
                if self._drop_unless_taken():
                    self._receiver.record.write()
                self._wake()
            self._device_memory.leave()

    def close(self) -> None:
        """Stop following, and remove the receiver's record from the store."""
        if self._is_inherited:
            return  # in a forked process: thread and record belong to the parent
        with self._condition:
            if self._state is not State.CLOSED:
                self._enter(State.CLOSED)
            self._wake()
        join(self._thread)
        self._staged = None
        self._let_go(self._snapshot)
        self._receiver.record.remove()
        self._receiver.close()
        self._memory.free()
        if self._device_memory is not None:
            self._device_memory.leave()

    def _request_for(
        self,
        version: int | VersionId | None,
        at_least: int | VersionId | None,
        *,
        needs_tensors: bool,
    ) -> _Request:
        pointer, last_seen = self.newest(), self._receiver.last_seen
        newest = None if pointer is None else pointer.lineage
        if at_least is None:
            version = version or self._version
        last = newest or last_seen
        goal = version or at_least or (newest and self.goal()) or (1 if last is None else last.id)
        if not isinstance(goal, VersionId):
            goal_id = None if newest is None else newest.at(goal)
            return _Request(goal, goal_id, newest, version is not None, needs_tensors)
        before = [lineage for lineage in (last_seen, self._receiver.left) if lineage is not None]
        if newest is not None and _is_lost(goal, newest, before):
            message = describe_fork(self._receiver.store, goal, newest.id)
            raise errors.VersionRegressedError(message, is_forked=True)
        return _Request(goal.number, goal, newest, version is not None, needs_tensors)

    def _leads_on(self, version: VersionId) -> bool:
        """Whether the newest version seen in the store descends from a version."""
        last_seen = self._receiver.last_seen
        return last_seen is not None and last_seen.reaches(version)

    def _require_open(self) -> None:
        if self._is_closed or self._is_inherited:
            raise errors.ClosedError(
                f"this stager of {self._receiver.store} is closed, or is of a parent process; "
                "make a new one"
            )

    @property
    def _is_closed(self) -> bool:
        return self._state is State.CLOSED

    def _enter(self, state: State) -> None:
        assert state in TRANSITIONS[self._state], (self._state, state)  # noqa: S101
        self._state = state

    def _wake(self) -> None:
        self._skipped = None
        self._interrupt.set()
        self._receiver.wake()
        self._condition.notify_all()

    def _is_answered(self) -> bool:
        if self._request is None or self._request.error is not None:
            return self._request is not None
        is_staged = self._state in (State.READY, State.TAKEN)
        return is_staged and self._staged is not None and self._request.is_met_by(self._staged)

    def _may_stage(self) -> bool:
        # Stage nothing if the request is answered: `take` is about to return the version or raise.
        if self._state in (State.CLOSED, State.TAKEN) or self._is_answered():
            return False
        if self._request is None and self._reserved_s > 0:
            return False
        is_done = self._applied is not None and self._applied.number == self._version
        return self._request is not None or not is_done

    @property
    def _reserved_s(self) -> float:
        if self._reserved is None or self._state is not State.READY or self._staged is None:
            return 0.0
        request, until_s = self._reserved
        return max(0.0, until_s - time.monotonic()) if request.is_met_by(self._staged) else 0.0

    def _drop_unless_taken(self) -> bool:
        """Drop the staged version, unless it is taken; return whether a version was dropped."""
        if self._state not in (State.READY, State.APPLIED):
            return False
        if self._state is State.APPLIED and self._staged is not None:
            self.differing, self.compared = None, self._staged.id
        self._enter(State.EMPTY)
        self._staged = None
        self._let_go(self._snapshot)
        return True

    def _let_go(self, snapshot: contextlib.ExitStack) -> bool:
        """Close a version's snapshot; return False if it was overwritten or cannot be checked."""
        record = self._receiver.record
        record.set(staged=None)
        try:
            snapshot.close()
        except (errors.DBufferError, OSError) as error:
            if isinstance(error, errors.SnapshotEvictedError | errors.VersionRegressedError):
                # A sender overwrote the version, or the store was replaced: the version is no
                # longer needed.
                record.count(evictions=1)
            else:
                # Log the error, and release the version anyway. If the error persists, the next
                # open raises it.
                message = "ignored an error when a version of %s was released: %s"
                logger.warning(message, self._receiver.store, str(error))
            # Clear the error's frames: their variables keep the file mapped. If the file was
            # removed, its space is free only once the file is unmapped.
            traceback.clear_frames(error.__traceback__)
            return False
        return True

    # In the stager's thread

    def _run(self) -> None:
        leave_core()
        while self._wait_until_free():
            with self._condition:
                request = self._request
                newer_than, exactly = self._aim()
            with self._loop.attempt():
                number = None if exactly is None else number_of(exactly)
                version = self._loop.wait(newer_than, exactly=number, interrupt=self._interrupt)
                if version is not None and exactly is None:
                    version, exactly = self._chosen(version, newer_than)
                if version is not None and self._make_room(version):
                    if self._on_found is not None:
                        self._on_found()
                    try:
                        with self._memories:
                            self._stage(version, exactly)
                    except errors.SnapshotEvictedError:
                        self._receiver.record.count(evictions=1)
                        raise
                    self._loop.used()
            self._settle(request)

    def _wait_until_free(self) -> bool:
        """Wait until the thread may stage a version; return False once the stager is closed."""
        while True:
            with self._condition:
                # Read the reserved time before `_may_stage` reads it: if the reservation ended in
                # between, a later read would give 0, and the wait would have no time limit.
                reserved_s = self._reserved_s
                if self._state not in (State.APPLIED, State.CLOSED) and not self._may_stage():
                    self._condition.wait(reserved_s or None)
                    continue
                if self._state is not State.APPLIED:
                    self._interrupt.clear()
                    return not self._is_closed
            with self._memories:
                self._finish_applied()

    def _finish_applied(self) -> None:
        applied, differing = self._staged, None
        if applied is not None and self._attest is not None:
            differing = self._attest(applied, self._may_attest)
        with self._condition:
            if applied is None or self._state is not State.APPLIED or self._staged is not applied:
                return
            self._enter(State.EMPTY)
            self._staged = None
            snapshot = self._snapshot.pop_all()
        # Release the snapshot without the lock: the release can be slow over a network, and the
        # engine's calls would wait. If a sender overwrote the version, discard `attest`'s result.
        is_valid = self._let_go(snapshot)
        self.differing, self.compared = differing if is_valid else None, applied.id
        self._receiver.record.write()

    def _may_attest(self) -> bool:
        """Whether `attest` may go on: the applied version is staged, and no :meth:`take` waits."""
        return self._state is State.APPLIED and self._request is None

    def _aim(self) -> tuple[int | None, int | VersionId | None]:
        """Return ``newer_than`` and ``exactly`` for `FollowLoop.wait`: which version to stage."""
        if self._request is not None and self._request.is_exact:
            return None, self._request.id or self._request.number
        staged = None if self._staged is None else self._staged.id
        # Ignore a version that does not lead to the store's newest version.
        versions = [v for v in (staged, self._applied, self._skipped) if v and self._leads_on(v)]
        if self._version is None:
            return max((version.number for version in versions), default=None), None
        if staged in versions and staged.number == self._version:
            return MAX_NUMBER, None  # stage nothing, unless the store forks
        return None, self._version

    def _chosen(self, newest: int, newer_than: int | None) -> tuple[int | None, VersionId | None]:
        """Return the version to stage: its number, and its id unless it is the newest version.

        If there is nothing to stage, return (None, None): the stager waits for a newer version.
        """
        last_seen = self._receiver.last_seen
        assert last_seen is not None  # noqa: S101 - it is the newest version
        chosen = self._choose(last_seen)
        if chosen is last_seen:
            return newest, None
        if chosen is not None and chosen.id.number > (newer_than or 0):
            self._loop.uses(chosen.id.number)
            return chosen.id.number, chosen.id
        with self._condition:
            if not self._interrupt.is_set():  # else a call may have requested an earlier version
                self._skipped = last_seen.at(newest)
        return None, None

    def _make_room(self, version: int) -> bool:
        """Drop the staged version in favor of ``version``, and return True.

        If ``version`` is not to be staged, keep the staged version, and return False.
        """
        with self._condition:
            if not self._may_stage():
                return False
            request = self._request
            if request is not None and request.is_exact and request.number != version:
                return False
            # Call `_aim` again: the store and the request can have changed since `_run` called it.
            newer_than, exactly = self._aim()
            if exactly is None and newer_than is not None and version <= newer_than:
                return False
            self._drop_unless_taken()
            self._is_outdated = False
            return True

    def _stage(self, version: int, exactly: int | VersionId | None) -> None:
        started = time.monotonic()
        timeout_s = self._receiver.poll_interval_s
        record = self._receiver.record
        with contextlib.ExitStack() as opened:
            newer_than = version - 1 if exactly is None else None
            snapshot = opened.enter_context(
                self._receiver.open(newer_than, timeout_s, version=exactly, acknowledge=False)
            )
            if self._check is not None and snapshot.layout != self._checked:
                self._check(snapshot)
                self._checked = snapshot.layout
            prepared = self._prepare(snapshot) if self._prepare is not None else None
            with self._condition:
                needs_tensors = self._request is not None and self._request.needs_tensors
            has_part = prepared is not None and prepared.replaces_tensors
            part = prepared if has_part and not needs_tensors else None
            num_bytes = (part or snapshot.layout).num_bytes
            tensors: SnapshotTensors | None = snapshot.tensors
            sizes = (0, 0)
            if not self._must_copy(later_copies_less=prepared is not None and part is None):
                snapshot.read_ahead()
            else:
                if part is not None:
                    tensors = None
                    prepared, sizes = self._copied_part(snapshot, part)
                else:
                    sizes = (0, snapshot.layout.checksums_offset)
                    tensors = snapshot.copy_into(self._memory.resized(sizes[1]))
                    prepared = None if prepared is None else prepared.of(tensors)
                opened.close()  # raises if the version was overwritten during the copy
            self._note_sizes(*sizes)
            with self._condition:
                if self._is_closed or self._is_outdated:
                    return
                self._enter(State.READY)
                self._snapshot = opened.pop_all()
                self._staged = staged = Staged(
                    lineage=snapshot.lineage,
                    metadata=snapshot.metadata,
                    layout=snapshot.layout,
                    tensors=tensors,
                    prepared=prepared,
                    num_bytes=num_bytes,
                    duration_s=time.monotonic() - started,
                )
                record.count(staged=1, staged_bytes=num_bytes, stage_s=staged.duration_s)
                record.set(staged=staged.id, problem=None, problem_version=None)
                self._condition.notify_all()
        record.write()

    def _note_sizes(self, device_bytes: int, memory_bytes: int) -> None:
        """Put a version's bytes on the device and in main memory into the record and the log."""
        before, self._sizes = self._sizes, (device_bytes, memory_bytes)
        self._receiver.record.count(
            device_bytes=device_bytes - before[0], memory_bytes=memory_bytes - before[1]
        )
        if self._device_memory is not None and any(self._sizes) and self._sizes != before:
            logger.info(
                "%s stages versions of %s: %s on %s, %s in main memory",
                self._receiver.receiver_id,
                self._receiver.store,
                format_bytes(device_bytes),
                self._device_memory.device,
                format_bytes(memory_bytes),
            )

    def _copied_part(
        self, snapshot: Snapshot, prepared: Prepared
    ) -> tuple[Prepared, tuple[int, int]]:
        """Return a copy of a version's part, and its sizes on the device and in main memory."""
        on_device = torch.empty(0, dtype=torch.uint8)
        sizes = prepared.staging_bytes(0)
        if self._device_memory is not None:
            sizes = prepared.staging_bytes(self._device_memory.room())
            on_device = self._device_memory.resized(sizes[0])
            if on_device.numel() < sizes[0]:
                sizes = prepared.staging_bytes(0)
        memories = on_device, self._memory.resized(sizes[1])
        with fork_streams([on_device])():
            return prepared.copied_into(memories, snapshot.copy_parts), sizes

    def _must_copy(self, *, later_copies_less: bool) -> bool:
        is_faster = self._memory.is_pinned or self._device_memory is not None
        if not self._receiver.reader.maps_files:  # the version was already read into memory
            return is_faster
        if self._copy == "auto":
            return is_faster and not later_copies_less
        return self._copy

    def _settle(self, request: _Request | None) -> None:
        """Wake the waiting call, which raises the error if the attempt for ``request`` failed."""
        with self._condition:
            error, version = self._loop.error, self._loop.failed_version
            if error is not None:
                self._receiver.reader.unmap()  # the store may have been removed
            if error is not None and self._request is not None:
                if self._request is not request:
                    # This request came after the attempt had begun. Try again before the call
                    # gets the error: the cause may be gone.
                    self._loop.retry_now()
                # If ``version`` is None, the store could not be read: any request gets the error.
                elif version is None or request.concerns(version):
                    request.error = error
            self._condition.notify_all()


def _is_lost(version: VersionId, newest: Lineage, before: Iterable[Lineage]) -> bool:
    """Whether a version is lost in a fork, so that neither ``newest`` nor a later one leads on it.

    ``before`` has versions that were the newest earlier. Return False if the run of ``version`` is
    unknown to ``newest`` and ``before``: a mirror that lags, for instance, may still publish it.
    """
    if newest.reaches(version):
        return False
    if any(run.id == version.run for run in newest.runs[1:]):
        return True  # the next run continued from an earlier version of that run
    lineages = [lineage.to(version) for lineage in before if lineage.reaches(version)]
    return any(relation(lineage, newest) is Relation.FORKED for lineage in lineages)


_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all stagers at exit: a thread that runs torch code during exit aborts the process."""
    for stager in list(_stagers):
        stager.close()
