"""`AcknowledgementRelay`: copies receivers' records from a mirror's target to its source.

In a store, each record is a file. In a bucket, each mirror puts one object, with the mirror's
record and the records of the mirror's local store. A mirror puts its object again to show that it
is alive. A reader of the bucket measures by its own clock how long it has seen no change, because
the clocks of two clusters can differ.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from dbuffer.errors import StoreNotFoundError
from dbuffer.format.manifest import UNDECODABLE, ReceiverRecord, encode
from dbuffer.format.objects import (
    RECEIVERS_PREFIX,
    BucketReceivers,
    is_of_receivers,
    receivers_object,
)
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.mirror.bucket import Bucket, Listed
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop, log_once
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import OwnRecord, PublishedRecord

logger = logging.getLogger(__name__)

RELAY_S = 0.05
"""Interval at which a mirror reads the receivers' records of a store."""

ReceiverKey: TypeAlias = tuple[str, str]
"""A receiver's id and the token of the receiver's process."""


class StoreRecords:
    """Writer of relayed receivers' records into a store, one file per record."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._store = DoubleBuffer(root, allow_shared_store=True)
        self._files: dict[ReceiverKey, PublishedRecord] = {}
        self._touched_at = time.monotonic()

    def write(self, records: Collection[ReceiverRecord]) -> None:
        """Write ``records``, and remove all other records that this writer has written."""
        by_key = {_key_of(record): record for record in records}
        for key in self._files.keys() - by_key.keys():
            self._files.pop(key).remove()
        # If a network mount fails, os.path.isdir() returns False, but Path.is_dir() would raise.
        if not os.path.isdir(self._store.root / RECEIVERS_DIRECTORY):  # noqa: PTH112
            return
        for key, record in by_key.items():
            file = self._files.setdefault(key, PublishedRecord(self._store, *key))
            before = file.record
            if before is not None and record == replace(before, updated_at=record.updated_at):
                continue
            with contextlib.suppress(StoreNotFoundError):  # the store is being removed
                file.put(record)
                if record.has_ended:
                    file.close()
        if time.monotonic() - self._touched_at > TIMING.heartbeat_s:
            self._touched_at = time.monotonic()
            for file in self._files.values():
                if file.record is not None and not file.record.has_ended:
                    file.show_life()

    def close(self) -> None:
        """Close the records' files, which stay in the store."""
        for file in self._files.values():
            file.close()


class BucketRecords:
    """Writer of a mirror's object in a bucket.

    The object has the mirror's own record, and the records of receivers that the mirror relays.
    """

    def __init__(self, bucket: Bucket, record: OwnRecord) -> None:
        self.name = bucket.url
        self._bucket = bucket
        self._mirror = record
        self._object = receivers_object(record.current.receiver)
        self._current: list[ReceiverRecord] = []
        self._put: list[ReceiverRecord] = []
        self._put_at = -TIMING.bucket_heartbeat_s

    def write(self, records: Collection[ReceiverRecord]) -> None:
        """Put records into the bucket. If the last put is recent, leave them to a later call."""
        self._current = [replace(self._mirror.current, is_relayed=True), *records]
        # A put delays the next put. So if only the mirror's progress has changed, don't put the
        # records yet: acknowledgements of the copied version follow soon, and must not be delayed.
        has_changed = _significant(self._current) != _significant(self._put)
        limit_s = TIMING.bucket_records_s if has_changed else TIMING.bucket_heartbeat_s
        if time.monotonic() - self._put_at >= limit_s:
            self._put_object()

    def close(self) -> None:
        """Put the records into the bucket a last time, with the mirror's record marked as ended."""
        self._current = [replace(self._mirror.current, is_relayed=True), *self._current[1:]]
        if self._current != self._put:
            self._put_object()

    def _put_object(self) -> None:
        current = self._current
        record = BucketReceivers(records=current, updated_at=time.time())
        self._bucket.put(self._object, encode(record))
        self._put, self._put_at = current, time.monotonic()


def _significant(records: list[ReceiverRecord]) -> list[ReceiverRecord]:
    of_mirror = [replace(record, staged=None, stats={}) for record in records[:1]]
    return [replace(record, updated_at=0.0) for record in (*of_mirror, *records[1:])]


class MirrorObject(NamedTuple):
    """Content of a mirror's object in a bucket, as this process read the object last."""

    listed: Listed
    changed_s: float
    """Time on the reader's watch (`ReceiversOfBucket.watched_s`) at the object's last change."""
    records: list[ReceiverRecord]
    fault: str | None
    """Reason why the records cannot be decoded, or None if they were decoded."""


class ReceiversOfBucket:
    """Reader of the records of all receivers in a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._listed_at = time.monotonic()
        self.watched_s = 0.0
        """Seconds that this reader has watched the bucket. A pause between two listings counts as
        one heartbeat at most: while the service is down, living mirrors cannot put records."""
        self.objects: dict[str, MirrorObject] = {}
        self.latest: dict[ReceiverKey, tuple[MirrorObject, ReceiverRecord]] = {}
        """Latest record of each receiver, with the object that holds the record."""

    def receivers(self) -> list[ReceiverRecord]:
        """Return all receivers' records. Unchanged objects are not downloaded again."""
        listed = self._bucket.list(RECEIVERS_PREFIX)
        before_s, self._listed_at = self._listed_at, time.monotonic()
        self.watched_s += min(self._listed_at - before_s, TIMING.bucket_heartbeat_s)
        listed = {name: listed[name] for name in listed if is_of_receivers(name)}
        self.objects = {name: self.objects[name] for name in self.objects if name in listed}
        before = {name: read.listed.e_tag for name, read in self.objects.items()}
        changed = [name for name in listed if before.get(name, "") != listed[name].e_tag]
        self._bucket.in_parallel(lambda name: self._read(name, listed[name]), changed)
        records = [(read, record) for read in self.objects.values() for record in read.records]
        # If a mirror was restarted with another id, its old and its new object can both hold a
        # receiver's record. The later record counts.
        records.sort(key=lambda pair: (pair[1].updated_at, pair[0].changed_s))
        self.latest = {_key_of(record): (read, record) for read, record in records}
        return self.last_read()

    def last_read(self) -> list[ReceiverRecord]:
        """Return the records that :meth:`receivers` returned last, without a request."""
        return [record for _, record in self.latest.values()]

    def may_live(self, record: ReceiverRecord) -> bool:
        """Whether a receiver may be alive: it has not ended, and its mirror still puts records."""
        latest = self.latest.get(_key_of(record))
        if latest is None or record.has_ended:
            return False
        return self.watched_s - latest[0].changed_s < TIMING.bucket_presumed_dead_after_s

    def _read(self, name: str, listed: Listed) -> None:
        records, fault = list[ReceiverRecord](), None
        try:
            read = self._bucket.read(BucketReceivers, name)
        except StoreNotFoundError:  # the object was removed after the listing
            return
        except UNDECODABLE as error:
            fault = f"ignoring unusable records, remove them: {error}"
            log_once(logger, "%s", fault)
        else:
            assert read is not None  # noqa: S101 - only a read with a tag returns None
            records = read[0].records
        age_s = 0.0
        if name not in self.objects:
            # The object can be old. But a living mirror has two heartbeats to put it again: this
            # host's clock may be wrong, or the service was down until now.
            age_s = min(time.time() - listed.put_at, 2 * TIMING.bucket_heartbeat_s)
        changed_s = self.watched_s - max(0.0, age_s)
        self.objects[name] = MirrorObject(listed, changed_s, records, fault)


class AcknowledgementRelay:
    """Copies receivers' records from a mirror's target to its source, in a thread.

    While a receiver may be alive, the relay renews the copied record regularly, which shows senders
    that the receiver lives. When the receiver has ended, the relay copies the record a last time,
    marked as ended.
    """

    def __init__(
        self, reader: DoubleBuffer | ReceiversOfBucket, writer: StoreRecords | BucketRecords
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._records: list[ReceiverRecord] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay all receivers' records a last time, and stop."""
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
        # Find out which receivers have ended before reading the records: an ended receiver does not
        # change its record, so the record that is read now is its last.
        may_live = self._reader.may_live
        ended = {_key_of(record) for record in self._records if not may_live(record)}
        self._records = self._reader.receivers()
        # A record that was read just now can show that a bucket's receiver lives after all.
        self._writer.write(
            [
                _relayed(record, is_dead=_key_of(record) in ended and not may_live(record))
                for record in self._records
            ]
        )


def _relayed(record: ReceiverRecord, *, is_dead: bool) -> ReceiverRecord:
    record = replace(record, held=None, stats={}, is_relayed=True)
    if record.has_ended or not is_dead:
        return record
    # Change the time, because a sender ignores records that are unchanged since its start.
    updated_at = math.nextafter(record.updated_at, math.inf)
    return replace(record, has_ended=True, updated_at=updated_at)


def _key_of(record: ReceiverRecord) -> ReceiverKey:
    return record.receiver, record.token
