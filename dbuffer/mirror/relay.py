"""`AcknowledgementRelay`: copies receivers' records from a mirror's target to its source.

In a store each record has a file of its own (`StoreRecords`). In a bucket each mirror has one
object (:mod:`.bucket_records`).
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
from dbuffer.mirror.bucket_records import BucketRecords, ReceiverKey, ReceiversOfBucket, key_of
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import PublishedRecord

logger = logging.getLogger(__name__)

RELAY_S = 0.05
"""Interval at which a store's records are read; only changed ones go over the network."""


class StoreRecords:
    """Relayed records in a store, each in a file of its own."""

    def __init__(self, store: DoubleBuffer) -> None:
        self._store = DoubleBuffer(store.root, allow_shared_store=True)
        self._files: dict[ReceiverKey, PublishedRecord] = {}
        self._touched_at = time.monotonic()

    @property
    def name(self) -> str:
        return str(self._store.root)

    def write(self, records: Collection[ReceiverRecord]) -> None:
        """Let these relayed records be there, and no others of this writer."""
        by_key = {key_of(record): record for record in records}
        for key in self._files.keys() - by_key.keys():
            self._files.pop(key).remove()
        # Not Path.is_dir(), which raises errors of a network mount.
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


class AcknowledgementRelay:
    """Copies receivers' records from the target to the source, until :meth:`close`.

    A sender waits for receivers by the records in its own store; a mirror's readers have theirs in
    the local store, or in the bucket. Relays chain as mirrors do: a relay of the next store finds
    these records again. A relay keeps a record alive for as long as the receiver itself may live;
    then it copies the record's last state, and with it that the receiver has ended.

    Args:
        reader: reads the records.
        writer: writes them.
    """

    def __init__(self, reader: DoubleBuffer | ReceiversOfBucket, writer: RecordWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._records: list[ReceiverRecord] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay all records once more, and stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        name = self._writer.name
        retry = RetryLoop(logger, failed=f"cannot relay acknowledgements to {name}: ")
        of_bucket = isinstance(self._reader, ReceiversOfBucket)
        interval_s = TIMING.bucket_list_s if of_bucket else RELAY_S
        while not self._stop.wait(interval_s if retry.error is None else retry.retry_s):
            with retry.attempt():
                self._relay()
                retry.succeeded(f"relaying acknowledgements to {name}")
        for last in (self._relay, self._writer.close):
            with retry.attempt():
                last()

    def _relay(self) -> None:
        # Before records are read: a record that is read after its receiver's end is the last one.
        ended = {key_of(record) for record in self._records if not self._reader.may_live(record)}
        self._records = self._reader.receivers()
        self._writer.write([_relayed(record, ended) for record in self._records])


def _relayed(record: ReceiverRecord, ended: Collection[ReceiverKey]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    has_ended = record.has_ended or key_of(record) in ended
    return replace(record, held=None, stats={}, is_relayed=True, has_ended=has_ended)
