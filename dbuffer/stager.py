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
from typing import Any, Literal

import torch

from dbuffer.buffer import DoubleBuffer
from dbuffer.errors import (
    ClosedError,
    DBufferError,
    OptionError,
    SnapshotEvictedError,
    VersionTimeoutError,
)
from dbuffer.layout import Layout
from dbuffer.receiver import WeightReceiver
from dbuffer.snapshot import Snapshot

logger = logging.getLogger(__name__)

Check = Callable[[Snapshot], None]

_RETRY_MIN_S = 0.5
_RETRY_MAX_S = 30.0
"""A version that could not be staged is tried again, at growing intervals, until a newer one comes:
a network's caches and a full disk's neighbours do change."""

MAX_PROBLEM_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that is ready."""

    version: int
    layout: Layout
    tensors: Mapping[str, torch.Tensor]
    """In main memory; valid until it is given back."""
    num_bytes: int
    identity: str
    """Tells versions of one number in two stores apart."""
    duration_s: float
    """What it took to get it ready."""


class StagingMemory:
    """Memory for one version; page-locked for a GPU to copy from, if it is to be."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._is_pinned = pinned
        if pinned:
            # Not torch's own pinned memory: that rounds up to a power of two, up to twice as much.
            _check_cuda(_cuda().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))

    def free(self) -> None:
        """Give it back to the system."""
        if self._is_pinned:
            _check_cuda(_cuda().cudaHostUnregister(self.bytes.data_ptr()))
            self._is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda(status: int) -> None:
    if int(status) != 0:
        raise MemoryError(f"memory for staging could not be page-locked: CUDA error {status}")


class Stager:
    """Follows a store in a thread of its own, and has its newest version ready.

    Beyond the store itself it takes no memory when it maps, and one version's when it copies.

    Args:
        store: the store's directory; it may come later.
        receiver_id: the name of its record in the store.
        part_of: the receiver that acknowledges, where this is one rank of an engine.
        check: called with a version whenever its layout is another one than before, in the
            stager's thread. What it raises makes the version unusable, and reaches who takes it.
        copy: copy into memory of its own. ``"auto"``: if ``pin_memory``. On a network mount a
            version is read into memory of its own in any case.
        pin_memory: that memory is page-locked, for a device to copy from.
        poll_interval_s, verify, num_threads, allow_shared_store: as for a `WeightReceiver`.

    Raises:
        OptionError: an option is not what it may be.
    """

    def __init__(
        self,
        store: str,
        *,
        receiver_id: str,
        part_of: str | None = None,
        check: Check | None = None,
        copy: bool | Literal["auto"] = "auto",
        pin_memory: bool = False,
        poll_interval_s: float = 1.0,
        verify: bool | Literal["auto"] = "auto",
        num_threads: int | None = None,
        allow_shared_store: bool = False,
    ) -> None:
        if copy not in (True, False, "auto"):
            raise OptionError(f"copy is {copy!r}, and may be True, False or 'auto'")
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
        self._checked: Layout | None = None
        self._copy = copy
        self._pin_memory = pin_memory
        self._poll_interval_s = poll_interval_s
        self._memory: StagingMemory | None = None
        self._hold = contextlib.ExitStack()
        self._spent: Mapping[str, torch.Tensor] | None = None
        self._pid = os.getpid()
        # All that follows is guarded by the condition.
        self._condition = threading.Condition()
        self._interrupt = threading.Event()
        self._is_closed = False
        self._after: int | None = None
        self._request: tuple[int | None, int] | None = None
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
        self._receiver.record.set(part_of=part_of, stats=self._stats)
        self._receiver.record.write()
        self._thread = threading.Thread(target=self._run, name="dbuffer-stager", daemon=True)
        self._thread.start()

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self._receiver.store

    def newest(self) -> int | None:
        """The store's newest version; None if there is no store, or nothing in it."""
        if not self._store.exists():
            return None
        pointer = self._store.newest_pointer(not_below=0)
        return None if pointer is None else pointer.version

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes staged, seconds that took, evictions, failures."""
        with self._condition:
            return dict(self._stats)

    def take(
        self, version: int | None = None, *, at_least: int | None = None, timeout_s: float
    ) -> Staged:
        """Wait until a version is ready, and keep it. Nothing else is staged before it comes back.

        Args:
            version: exactly this one.
            at_least: or this one or a later one, whichever is ready. Default: the one that is the
                newest now.
            timeout_s: how long to wait.

        Raises:
            VersionTimeoutError: it was not ready in time.
            DBufferError, OSError: what is wrong with the version, or with the store.
        """
        with self._condition:
            self._require_open()
            at_least = version or at_least or self.newest() or 1
            self._problem = None  # what was wrong may have been mended since
            if self._after is not None and self._after >= at_least:
                self._after = at_least - 1  # it was applied before, and is wanted again
            self._request = version, at_least
            try:
                self._wake()
                self._condition.wait_for(lambda: self._is_closed or self._is_answered(), timeout_s)
                self._require_open()
                if not self._is_answered():
                    raise VersionTimeoutError(
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

    def give_back(self, *, applied: int | None = None) -> None:
        """Done with what was taken; versions up to ``applied`` need not be staged again."""
        with self._condition:
            self._is_taken = False
            if applied is not None:
                self._after = applied
                if self._staged is not None and self._staged.version <= applied:
                    # Unmapping it takes 17 ms a GB, for which the engine need not wait.
                    self._spent = self._staged.tensors
                    self._drop()
                    self._receiver.record.write()
            self._condition.notify_all()

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
        self._receiver.close()
        self._receiver.record.remove()
        if self._memory is not None:
            self._memory.free()

    def _is_answered(self) -> bool:
        """Whether somebody waits for what is staged, or for what could not be."""
        if self._request is None:
            return False
        exactly, at_least = self._request
        found = self._staged.version if self._staged is not None else None
        if self._problem is not None:
            found = self._problem[0] or at_least
        if found is None:
            return False
        return found == exactly if exactly is not None else found >= at_least

    def _require_open(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            raise ClosedError(
                f"this stager of {self._receiver.store} is closed, or was made before a fork; "
                "make a new one"
            )

    def _wake(self) -> None:
        """Let the thread look again, wherever it waits."""
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
            except SnapshotEvictedError as error:
                self._count("evictions")
                logger.warning("staging was overtaken, starting over: %s", error)
            # Whatever it is must reach who waits in take(), and must not end this thread.
            except Exception as error:  # noqa: BLE001
                self._note_problem(error, found)

    def _wait(self, after: int | None) -> int | None:
        """Wait for a version above ``after``; for one that failed before, only after a while."""
        with self._condition:
            failed = self._problem[0] if self._problem is not None else None
            retry_s = self._retry_s
        if failed is None:
            return self._receiver.wait_for_version(after, None, self._interrupt)
        above = max(failed, after or 0)
        found = self._receiver.wait_for_version(above, retry_s, self._interrupt)
        if found is None and not self._interrupt.is_set():
            found = self._receiver.wait_for_version(after, 0.0)
        return found

    def newest_or_none(self) -> int | None:
        """As :meth:`newest`, and None also where the store cannot be read."""
        with contextlib.suppress(DBufferError, OSError):
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
            done = self._staged.version if self._staged else None
            exactly = self._request[0] if self._request is not None else None
            if exactly is not None:
                return exactly, exactly - 1
            return None, self._after if done is None else done

    def _make_room(self, version: int) -> bool:
        """Let go of what was staged before, unless it is wanted or another one is by now."""
        with self._condition:
            if self._is_taken or self._is_closed or self._is_answered():
                return False
            if self._request is not None and self._request[0] not in (None, version):
                return False
            self._drop()
            self._spent = None
            return True

    def _drop(self) -> None:
        self._staged = None
        self._receiver.record.set(staged_version=None)
        try:
            self._hold.close()
        except SnapshotEvictedError:
            # Held for longer than the sender waits: its bytes are whole, and nobody needs them.
            self._stats["evictions"] += 1
            self._receiver.record.set(stats=dict(self._stats))
        except (DBufferError, OSError) as error:
            # It has been let go of all the same; who opens the next version meets this again.
            logger.warning("letting go of a version of %s: %s", self._receiver.store, error)

    def _stage(self, version: int, *, exactly: bool) -> None:
        started = time.monotonic()
        with contextlib.ExitStack() as hold:
            snapshot = hold.enter_context(
                self._receiver.open(
                    None if exactly else version - 1,
                    version=version if exactly else None,
                    timeout_s=self._poll_interval_s,
                    acknowledge=False,
                )
            )
            if self._check is not None and snapshot.layout != self._checked:
                self._check(snapshot)
                self._checked = snapshot.layout
            tensors = self._bring_in(snapshot)
            if tensors is not snapshot.tensors:
                hold.close()  # it was read: if it was overwritten meanwhile, this says so
            kept = hold.pop_all()
        staged = Staged(
            version=snapshot.version,
            layout=snapshot.layout,
            tensors=tensors,
            num_bytes=sum(spec.num_bytes for spec in snapshot.specs),
            identity=snapshot.identity,
            duration_s=time.monotonic() - started,
        )
        with self._condition:
            self._hold = kept
            self._staged = staged
            self._problem = None
            self._retry_s = _RETRY_MIN_S
            self._stats["staged"] += 1
            self._stats["staged_bytes"] += staged.num_bytes
            self._stats["stage_s"] += staged.duration_s
            self._receiver.record.set(
                staged_version=staged.version,
                problem=None,
                problem_version=None,
                stats=dict(self._stats),
            )
            self._condition.notify_all()
        self._receiver.record.write()

    def _bring_in(self, snapshot: Snapshot) -> Mapping[str, torch.Tensor]:
        if not self._must_copy():
            snapshot.read_ahead()
            return snapshot.tensors
        if self._memory is None or self._memory.bytes.numel() != snapshot.data_bytes:
            if self._memory is not None:
                self._memory.free()  # before the new one is made: never two versions at once
            self._memory = StagingMemory(snapshot.data_bytes, pinned=self._pin_memory)
        return snapshot.copy_into(self._memory.bytes)

    def _must_copy(self) -> bool:
        if self._store.mount.is_network:  # a snapshot is in memory of its own already
            return self._pin_memory
        return self._pin_memory if self._copy == "auto" else self._copy

    def _count(self, what: str) -> None:
        with self._condition:
            self._stats[what] += 1
            self._receiver.record.set(stats=dict(self._stats))

    def _note_problem(self, error: Exception, version: int | None) -> None:
        text = f"version {version}: {type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
        if text != self._receiver.record.current.problem:  # it is tried again, and told once
            logger.error("cannot stage %s, %s", self._receiver.store, text)
        # Its frames hold on to the mapping of a file that may be long gone.
        traceback.clear_frames(error.__traceback__)
        with self._condition:
            self._stats["failures"] += 1
            self._problem = (version, error)
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
            self._receiver.record.set(
                staged_version=None,
                problem=text,
                problem_version=version,
                stats=dict(self._stats),
            )
            self._condition.notify_all()
        self._receiver.record.write()
        if version is None:
            self._interrupt.wait(self._retry_s)
