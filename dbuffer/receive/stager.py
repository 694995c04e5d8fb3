"""`Stager`: keeps the newest version ready in the background; applying it is all that is left.

A thread follows the store. It opens each newest version, checks it, and keeps it held and mapped;
or, where a mapping would read a network at the wrong moment or a device copies faster out of
pinned memory, it copies the version into memory of its own. Whoever applies it takes it with
:meth:`Stager.take`, and gives it back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from dbuffer import errors
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import Pointer
from dbuffer.io.tensors import new_memory
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot
from dbuffer.runtime import options
from dbuffer.store.buffer import DoubleBuffer, are_apart
from dbuffer.store.records import MAX_PROBLEM_CHARACTERS, Spare

logger = logging.getLogger(__name__)

Check = Callable[[Snapshot], None]

_RETRY_MIN_S = 0.5
_RETRY_MAX_S = 30.0
"""A version that could not be staged is tried again, at growing intervals, until a newer one comes:
a network's caches and a full disk's neighbours do change."""

NewHistory = Literal["follow", "refuse"]
"""What becomes of a store that was emptied or replaced, and started over, while it is followed."""

NEW_HISTORIES = ("follow", "refuse")


class Prepared(Protocol):
    """What somebody needs of a version, where that is not all of its tensors as they are."""

    @property
    def is_enough(self) -> bool:
        """Whether the tensors themselves are not needed too, this time."""

    @property
    def num_bytes(self) -> int: ...

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        """The same of other tensors, which hold what those hold that it was made of."""

    @property
    def staging_bytes(self) -> int:
        """What :meth:`copied_into` needs."""

    def copied_into(
        self, memory: torch.Tensor, copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None]
    ) -> Prepared:
        """The same in ``memory``, flat bytes, with nothing left in the snapshot that it was of.

        ``copy`` copies views of the snapshot's tensors, the second, into the first.
        """


Prepare = Callable[[Snapshot], Prepared | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that is ready."""

    version: int
    history: str | None
    """Which run of versions it is of; None: it was published in format 1, which does not say."""
    layout: Layout
    tensors: Mapping[str, torch.Tensor] | None
    """In main memory; valid until it is given back. None: only what was prepared was staged."""
    prepared: Prepared | None
    """What :class:`Stager`'s ``prepare`` made of it."""
    num_bytes: int
    identity: str
    """Tells versions of one number in two stores apart."""
    duration_s: float
    """What it took to get it ready."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What somebody waits for in :meth:`Stager.take`."""

    exactly: int | None
    at_least: int
    history: str | None
    is_whole: bool

    def is_met_by(self, version: int) -> bool:
        return version == self.exactly if self.exactly is not None else version >= self.at_least


class _BroughtIn(NamedTuple):
    """What is kept of a snapshot; its bytes are this receiver's, or it is held."""

    tensors: Mapping[str, torch.Tensor] | None
    prepared: Prepared | None
    num_bytes: int
    is_held: bool


class StagingMemory:
    """Memory for one version; page-locked for a GPU to copy from, if it is to be.

    Raises:
        StoreAccessError: there is no room for it, or it cannot be page-locked.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.bytes = new_memory(num_bytes)
        self._is_pinned = pinned
        if pinned:
            # Not torch's own pinned memory: that rounds up to a power of two, up to twice as much.
            _check_cuda(_cuda().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))

    def free(self) -> None:
        if self._is_pinned:
            _check_cuda(_cuda().cudaHostUnregister(self.bytes.data_ptr()))
            self._is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda(status: int) -> None:
    if int(status) != 0:
        raise errors.StoreAccessError(
            f"memory to stage a version in could not be page-locked: CUDA error {status}; is there "
            "a limit on locked memory (ulimit -l)? Staging by mapping needs none"
        )


class Stager:
    """Follows a store in a thread of its own, and has its newest version ready.

    Beyond the store itself it takes no memory when it maps, and one version's when it copies.

    Args:
        part_of: the receiver that acknowledges, where this is one rank of an engine.
        instance: which start of which engine.
        spare: the name to take if another living receiver has this one.
        check: called with a version whenever its layout is another one than before, in the
            stager's thread. What it raises makes the version unusable, and reaches who takes it.
        prepare: called with each version, in the stager's thread. What it makes of it is staged
            too; or alone, where versions are copied and that is enough. None: it made nothing.
        copy: copy into memory of its own. ``"auto"``: if ``pin_memory``, and what there is to copy
            will not be less later. On a network mount a version is read into memory of its own in
            any case.
        pin_memory: that memory is page-locked, for a device to copy from.
        store, receiver_id, poll_interval_s, verify, num_threads, allow_shared_store: as for a
            `WeightReceiver`.
        new_history: ``"follow"``: where the store was started over, stage what it holds now.
            ``"refuse"``: that is a problem with every version, until this stager is closed.

    Raises:
        OptionError: an option is not what it may be.
    """

    def __init__(
        self,
        store: str,
        *,
        receiver_id: str,
        part_of: str | None = None,
        instance: str | None = None,
        spare: Spare | None = None,
        check: Check | None = None,
        prepare: Prepare | None = None,
        copy: bool | Literal["auto"] = "auto",
        pin_memory: bool = False,
        poll_interval_s: float = 1.0,
        verify: bool | Literal["auto"] = "auto",
        num_threads: int | None = None,
        allow_shared_store: bool = False,
        new_history: NewHistory = "refuse",
    ) -> None:
        options.choice("copy", copy, (True, False, "auto"))
        options.flag("pin_memory", pin_memory)
        self._new_history = options.choice("new_history", new_history, NEW_HISTORIES)
        self._receiver = WeightReceiver(
            store,
            receiver_id=receiver_id,
            poll_interval_s=poll_interval_s,
            verify=verify,
            num_threads=num_threads,
            allow_shared_store=allow_shared_store,
        )
        self._store = DoubleBuffer(store, allow_shared_store=allow_shared_store)
        self._check = check
        self._prepare = prepare
        self._checked: Layout | None = None
        self._copy = copy
        self._pin_memory = pin_memory
        self._poll_interval_s = poll_interval_s
        self._memory: StagingMemory | None = None
        self._hold = contextlib.ExitStack()
        self._spent: Staged | None = None
        self._pid = os.getpid()
        # All that follows is guarded by the condition.
        self._condition = threading.Condition()
        self._interrupt = threading.Event()
        self._is_closed = False
        self._after: int | None = None
        self._request: _Request | None = None
        self._attempt_for: _Request | None = None
        self._staged: Staged | None = None
        self._is_taken = False
        self._problem: tuple[int | None, Exception] | None = None
        self._retry_s = _RETRY_MIN_S
        self._stats = {
            "staged": 0,
            "staged_bytes": 0,
            "stage_s": 0.0,
            "evictions": 0,
            "failures": 0,
        }
        self._receiver.record.spare = spare
        self._receiver.record.write(
            part_of=part_of, instance=instance, is_made_up=part_of is not None, stats=self._stats
        )
        self._thread = threading.Thread(target=self._run, name="dbuffer-stager", daemon=True)
        self._thread.start()

    @property
    def store(self) -> Path:
        return self._receiver.store

    @property
    def maps_files(self) -> bool:
        """Whether it reads versions where they lie, and not over a network."""
        return self._store.medium.maps_files

    def newest(self) -> int | None:
        """The store's newest version; None if there is no store, or nothing in it."""
        pointer = self.newest_pointer()
        return None if pointer is None else pointer.version

    def newest_pointer(self) -> Pointer | None:
        return self._store.newest_pointer() if self._store.exists() else None

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes staged, seconds that took, evictions, failures."""
        with self._condition:
            return dict(self._stats)

    def take(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        history: str | None = None,
        whole: bool = False,
        timeout_s: float,
    ) -> Staged:
        """Wait until a version is ready, and keep it. Nothing else is staged before it comes back.

        Args:
            version: exactly this one.
            at_least: or this one or a later one, whichever is ready. Default: the one that is the
                newest now, or was the newest when the store could last be read.
            history: of this run of versions. Default: of that whose versions are there now.
            whole: with all its tensors.
            timeout_s: how long to wait.

        Raises:
            OptionError: one of these is not what it may be.
            VersionTimeoutError: it was not ready in time.
            StoreReplacedError: the store was started over: it is no longer there, or refused.
            DBufferError, OSError: what is wrong with the version, or with the store.
        """
        options.seconds("timeout_s", timeout_s)
        for name, value in (("version", version), ("at_least", at_least)):
            if value is not None:
                options.whole_number(name, value)
        self._require_open()  # in a fork nobody lets go of what follows
        with self._condition:
            self._require_open()
            newest = self.newest_pointer()
            if newest is not None:
                history = history or newest.history
                at_least = at_least or newest.version
                if are_apart(newest.history, history):
                    raise errors.StoreReplacedError(
                        f"{self.store} was started over, and version {version or at_least} of the "
                        "run before is no longer in it"
                    )
            at_least = version or at_least or self._receiver.seen_version or 1
            self._problem = None  # what was wrong may have been mended since
            if self._after is not None and self._after >= at_least:
                self._after = at_least - 1  # it was applied before, and is wanted again
            self._request = _Request(version, at_least, history, whole)
            try:
                self._wake()
                self._condition.wait_for(lambda: self._is_closed or self._is_answered(), timeout_s)
                self._require_open()
                if not self._is_answered():
                    raise errors.VersionTimeoutError(
                        f"version {at_least} of {self._receiver.store} was not ready within "
                        f"{timeout_s:g} s; the newest is {self.newest()}"
                    )
                if self._problem is not None:
                    raise self._problem[1]
                assert self._staged is not None  # noqa: S101 - that was the answer
                self._is_taken = True
                return self._staged
            finally:
                self._request = None
                self._wake()

    def release(self, *, applied: int | None = None, history: str | None = None) -> None:
        """Done with what was taken; versions up to ``applied`` need not be staged again.

        ``history`` is that of ``applied``, which says nothing of another run's versions. Default:
        the one that is staged now.
        """
        with self._condition:
            self._is_taken = False
            if applied is not None and history in (None, self._receiver.history):
                self._after = applied
                if self._staged is not None and self._staged.version <= applied:
                    # Unmapping it takes 17 ms a GB, for which the engine need not wait.
                    self._spent = self._staged
                    self._drop()
                    self._receiver.record.write()
            self._condition.notify_all()

    def stage_again(self, *, applied: int | None = None, history: str | None = None) -> None:
        """Make ready anew the newest version above ``applied``; None: whichever is the newest.

        A version that is taken stays as it is. ``history`` is that of ``applied``, which says
        nothing of another run's versions.
        """
        with self._condition:
            self._after = applied if history in (None, self._receiver.history) else None
            if not self._is_taken:
                self._drop()
                self._receiver.record.write()
            self._wake()

    def close(self) -> None:
        """Stop following, and take the record out of the store."""
        if self._pid != os.getpid():
            return  # a fork has no thread, and its parent's record is not its to remove
        with self._condition:
            self._is_closed = True
            self._wake()
        self._thread.join()
        with self._condition:
            self._drop()
            self._spent = None
        self._receiver.record.remove()
        self._receiver.close()
        if self._memory is not None:
            self._memory.free()

    def _is_answered(self) -> bool:
        """Whether somebody waits for what is staged, or for what could not be."""
        request, staged = self._request, self._staged
        if request is None:
            return False
        if self._problem is not None:
            return request.is_met_by(self._problem[0] or request.at_least)
        if staged is None or are_apart(request.history, staged.history):
            return False
        if request.is_whole and staged.tensors is None:
            return False
        return request.is_met_by(staged.version)

    def _require_open(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            raise errors.ClosedError(
                f"this stager of {self._receiver.store} is closed, or was made before a fork; "
                "make a new one"
            )

    def _wake(self) -> None:
        self._interrupt.set()
        self._receiver.wake()
        self._condition.notify_all()

    def _run(self) -> None:
        while (target := self._next_target()) is not None:
            wanted, after = target
            found = None
            try:
                found = self._wait(after)
                if found is not None and wanted is not None:
                    found = wanted
                if found is None or not self._make_room(found):
                    continue
                self._stage(found, exactly=wanted is not None)
            except errors.SnapshotEvictedError as error:
                self._count("evictions")
                logger.warning("staging was overtaken, starting over: %s", error)
            except errors.StoreReplacedError as error:
                if self._new_history == "refuse":
                    self._note_problem(error, None)
                else:
                    self._start_over(error)
            # Whatever it is must reach who waits in take(), and must not end this thread.
            except Exception as error:  # noqa: BLE001
                if found is not None and wanted is None:
                    found = max(found, self._receiver.seen_version)  # what it was overtaken by
                self._note_problem(error, found)

    def _wait(self, after: int | None) -> int | None:
        """Wait for a version above ``after``; for one that failed before, only after a while."""
        self._forget_trouble_with_the_store()
        with self._condition:
            failed, why = self._problem or (None, None)
            # What does not fit does not fit later either, unless somebody asks for it again.
            retry_s = None if isinstance(why, errors.WeightsMismatchError) else self._retry_s
        if failed is None:
            return self._receiver.wait_for_version(after, None, self._interrupt)
        above = max(failed, after or 0)
        found = self._receiver.wait_for_version(above, retry_s, self._interrupt)
        if found is None and not self._interrupt.is_set():
            found = self._receiver.wait_for_version(after, 0.0)
        return found

    def _start_over(self, why: errors.StoreReplacedError) -> None:
        logger.warning("%s (staging it)", why)
        with self._condition:
            self._receiver.start_over()
            self._after = None
            self._forget_problem()
            if not self._is_taken:
                self._drop()
        self._receiver.record.write()

    def newest_or_none(self) -> int | None:
        """As :meth:`newest`, and None also where the store cannot be read."""
        with contextlib.suppress(errors.DBufferError, OSError):
            return self.newest()
        return None

    def _next_target(self) -> tuple[int | None, int | None] | None:
        """Which version to stage, if it is to be just one, and above which to wait for one."""
        with self._condition:
            # What is taken is in use, and who has waited takes what is ready before it is old.
            self._condition.wait_for(
                lambda: self._is_closed or not (self._is_taken or self._is_answered())
            )
            if self._is_closed:
                return None
            self._interrupt.clear()
            self._attempt_for = self._request
            done = None
            # What is left of the run before says nothing of the versions that are there now.
            if self._staged is not None and self._staged.history == self._receiver.history:
                done = self._staged.version
            exactly = self._request.exactly if self._request is not None else None
            if exactly is not None:
                return exactly, exactly - 1
            return None, self._after if done is None else done

    def _make_room(self, version: int) -> bool:
        """Let go of what was staged before, unless it is wanted or another one is by now."""
        with self._condition:
            if self._is_taken or self._is_closed or self._is_answered():
                return False
            if self._request is not None and self._request.exactly not in (None, version):
                return False
            self._drop()
            self._spent = None
            return True

    def _drop(self) -> None:
        self._staged = None
        self._receiver.record.set(staged_version=None)
        try:
            self._hold.close()
        except (errors.SnapshotEvictedError, errors.VersionRegressedError):
            # Held for longer than the sender waits, or than there was a store: nobody needs it.
            self._stats["evictions"] += 1
            self._receiver.record.set(stats=dict(self._stats))
        except (errors.DBufferError, OSError) as error:
            # It has been let go of all the same; who opens the next version meets this again.
            logger.warning("releasing a version of %s: %s", self._receiver.store, error)

    def _stage(self, version: int, *, exactly: bool) -> None:
        started = time.monotonic()
        with contextlib.ExitStack() as hold:
            timeout_s = self._poll_interval_s
            opened = (
                self._receiver.open(version=version, timeout_s=timeout_s, acknowledge=False)
                if exactly
                else self._receiver.open_seen(version - 1, timeout_s)
            )
            snapshot = hold.enter_context(opened)
            if self._check is not None and snapshot.layout != self._checked:
                self._check(snapshot)
                self._checked = snapshot.layout
            brought = self._bring_in(snapshot)
            if not brought.is_held:
                hold.close()  # it was read: if it was overwritten meanwhile, this says so
            kept = hold.pop_all()
        staged = Staged(
            version=snapshot.version,
            history=snapshot.history,
            layout=snapshot.layout,
            tensors=brought.tensors,
            prepared=brought.prepared,
            num_bytes=brought.num_bytes,
            identity=snapshot.identity,
            duration_s=time.monotonic() - started,
        )
        with self._condition:
            self._hold = kept
            self._staged = staged
            self._forget_problem()
            self._stats["staged"] += 1
            self._stats["staged_bytes"] += staged.num_bytes
            self._stats["stage_s"] += staged.duration_s
            self._receiver.record.set(
                staged_version=staged.version,
                history=staged.history,
                stats=dict(self._stats),
            )
            self._condition.notify_all()
        self._receiver.record.write()

    def _bring_in(self, snapshot: Snapshot) -> _BroughtIn:
        prepared = self._prepare(snapshot) if self._prepare is not None else None
        is_enough = prepared is not None and prepared.is_enough and not self._is_wanted_whole()
        num_bytes = snapshot.layout.num_bytes
        if prepared is not None and is_enough:
            num_bytes = prepared.num_bytes
        if not self._must_copy(is_less_later=prepared is not None and not is_enough):
            snapshot.read_ahead()
            return _BroughtIn(snapshot.tensors, prepared, num_bytes, is_held=True)
        if prepared is not None and is_enough:
            memory = self._memory_of(prepared.staging_bytes)
            copied = prepared.copied_into(memory, snapshot.copy_parts)
            return _BroughtIn(None, copied, num_bytes, is_held=False)
        tensors = snapshot.copy_into(self._memory_of(snapshot.data_bytes))
        prepared = None if prepared is None else prepared.of(tensors)
        return _BroughtIn(tensors, prepared, num_bytes, is_held=False)

    def _is_wanted_whole(self) -> bool:
        with self._condition:
            return self._request is not None and self._request.is_whole

    def _memory_of(self, num_bytes: int) -> torch.Tensor:
        if self._memory is None or self._memory.bytes.numel() != num_bytes:
            if self._memory is not None:
                self._memory.free()  # before the new one is made: never two versions at once
            self._memory = StagingMemory(num_bytes, pinned=self._pin_memory)
        return self._memory.bytes

    def _must_copy(self, *, is_less_later: bool) -> bool:
        if not self.maps_files:  # a snapshot is in memory of its own already
            return self._pin_memory
        return self._pin_memory and not is_less_later if self._copy == "auto" else self._copy

    def _count(self, what: str) -> None:
        with self._condition:
            self._stats[what] += 1
            self._receiver.record.set(stats=dict(self._stats))

    def _forget_trouble_with_the_store(self) -> None:
        """Take it off the record when it has passed: there may be nothing new to stage."""
        record = self._receiver.record.current
        if record.problem is None or record.problem_version is not None:
            return
        self._receiver.wait_for_version(None, 0.0)  # raises while it has not
        with self._condition:
            self._forget_problem()
        self._receiver.record.write()

    def _forget_problem(self) -> None:
        self._problem = None
        self._retry_s = _RETRY_MIN_S
        self._receiver.record.set(problem=None, problem_version=None)

    def _note_problem(self, error: Exception, version: int | None) -> None:
        text = f"version {version}: {type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
        if text != self._receiver.record.current.problem:  # it is tried again, and logged once
            logger.error("cannot stage %s, %s", self._receiver.store, text)
        # Its frames hold on to the mapping of a file that may be long gone.
        traceback.clear_frames(error.__traceback__)
        with self._condition:
            self._stats["failures"] += 1
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
            # Who asked while it was tried may have mended it before that: the next try tells.
            if self._request is None or self._request is self._attempt_for:
                self._problem = (version, error)
            # What is staged stays: the problem may be the store's, or a later version's.
            self._receiver.record.set(
                problem=text,
                problem_version=version,
                history=self._receiver.history if self._staged is None else self._staged.history,
                stats=dict(self._stats),
            )
            self._condition.notify_all()
        self._receiver.record.write()
        if version is None:
            # The store itself: looked at as often as it would be anyway, once it is whole again.
            self._interrupt.wait(min(self._retry_s, max(self._poll_interval_s, _RETRY_MIN_S)))
