"""`Stager`: keeps a version ready in the background; applying it is all that is left.

A thread follows the store. It opens each newest version, or only one that it was told, checks it,
and keeps it held and mapped; or, where a mapping would read a network at the wrong moment or a
device copies faster out of pinned memory, it copies the version into memory of its own. Whoever
applies the version takes it with :meth:`Stager.take`, and releases it afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from dbuffer import errors
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import Lineage, Relation, VersionId, describe_fork, number_of, relation
from dbuffer.format.manifest import MAX_INTEGER, Pointer
from dbuffer.io.devices import PageLock
from dbuffer.io.tensors import new_memory
from dbuffer.receive.follow_loop import Failure, FollowLoop, Forked
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot, SnapshotTensors
from dbuffer.runtime import options
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

Check = Callable[[Snapshot], None]


class Prepared(Protocol):
    """Part of a version, in the form in which an engine loads it."""

    @property
    def is_enough(self) -> bool:
        """Whether it suffices, this time, without the version's tensors."""

    @property
    def num_bytes(self) -> int: ...

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        """Return this for other tensors with the same contents."""

    @property
    def staging_bytes(self) -> int:
        """Size of the memory that :meth:`copied_into` needs."""

    def copied_into(
        self, memory: torch.Tensor, copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None]
    ) -> Prepared:
        """Return this in ``memory``, flat bytes, with no reference to the snapshot left.

        ``copy`` copies views of the snapshot's tensors, the second, into the first.
        """


Prepare = Callable[[Snapshot], Prepared | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that is ready."""

    lineage: Lineage
    """The version, and what leads to it."""
    metadata: Mapping[str, Any]
    layout: Layout
    tensors: Mapping[str, torch.Tensor] | None
    """Tensors in main memory, valid until release. None: only ``prepared`` was staged."""
    prepared: Prepared | None
    """Result of the :class:`Stager`'s ``prepare``."""
    num_bytes: int
    duration_s: float
    """Time that staging it took."""

    @property
    def id(self) -> VersionId:
        return self.lineage.id

    @property
    def version(self) -> int:
        """The version's number."""
        return self.lineage.id.number


@dataclass(frozen=True, slots=True)
class _Request:
    """A call of :meth:`Stager.take` that waits."""

    number: int
    id: VersionId | None
    """Id of the version of this number; None: that is not published yet."""
    newest: Lineage | None
    """Newest version when the call was made."""
    is_exact: bool
    """Whether no later version will do."""
    is_whole: bool

    def is_met_by(self, staged: Staged) -> bool:
        if (self.is_whole and staged.tensors is None) or not self.concerns(staged.version):
            return False
        if self.id is not None:
            return staged.lineage.reaches(self.id)
        # A number means the version that is published after what was there.
        return self.newest is None or relation(staged.lineage, self.newest) != Relation.FORKED

    def concerns(self, number: int) -> bool:
        return number == self.number if self.is_exact else number >= self.number


class StagingMemory:
    """Memory for one version; page-locked for a GPU to copy from, if it is to be."""

    def __init__(self, *, pinned: bool) -> None:
        self.is_pinned = pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._lock: PageLock | None = None

    def resized(self, num_bytes: int) -> torch.Tensor:
        """Return memory of this size, which is made only if the size changes.

        Raises:
            StoreAccessError: there is no room for it, or it cannot be page-locked.
        """
        if self._bytes.numel() != num_bytes:
            self.free()  # before the new one is made: never two versions at once
            memory = new_memory(num_bytes)
            if self.is_pinned and num_bytes > PageLock.max_bytes:
                message = "switches take longer: %d bytes of a version are too many to page-lock"
                log_once(logger, message, num_bytes)
            elif self.is_pinned and num_bytes:
                # torch's own pinned memory rounds up to a power of two, up to twice as much.
                self._lock = PageLock(memory.data_ptr(), num_bytes)
            self._bytes = memory
        return self._bytes

    def free(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._bytes = torch.empty(0, dtype=torch.uint8)


class Stager(ProcessBound):
    """Follows a store in a thread of its own, and has its newest version ready.

    Beyond the store itself it takes no memory when it maps, and one version's when it copies.

    Args:
        receiver: reads the store; the stager closes it.
        check: called with a version whenever its layout is another one than before, in the
            stager's thread. An error from it makes the version unusable, and is raised by `take`.
        prepare: called with each version, in the stager's thread. Its result is staged too; or
            alone, where versions are copied and that is enough. None: there was nothing to prepare.
        copy: copy into memory of its own. ``"auto"``: if ``pin_memory``, and later versions will
            not have less to copy. On a network mount a version is read into memory of its own in
            any case.
        pin_memory: that memory is page-locked, for a device to copy from.
        version: keep this version ready, and no other, until it was applied; it is waited for.
        applied: version up to which nothing need be staged from the start.
        forked: where another run has published in place of what was seen, ``"follow"``: stage what
            the store holds now. ``"refuse"``: that is a problem with every version, until this
            stager is closed.
        on_found: called in the stager's thread with each version, before it is staged.

    Raises:
        OptionError: an option is invalid.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        *,
        check: Check | None = None,
        prepare: Prepare | None = None,
        copy: bool | Literal["auto"] = "auto",
        pin_memory: bool = False,
        version: int | None = None,
        applied: VersionId | None = None,
        forked: Forked = "refuse",
        on_found: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        options.choice("copy", copy, (True, False, "auto"))
        options.flag("pin_memory", pin_memory)
        if version is not None:
            options.whole_number("version", version)
        self._receiver = receiver
        receiver.reader.keep_snapshots()
        self._check = check
        self._checked: Layout | None = None
        self._prepare = prepare
        self._on_found = on_found
        self._copy = copy
        self._memory = StagingMemory(pinned=pin_memory)
        self._version = version
        self._loop = FollowLoop(receiver, "staging", logger, forked=forked)
        self._interrupt = threading.Event()
        self._condition = threading.Condition()
        """Guards all that follows."""
        self._staged: Staged | None = None
        """Version that is ready, or taken."""
        self._is_taken = False
        """Whether the version is in use; nothing else is staged meanwhile."""
        self._is_applied = False
        """Whether the version was applied, and is for the stager's thread to let go of: its record
        may have to be flushed over a network, and unmapping takes 17 ms a GB. An engine that is
        paused waits for neither."""
        self._hold = contextlib.ExitStack()
        """Hold on the staged version, where it is mapped."""
        self._failure: Failure | None = None
        """Failure of the last attempt. A version that was ready before it still is."""
        self._request: _Request | None = None
        self._applied = applied
        """Version up to which nothing need be staged."""
        self._is_closed = False
        receiver.record.count(staged=0, staged_bytes=0, stage_s=0.0, evictions=0, failures=0)
        receiver.record.write()
        self._thread = threading.Thread(target=self._run, name="dbuffer-stager", daemon=True)
        self._thread.start()
        _stagers.add(self)

    @property
    def store(self) -> Path:
        return self._receiver.store

    @property
    def maps_files(self) -> bool:
        """Whether it maps versions where they lie, and does not read them over a network."""
        return self._receiver.maps_files

    def newest(self) -> Pointer | None:
        """Return the pointer to the store's newest version; None: no store, or nothing in it."""
        return self._receiver.newest()

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes staged, seconds that took, evictions, failures."""
        return dict(self._receiver.record.current.stats)

    def take(
        self,
        version: int | VersionId | None = None,
        *,
        at_least: int | VersionId | None = None,
        whole: bool = False,
        timeout_s: float,
    ) -> Staged:
        """Wait until a version is ready, and keep it. Nothing else is staged until its release.

        Args:
            version: exactly the one of this number, or id.
            at_least: this one or a later one, whichever is ready. Default: the stager's version, or
                the one that is the newest now, or was when the store could last be read.
            whole: with all its tensors.
            timeout_s: how long to wait.

        Raises:
            OptionError: an argument is invalid.
            WaitTimeoutError: it was not ready in time.
            VersionRegressedError: it does not lead to what the store holds now.
            DBufferError, OSError: the version, or the store, cannot be used.
        """
        options.seconds("timeout_s", timeout_s)
        for name, value in (("version", version), ("at_least", at_least)):
            if value is not None and not isinstance(value, VersionId):
                options.whole_number(name, value)
        self._require_open()  # a fork's copy of the lock may stay locked
        with self._condition:
            self._require_open()
            self._drop_applied()
            request = self._request_for(version, at_least, is_whole=whole)
            self._failure = None  # it may have been mended since
            self._loop.retry_now()
            if self._applied is not None and self._applied.number >= request.number:
                # It is to be applied again.
                self._applied = self._applied._replace(number=request.number - 1)
            self._request = request
            try:
                self._wake()
                self._condition.wait_for(lambda: self._is_closed or self._is_answered(), timeout_s)
                self._require_open()
                if not self._is_answered():
                    newest = self.newest()
                    raise errors.WaitTimeoutError(
                        f"version {request.number} of {self.store} was not ready within "
                        f"{timeout_s:g} s; the newest is {newest and newest.version}"
                    )
                if self._failure is not None:
                    raise self._failure.error
                assert self._staged is not None  # noqa: S101 - that was the answer
                self._is_taken = True
                return self._staged
            finally:
                self._request = None
                self._wake()

    def release(self, *, applied: VersionId | None = None) -> None:
        """Release the version that was taken; those up to ``applied`` need not be staged again."""
        with self._condition:
            self._is_taken = False
            if applied is not None and self._leads_on(applied):
                self._applied = applied
                if self._staged is not None and self._staged.version <= applied.number:
                    self._is_applied = True
            self._condition.notify_all()

    def stage_again(self, *, applied: VersionId | None = None) -> None:
        """Make ready anew the newest version above ``applied``; None: whichever is the newest.

        A version that is taken stays as it is.
        """
        with self._condition:
            self._applied = applied
            if not self._is_taken:
                self._drop()
                self._receiver.record.write()
            self._wake()

    def close(self) -> None:
        """Stop following, and take the record out of the store."""
        if self._is_inherited:
            return  # a fork has no thread, and its parent's record is not its to remove
        with self._condition:
            self._is_closed = True
            self._wake()
        self._thread.join()
        with self._condition:
            self._drop()
        self._receiver.record.remove()
        self._receiver.close()
        self._memory.free()

    def _request_for(
        self,
        version: int | VersionId | None,
        at_least: int | VersionId | None,
        *,
        is_whole: bool,
    ) -> _Request:
        newest, seen = self.newest(), self._receiver.seen
        if at_least is None:
            version = version or self._version
        goal = version or at_least
        if goal is None:
            newest_known = seen if newest is None else newest.lineage
            goal = 1 if newest_known is None else newest_known.id
        is_exact = version is not None
        lineage = None if newest is None else newest.lineage
        if not isinstance(goal, VersionId):
            named = None if lineage is None else lineage.at(goal)
            return _Request(goal, named, lineage, is_exact, is_whole)
        known = [each for each in (seen, self._receiver.left) if each is not None]
        if lineage is not None and _is_lost(goal, lineage, known):
            raise errors.VersionRegressedError(
                describe_fork(self.store, goal, lineage.id), is_forked=True
            )
        return _Request(goal.number, goal, lineage, is_exact, is_whole)

    def _leads_on(self, version: VersionId) -> bool:
        """Whether a version leads to what the store holds, as far as that was seen."""
        seen = self._receiver.seen
        return seen is not None and seen.reaches(version)

    def _require_open(self) -> None:
        if self._is_closed or self._is_inherited:
            raise errors.ClosedError(
                f"this stager of {self.store} is closed, or was made before a fork; make a new one"
            )

    def _wake(self) -> None:
        self._interrupt.set()
        self._receiver.wake()
        self._condition.notify_all()

    def _is_answered(self) -> bool:
        """Whether a request waits for the version that is ready, or for the failure."""
        if self._request is None:
            return False
        if self._failure is not None:
            # A store that cannot be read concerns every request.
            return self._request.concerns(self._failure.version or self._request.number)
        return self._staged is not None and self._request.is_met_by(self._staged)

    def _may_stage(self) -> bool:
        """Whether another version may take the place of the one that is ready."""
        # A version that answers a request is about to be taken.
        if self._is_closed or self._is_taken or self._is_answered():
            return False
        is_done = self._applied is not None and self._applied.number == self._version
        return self._request is not None or not is_done

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
                if version is not None and self._make_room(version):
                    if self._on_found is not None:
                        self._on_found()
                    try:
                        self._stage(version, exactly)
                    except errors.SnapshotEvictedError:
                        self._receiver.record.count(evictions=1)
                        raise
                    self._loop.used()
            self._settle(request)

    def _wait_until_free(self) -> bool:
        """Wait until a version may be staged; False: it is closed."""
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._is_closed or self._is_applied or self._may_stage()
                )
                if self._is_closed or not self._is_applied:
                    self._interrupt.clear()
                    return not self._is_closed
                applied = self._drop_applied()
            del applied  # unmapped here, without the lock

    def _aim(self) -> tuple[int | None, int | VersionId | None]:
        """Return the version above which to stage the newest, or else the one to stage."""
        if self._request is not None and self._request.is_exact:
            return None, self._request.id or self._request.number
        # One that does not lead to what is there now says nothing of it.
        staged, applied = self._staged, self._applied
        if staged is not None and not self._leads_on(staged.id):
            staged = None
        if applied is not None and not self._leads_on(applied):
            applied = None
        if self._version is None:
            above = applied if staged is None else staged.id
            return None if above is None else above.number, None
        if staged is not None and staged.version == self._version:
            return MAX_INTEGER, None  # nothing, unless another run comes
        return None, self._version

    def _make_room(self, version: int) -> bool:
        """Let go of what was staged before, unless it, or another version, is to be taken."""
        with self._condition:
            if not self._may_stage():
                return False
            request = self._request
            if request is not None and request.is_exact and request.number != version:
                return False
            # Before the store was looked at, it was not known whether what was applied leads to it.
            newer_than, exactly = self._aim()
            if exactly is None and newer_than is not None and version <= newer_than:
                return False
            self._drop()
            self._failure = None
            return True

    def _drop_applied(self) -> Staged | None:
        """Let go of a version that was applied; return it, for its memory to be freed later."""
        staged = self._staged
        if not self._is_applied:
            return None
        self._drop()
        self._receiver.record.write()
        return staged

    def _drop(self) -> None:
        self._staged, self._is_taken, self._is_applied = None, False, False
        record = self._receiver.record
        record.set(staged=None)
        try:
            self._hold.close()
        except (errors.DBufferError, OSError) as error:
            if isinstance(error, errors.SnapshotEvictedError | errors.VersionRegressedError):
                # Held for longer than the sender waits, or than there was a store: not needed.
                record.count(evictions=1)
            else:
                # It is released anyway; opening the next version meets this error again.
                logger.warning("releasing a version of %s: %s", self.store, str(error))
            # A cycle of references, with the mapping of a file that may be long gone in it.
            traceback.clear_frames(error.__traceback__)

    def _stage(self, version: int, exactly: int | VersionId | None) -> None:
        started = time.monotonic()
        timeout_s = self._receiver.poll_interval_s
        with contextlib.ExitStack() as hold:
            opened = (
                self._receiver.open(version=exactly, timeout_s=timeout_s, acknowledge=False)
                if exactly is not None
                else self._receiver.open_seen(version - 1)
            )
            snapshot = hold.enter_context(opened)
            if self._check is not None and snapshot.layout != self._checked:
                self._check(snapshot)
                self._checked = snapshot.layout
            prepared = self._prepare(snapshot) if self._prepare is not None else None
            is_enough = prepared is not None and prepared.is_enough and not self._needs_whole()
            tensors: SnapshotTensors | None = snapshot.tensors
            if self._must_copy(later_copies_less=prepared is not None and not is_enough):
                tensors, prepared = self._copied(snapshot, prepared, is_enough=is_enough)
                hold.close()  # it was read: if it was overwritten meanwhile, this says so
            else:
                snapshot.read_ahead()
            kept = hold.pop_all()
        staged = Staged(
            lineage=snapshot.lineage,
            metadata=snapshot.metadata,
            layout=snapshot.layout,
            tensors=tensors,
            prepared=prepared,
            num_bytes=prepared.num_bytes if prepared and is_enough else snapshot.layout.num_bytes,
            duration_s=time.monotonic() - started,
        )
        record = self._receiver.record
        with self._condition:
            self._staged, self._hold = staged, kept
            record.count(staged=1, staged_bytes=staged.num_bytes, stage_s=staged.duration_s)
            record.set(staged=staged.id, problem=None, problem_version=None)
            self._condition.notify_all()
        record.write()

    def _copied(
        self, snapshot: Snapshot, prepared: Prepared | None, *, is_enough: bool
    ) -> tuple[SnapshotTensors | None, Prepared | None]:
        """Copy what was prepared, if that is enough, or else all tensors."""
        if prepared is not None and is_enough:
            memory = self._memory.resized(prepared.staging_bytes)
            return None, prepared.copied_into(memory, snapshot.copy_parts)
        tensors = snapshot.copy_into(self._memory.resized(snapshot.data_bytes))
        return tensors, None if prepared is None else prepared.of(tensors)

    def _needs_whole(self) -> bool:
        with self._condition:
            return self._request is not None and self._request.is_whole

    def _must_copy(self, *, later_copies_less: bool) -> bool:
        if not self.maps_files:  # a snapshot is in memory of its own already
            return self._memory.is_pinned
        if self._copy == "auto":
            return self._memory.is_pinned and not later_copies_less
        return self._copy

    def _settle(self, request: _Request | None) -> None:
        """Record the result of an attempt that was made for this request."""
        with self._condition:
            self._failure = None
            if self._loop.error is not None:
                self._receiver.reader.unmap()  # the store may be gone
            if self._loop.has_forked:
                self._applied = None
                if not self._is_taken:
                    self._drop()
                self._receiver.record.write()
            elif self._loop.error is not None and not self._is_taken:
                if self._request is None or self._request is request:
                    self._failure = self._loop.failure
                else:
                    # The request came during the attempt, and the cause may have been mended
                    # before it.
                    self._loop.retry_now()
            self._condition.notify_all()


def _is_lost(version: VersionId, newest: Lineage, known: Iterable[Lineage]) -> bool:
    """Whether a version does not lead to the newest, and no later one that it leads to can come.

    A version of a run that is not known may be published yet, as in a mirror that lags.
    """
    if newest.reaches(version):
        return False
    if any(run.id == version.run for run in newest.runs[1:]):
        return True  # the run after it began upon an earlier version
    lineages = [each.to(version) for each in known if each.reaches(version)]
    return any(relation(each, newest) is Relation.FORKED for each in lineages)


_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all stagers before the interpreter ends: a thread that it ends in torch aborts it."""
    for stager in list(_stagers):
        stager.close()
