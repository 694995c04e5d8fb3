"""`AcknowledgementRelay`: copies receivers' records from a local store to the one it mirrors.

Between two stores the local one's records are read in its directory, and written, a file each, into
that of the remote one.

A sender waits for receivers by the records in its own store; a mirror's readers have theirs in the
local store. Relays chain as mirrors do: one of the next store finds these records again. A relay
keeps a record alive for as long as the receiver itself may live; then it copies the record's last
state, and with it that the receiver has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from msgspec.structs import replace

from dbuffer.errors import DBufferError, StoreNotFoundError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.runtime.timing import TIMING, doubling
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import PublishedRecord
from dbuffer.store.watcher import wait_and_clear

logger = logging.getLogger(__name__)


_Key = tuple[str, str]
"""Id and token of a receiver."""
RELAY_S = 0.05
"""Interval at which local records are read; only changed ones go over the network."""


class RecordReader(Protocol):
    """Records of receivers, as `DoubleBuffer` reads those of a store."""

    def receivers(self) -> list[ReceiverRecord]: ...

    def may_live(self, record: ReceiverRecord) -> bool: ...


class RecordWriter(Protocol):
    """Place that records are relayed to."""

    @property
    def name(self) -> str:
        """Name for the log."""

    def write(self, records: Collection[ReceiverRecord]) -> None:
        """Let these relayed records be there, and no others of this writer."""

    def close(self) -> None:
        """Write what is left to be written, and stop showing life; the records stay."""


class AcknowledgementRelay:
    """Relays in a thread of its own, from construction to :meth:`close`.

    Args:
        reader: reads the records.
        writer: writes them.
        interval_s: interval at which they are read. Default: that of a store's.
    """

    def __init__(
        self, reader: RecordReader, writer: RecordWriter, *, interval_s: float | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._interval_s = RELAY_S if interval_s is None else interval_s
        self._records: list[ReceiverRecord] = []
        self._problem: str | None = None
        self._is_closed = False
        self._is_woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Read records soon, then at intervals that double: a version was just published."""
        self._is_woken.set()

    def close(self) -> None:
        """Relay what there is, and stop."""
        self._is_closed = True
        self._is_woken.set()
        self._thread.join()

    def _run(self) -> None:
        pauses = doubling(self._interval_s, self._interval_s)
        due = time.monotonic() + next(pauses)
        while not self._is_closed:
            if wait_and_clear(self._is_woken, max(0.0, due - time.monotonic())):
                first_s = min(TIMING.bucket_expect_s, self._interval_s)
                pauses = doubling(first_s, self._interval_s)
                due = min(due, time.monotonic() + next(pauses))  # versions may come fast
            else:
                self._try(self._relay)
                due = time.monotonic() + next(pauses)
        self._try(self._relay)
        self._try(self._writer.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._problem = None
        # The last two: no memory, or no more threads, for now.
        except (DBufferError, OSError, MemoryError, RuntimeError) as error:
            if str(error) != self._problem:  # logged once; it is tried again
                message = "cannot relay acknowledgements to %s: %s"
                logger.warning(message, self._writer.name, str(error))
            self._problem = str(error)

    def _relay(self) -> None:
        # Before records are read: a record that is read after its receiver's end is the last one.
        ended = {_key(record) for record in self._records if not self._reader.may_live(record)}
        self._records = self._reader.receivers()
        self._writer.write([_relayed(record, ended) for record in self._records])


class StoreRecords:
    """Relayed records in a store, each in a file of its own."""

    def __init__(self, store: DoubleBuffer) -> None:
        self._store = DoubleBuffer(store.root, allow_shared_store=True)
        self._files: dict[_Key, PublishedRecord] = {}
        self._touched_at = time.monotonic()

    @property
    def name(self) -> str:
        return str(self._store.root)

    def write(self, records: Collection[ReceiverRecord]) -> None:
        by_key = {_key(record): record for record in records}
        for key in self._files.keys() - by_key.keys():
            self._files.pop(key).remove()
        # Not Path.is_dir(), which raises what a network mount may answer.
        if not os.path.isdir(self._store.root / RECEIVERS_DIRECTORY):  # noqa: PTH112
            return
        for key, record in by_key.items():
            self._update(self._files.setdefault(key, PublishedRecord(self._store, *key)), record)
        if time.monotonic() - self._touched_at > TIMING.heartbeat_s:
            self._touched_at = time.monotonic()
            for file in self._files.values():
                if file.record is not None and not file.record.has_ended:
                    file.show_life()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _update(self, file: PublishedRecord, record: ReceiverRecord) -> None:
        """Write a record, if more has changed in it than its time."""
        before = file.record
        if before is not None and record == replace(before, updated_at=record.updated_at):
            return
        with contextlib.suppress(StoreNotFoundError):  # the store is being removed
            file.put(record)
            if record.has_ended:
                file.close()


def _key(record: ReceiverRecord) -> _Key:
    return record.receiver, record.token


def _relayed(record: ReceiverRecord, ended: Collection[_Key]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    has_ended = record.has_ended or _key(record) in ended
    return replace(record, held=None, stats={}, is_relayed=True, has_ended=has_ended)
