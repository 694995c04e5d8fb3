"""`OwnRecord`: a receiver's record in memory; `RecordFile`: a record with a file in the store."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dbuffer import errors
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import ReceiverRecord, encode
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.messages import described
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.liveness import Process, owner_fields

logger = logging.getLogger(__name__)

_of_process: weakref.WeakValueDictionary[Path, RecordFile] = weakref.WeakValueDictionary()
"""Record files of this process's receivers. If a record in the store names this process but has no
entry here, its receiver has ended."""


class PublishedRecord:
    """File of a receiver's record. Its lock or its time shows that the receiver lives."""

    def __init__(self, store: DoubleBuffer, receiver_id: str, token: str) -> None:
        self.path = store.record_path(receiver_id, token)
        self.record: ReceiverRecord | None = None
        self._store = store
        self._file: Descriptor | None = None

    def put(self, record: ReceiverRecord) -> None:
        self._file = self._store.medium.publish_file(
            self.path, encode(record), shows_life=True, before=self._file
        )
        self.record = record

    def show_life(self) -> None:
        """Touch the record's file, unless its lock already shows that the receiver lives."""
        if self.record is None or not self._store.medium.reaches_other_hosts:
            return
        # Put the record back if another host removed it, because this receiver seemed dead.
        if not self.is_there():
            self.put(self.record)
            return
        with contextlib.suppress(OSError):  # the network is down
            os.utime(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_there(self) -> bool:
        if self._file is None or not self._file.is_open:  # closed in a forked child
            return False
        with contextlib.suppress(OSError):
            filesystem.refresh(self.path.parent)
        return filesystem.is_at(self._file, self.path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if self.is_there():
                self.path.unlink()
        self.close()


class OwnRecord(ProcessBound):
    """Record of a receiver of this process, in memory."""

    def __init__(self, receiver_id: str) -> None:
        super().__init__()
        self._lock = threading.Lock()
        fields: dict[str, Any] = dict.fromkeys(ReceiverRecord.__struct_fields__)
        fields |= dict.fromkeys(("is_attestable", "is_ephemeral", "is_relayed", "has_ended"), False)
        fields |= {"runs": [], "metadata": {}, "stats": {}, "every": 1, "when": {}}
        fields |= {"receiver": receiver_id, "token": secrets.token_hex(8)}
        self._record = ReceiverRecord(**fields | owner_fields() | {"updated_at": time.time()})

    @property
    def current(self) -> ReceiverRecord:
        return self._record

    def rename(self, receiver_id: str) -> None:
        """Change the receiver's id.

        A `RecordFile` also removes the file under the earlier id. An object in a bucket stays.
        """
        self.set(receiver=receiver_id)

    def remove(self) -> None:
        """Remove the record's file, if any, until the next write."""

    def set(self, **changes: Any) -> None:
        with self._lock:
            self._record = _anew(self._record, **changes)

    def count(self, **amounts: float) -> None:
        with self._lock:
            stats = dict(self._record.stats)
            for name, amount in amounts.items():
                stats[name] = stats.get(name, 0) + amount
            self._record = _anew(self._record, stats=stats)

    def write(self, **changes: Any) -> None:
        """Change fields of the record in memory.

        A `RecordFile` also writes the record's file. A mirror that reads a bucket puts its record
        into the bucket later, with the records of its local store.
        """
        self.set(**changes)

    def write_problem(self, error: Exception, version: VersionId | None) -> None:
        self.write(problem=described(error), problem_version=version)


class RecordFile(OwnRecord):
    """Record of a receiver of this process, and the record's file in the store.

    If the store cannot be written to, a warning is logged once, and the receiver's heartbeat tries
    again.
    """

    def __init__(self, store: Path, receiver_id: str) -> None:
        super().__init__(receiver_id)
        self._store = DoubleBuffer(store, allow_shared_store=True)
        self._directory = store / RECEIVERS_DIRECTORY
        # A write to the file holds this lock, and not `_lock`: the write may hang while the network
        # is down, but `set`, which needs `_lock`, must not hang while an engine is paused.
        self._file_lock = threading.Lock()
        self._can_write = True
        self._is_closed = False
        self._file: PublishedRecord | None = None
        self._heartbeat: threading.Event | None = None

    @property
    def path(self) -> Path:
        return self._store.record_path(self._record.receiver, self._record.token)

    def rename(self, receiver_id: str) -> None:
        self.remove()
        super().rename(receiver_id)

    @property
    def is_open(self) -> bool:
        """Whether the record has a file in the store, and is neither closed nor removed."""
        return self._file is not None

    def write(self, **changes: Any) -> None:
        """Change fields, and replace the record's file.

        If the store is missing, a later write makes the file.
        """
        self.set(**changes)
        # Not Path.is_dir(), which raises some errors of network mounts.
        if self._file is None and not os.path.isdir(self._directory):  # noqa: PTH112
            return
        with self._file_lock:
            if self._is_closed:
                return
            try:
                self._write()
            except (errors.StoreAccessError, errors.StoreNotFoundError) as error:
                if self._can_write:
                    receiver = self._record.receiver
                    logger.warning("receiver %s cannot acknowledge: %s", receiver, str(error))
                self._can_write = False
            # The heartbeat touches the file, or writes it as soon as the store can be written.
            needs_heartbeat = self._store.medium.reaches_other_hosts or not self._can_write
            if self._heartbeat is None and needs_heartbeat:
                try:
                    self._heartbeat = _start_heartbeat(self._beat)
                except RuntimeError as error:  # the next write tries again
                    message = "receiver %s has no heartbeat, and may count as dead: %s"
                    log_once(logger, message, self._record.receiver, str(error))

    def close(self) -> None:
        """Record that the receiver has ended.

        The file stays in the store and is not written again.
        """
        if self._is_inherited:
            return  # the parent's heartbeat may have held the lock during the fork
        with self._file_lock:
            self._is_closed = True
            self._stop_heartbeat()
            if self._file is not None:
                with contextlib.suppress(errors.StoreAccessError, errors.StoreNotFoundError):
                    if self._file.is_there():
                        self._file.put(_anew(self._record, has_ended=True))
                self._file.close()
                self._file = None

    def remove(self) -> None:
        with self._file_lock:
            self._stop_heartbeat()
            if self._file is not None:
                self._file.remove()
                self._file = None

    def _write(self) -> None:
        record = self._record
        if self._file is None:
            _of_process[self.path] = self
            _remove_ended(self._store, record)
            self._file = PublishedRecord(self._store, record.receiver, record.token)
        self._file.put(record)
        self._can_write = True

    def _beat(self) -> None:
        with self._file_lock, contextlib.suppress(errors.DBufferError):
            if self._heartbeat is None:  # closed or removed meanwhile
                return
            if not self._can_write:
                self._write()
            elif self._file is not None:
                self._file.show_life()

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.set()
            self._heartbeat = None


def _anew(record: ReceiverRecord, **changes: Any) -> ReceiverRecord:
    # `updated_at` tells which of two records is later, so it goes up even if the clock is set back.
    updated_at = max(time.time(), math.nextafter(record.updated_at, math.inf))
    return replace(record, **changes, updated_at=updated_at)


def _remove_ended(store: DoubleBuffer, newcomer: ReceiverRecord) -> None:
    """Remove the records of ended receivers that had the id of a new receiver.

    Otherwise senders would wait for the ended receivers.
    """
    for record in store.records_of(newcomer.receiver):
        if record.token == newcomer.token:
            continue
        if _has_ended(store, record):
            with contextlib.suppress(OSError):
                store.record_path(record.receiver, record.token).unlink()
        elif newcomer.part_of is None:  # for a rank, the engine's own record already warns
            logger.warning(
                "%s already has a receiver with the id %s (process %d on %s): a sender that waits "
                "for this id waits for both receivers; give each receiver its own id",
                store.root,
                record.receiver,
                record.pid,
                record.host,
            )


def _has_ended(store: DoubleBuffer, record: ReceiverRecord) -> bool:
    this_process, process = Process.here(), Process.of(record)
    if process == this_process:
        file = _of_process.get(store.record_path(record.receiver, record.token))
        return file is None or not file.is_open
    if not store.may_live(record):
        return True
    # On a network mount, records have no locks. There an equal host name and process id mean that
    # this container was restarted. If the earlier process lives after all, its next heartbeat
    # writes its record again.
    is_alike = (process.host, process.pid) == (this_process.host, this_process.pid)
    return is_alike and store.medium.reaches_other_hosts and not record.is_relayed


def _start_heartbeat(beat: Callable[[], None]) -> threading.Event:
    """Call a method every `Timing.heartbeat_s` until its object is dropped.

    Return an event that stops the calls.
    """
    stop = threading.Event()
    method = weakref.WeakMethod(beat)

    def run() -> None:
        while not stop.wait(TIMING.heartbeat_s):
            if (beat_now := method()) is None:
                return
            with contextlib.suppress(MemoryError):  # the next heartbeat may find memory
                beat_now()
            del beat_now

    threading.Thread(target=run, name="dbuffer-heartbeat", daemon=True).start()
    return stop
