"""`RecordFile`: what one receiver says of itself in the store.

A record has one living owner. By what sign others know that it lives, a lock or a file that is
touched now and then, is the medium's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dbuffer import errors
from dbuffer.format.manifest import ReceiverRecord, encode
from dbuffer.format.places import RECEIVERS_DIRECTORY, SCRATCH_DIRECTORY
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.liveness import HEARTBEAT_S, Process, owner_fields
from dbuffer.store.medium import RecordOwner

logger = logging.getLogger(__name__)

MAX_PROBLEM_CHARACTERS = 2000

_MAX_TRIES = 100
"""How often a record may be replaced by others while it is claimed."""

_owned: weakref.WeakValueDictionary[str, KeptFile] = weakref.WeakValueDictionary()
"""What this process owns: a record left behind by a receiver that it has dropped is nobody's."""


class Spare(NamedTuple):
    """The name that a receiver takes if its own is taken."""

    receiver: str
    part_of: str | None = None


class KeptFile:
    """The file of a record, and the sign that somebody stands behind it."""

    def __init__(self, store: Path, receiver_id: str) -> None:
        self._store = DoubleBuffer(store, allow_shared_store=True)
        self._receiver_id = receiver_id
        self.directory = store / RECEIVERS_DIRECTORY
        self.path = self._store.record_path(receiver_id)
        self._scratch = store / SCRATCH_DIRECTORY
        self._pid = os.getpid()
        self._was_ours = False

    @functools.cached_property
    def sign(self) -> RecordOwner:
        return self._store.medium.record_owner(self.path, self._scratch)

    def write(self, record: ReceiverRecord) -> None:
        """Replace the file.

        Raises:
            StoreBusyError: another living receiver has the name.
        """
        if self.sign.is_ours():
            self._put(record, only_new=False)
        else:
            self._claim(record)
        self._was_ours = True

    def let_go(self, record: ReceiverRecord) -> None:
        """Say, where no lock does, that the name may be taken; the file stays."""
        with contextlib.suppress(errors.StoreAccessError, errors.StoreNotFoundError):
            if not self.sign.is_lock and self.sign.is_ours():
                self._put(dataclasses.replace(record, owner=None), only_new=False)
        self.sign.close()

    def remove(self) -> None:
        if self._pid != os.getpid():  # a fork's parent is still there
            return
        with contextlib.suppress(OSError):
            if self.sign.is_ours():
                self.path.unlink()
        self.sign.close()

    def _put(self, record: ReceiverRecord, *, only_new: bool) -> bool:
        return self.sign.put(encode(record), only_new=only_new)

    def _claim(self, record: ReceiverRecord) -> None:
        for _ in range(_MAX_TRIES):
            try:
                with filesystem.os_errors("look at", self.path):
                    filesystem.refresh(self.directory)
                    old = filesystem.open_regular(self.path, os.O_RDONLY, owner_only=False)
            except errors.StoreNotFoundError:
                if self._put(record, only_new=True):
                    return
                continue
            with old:
                if self._is_free(old, record):
                    self._put(record, only_new=False)
                    return
        raise errors.StoreAccessError(f"{self.path} is constantly replaced by others")

    def _is_free(self, old: Descriptor, record: ReceiverRecord) -> bool:
        """Whether nobody owns what has the name; False if it changed meanwhile.

        Raises:
            StoreBusyError: somebody does.
        """
        found = None
        # Whoever wrote what is damaged or insecure, it is no receiver.
        with contextlib.suppress(errors.StoreCorruptError, errors.StoreAccessError):
            found = self._store.receiver(self._receiver_id)
        may_be_owned = self._may_be_owned(found, record)
        # An interrupt may have left a lock behind in this process, whose records it knows itself.
        is_of_this_process = found is not None and Process.of(found) == Process.here()
        is_free = is_of_this_process and not may_be_owned
        is_free = is_free or self.sign.is_free(old, may_be_owned=may_be_owned)
        if not filesystem.is_at(old, self.path):
            return False
        if is_free:
            return True
        who = "another process" if found is None else f"process {found.pid} on {found.host}"
        raise errors.StoreBusyError(
            f"{who} has a receiver {self._receiver_id!r} of {self.directory.parent} open; two "
            "would acknowledge for each other: close that one, or give this one another name"
        )

    def _may_be_owned(self, found: ReceiverRecord | None, record: ReceiverRecord) -> bool:
        if found is None or found.owner in (None, record.owner):
            return False
        if Process.of(found) == Process.here():
            return found.owner in _owned
        return self._store.may_live(found) and not self._is_of_an_earlier_start(found, record)

    def _is_of_an_earlier_start(self, found: ReceiverRecord, record: ReceiverRecord) -> bool:
        """Whether a container wrote it before it was restarted: its host name and process id stay.

        If both processes live, each in a container of its own, the later one has the name: the
        earlier one is refused with its next write, and does not take it back.
        """
        is_alike = (found.host, found.pid) == (record.host, record.pid)
        return is_alike and Process.of(found) != Process.of(record) and not self._was_ours


class RecordFile:
    """``receivers/ID.json``, for the sender, for ``dbuffer status`` and for who drives an engine.

    A store that cannot be written to takes no record: that is logged once, and weights flow on.
    """

    def __init__(self, store: Path, receiver_id: str, *, spare: Spare | None = None) -> None:
        self.spare = spare
        """Taken, and told of, where the name is another living receiver's."""
        self._store = store
        self._lock = threading.Lock()
        self._can_write = True
        self._kept = KeptFile(store, receiver_id)
        self._heartbeat: threading.Event | None = None
        self._record = ReceiverRecord(
            receiver=receiver_id,
            applied_version=None,
            held_version=None,
            updated_at=time.time(),
            owner=secrets.token_hex(8),
            **owner_fields(),  # type: ignore[arg-type]  # each under its name
        )

    @property
    def current(self) -> ReceiverRecord:
        return self._record

    def set(self, **changes: Any) -> None:
        """Change fields of the record; :meth:`write` makes them seen."""
        with self._lock:
            self._record = dataclasses.replace(self._record, **changes)

    def count(self, **amounts: float) -> None:
        """Add to the record's stats; :meth:`write` makes them seen."""
        with self._lock:
            stats = dict(self._record.stats)
            for name, amount in amounts.items():
                stats[name] = stats.get(name, 0) + amount
            self._record = dataclasses.replace(self._record, stats=stats)

    def write(self, **changes: Any) -> None:
        """Change fields and replace the file; where there is no store yet, a later write does."""
        self.set(**changes)
        # Not Path.is_dir(), which raises what a network mount may answer.
        if not os.path.isdir(self._kept.directory):  # noqa: PTH112
            return
        try:
            with self._lock:
                self._record = dataclasses.replace(self._record, updated_at=time.time())
                self._write()
        except (errors.StoreAccessError, errors.StoreNotFoundError) as error:
            if self._can_write:
                receiver = self._record.receiver
                logger.warning("receiver %s cannot acknowledge: %s", receiver, error)
            self._can_write = False
        else:
            self._can_write = True

    def write_problem(self, error: Exception, version: int | None, **changes: Any) -> None:
        """Say why a version cannot be applied; None: the store itself is the problem."""
        text = f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
        self.write(problem=text, problem_version=version, **changes)

    def _write(self) -> None:
        _owned[str(self._record.owner)] = self._kept
        try:
            self._kept.write(self._record)
        except errors.StoreBusyError as error:
            if self.spare is None:
                raise
            logger.warning("%s; this one goes by %s", error, self.spare.receiver)
            changes = self.spare._asdict() | {"is_ephemeral": True}
            self._record = dataclasses.replace(self._record, **changes)
            self.spare = None
            self._kept = KeptFile(self._store, self._record.receiver)
            self._write()
            return
        if not self._kept.sign.is_lock and self._heartbeat is None:
            try:
                self._heartbeat = _start_heartbeat(self._touch)
            except RuntimeError as error:  # no more threads: each write shows life, and tries again
                message = "no heartbeat of receiver %s (%s): taken for dead if it writes nothing"
                log_once(logger, message, self._record.receiver, str(error))

    def _touch(self) -> None:
        with self._lock:
            self._kept.sign.touch()

    def close(self) -> None:
        """Let go of the name; the file stays, and may be written again."""
        with self._lock:
            self._stop()
            self._kept.let_go(self._record)

    def remove(self) -> None:
        with self._lock:
            self._stop()
            self._kept.remove()

    def _stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.set()
            self._heartbeat = None
        _owned.pop(str(self._record.owner), None)


def _start_heartbeat(touch: Callable[[], None]) -> threading.Event:
    """Call a method every :data:`HEARTBEAT_S` while its object is in use; what ends that."""
    stop = threading.Event()
    method = weakref.WeakMethod(touch)

    def beat() -> None:
        while not stop.wait(HEARTBEAT_S):
            if (found := method()) is None:
                return
            with contextlib.suppress(MemoryError):  # the next one may find some
                found()
            del found

    threading.Thread(target=beat, name="dbuffer-heartbeat", daemon=True).start()
    return stop
