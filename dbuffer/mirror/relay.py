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
from collections.abc import Collection
from typing import TypeAlias

from msgspec.structs import replace

from dbuffer.errors import StoreNotFoundError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.mirror.bucket_records import BucketRecords, ReceiversOfBucket
from dbuffer.runtime.timing import TIMING, doubling
from dbuffer.runtime.trouble import RetryLoop, message_of
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import PublishedRecord
from dbuffer.store.watcher import wait_and_clear

logger = logging.getLogger(__name__)


_Key = tuple[str, str]
"""Id and token of a receiver."""
RELAY_S = 0.05
"""Interval at which local records are read; only changed ones go over the network."""


class AcknowledgementRelay:
    """Relays in a thread of its own, from construction to :meth:`close`.

    Args:
        reader: reads the records.
        writer: writes them.
        interval_s: interval at which they are read. Default: by where they are.
    """

    def __init__(
        self,
        reader: DoubleBuffer | ReceiversOfBucket,
        writer: RecordWriter,
        *,
        interval_s: float | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        of_bucket = isinstance(reader, ReceiversOfBucket)
        self._interval_s = interval_s or (TIMING.bucket_list_s if of_bucket else RELAY_S)
        self._records: list[ReceiverRecord] = []
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
        loop = _RelayLoop(self._writer.name)
        pauses = doubling(self._interval_s, self._interval_s)
        due = time.monotonic() + next(pauses)
        while not self._is_closed:
            if wait_and_clear(self._is_woken, max(0.0, due - time.monotonic())):
                first_s = min(TIMING.bucket_expect_s, self._interval_s)
                pauses = doubling(first_s, self._interval_s)
                if loop.error is None:
                    due = min(due, time.monotonic() + next(pauses))  # versions may come fast
            else:
                with loop.attempt():
                    self._relay()
                    loop.succeeded(f"relaying acknowledgements to {self._writer.name}")
                pause_s = next(pauses)
                due = time.monotonic() + (pause_s if loop.error is None else loop.retry_s)
        for last in (self._relay, self._writer.close):
            with loop.attempt():
                last()

    def _relay(self) -> None:
        # Before records are read: a record that is read after its receiver's end is the last one.
        ended = {_key(record) for record in self._records if not self._reader.may_live(record)}
        self._records = self._reader.receivers()
        self._writer.write([_relayed(record, ended) for record in self._records])


class _RelayLoop(RetryLoop):
    """Attempts at relaying records to a place of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(logger)
        self._name = name

    def _fail(self, error: Exception) -> None:
        to = f"cannot relay acknowledgements to {self._name}"
        self._back_off(error, f"{to}: {message_of(error)}")


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
        """Let these relayed records be there, and no others of this writer."""
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
        """Stop showing life; the records stay."""
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


RecordWriter: TypeAlias = StoreRecords | BucketRecords
"""Place that records are relayed to."""


def _key(record: ReceiverRecord) -> _Key:
    return record.receiver, record.token


def _relayed(record: ReceiverRecord, ended: Collection[_Key]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    has_ended = record.has_ended or _key(record) in ended
    return replace(record, held=None, stats={}, is_relayed=True, has_ended=has_ended)
