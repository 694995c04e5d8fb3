"""`AcknowledgementRelay`: copies receivers' records from a mirror's target to its source.

In a store each record has a file (`StoreRecords`). In a bucket each mirror has one object, with its
own record and its local store's (`BucketRecords`, read by `ReceiversOfBucket`). Clocks of
two clusters are not compared: a mirror shows life by putting its object again, and a reader goes by
its own time since the object has changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection
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
"""Interval at which a store's records are read; only changed ones go over the network."""

ReceiverKey: TypeAlias = tuple[str, str]
"""Id and token of a receiver."""


class StoreRecords:
    """Relayed records in a store, each in a file of its own."""

    def __init__(self, store: DoubleBuffer) -> None:
        self.name = str(store.root)
        self._store = DoubleBuffer(store.root, allow_shared_store=True)
        self._files: dict[ReceiverKey, PublishedRecord] = {}
        self._touched_at = time.monotonic()

    def write(self, records: Collection[ReceiverRecord]) -> None:
        """Let these relayed records be there, and no others of this writer."""
        by_key = {_key_of(record): record for record in records}
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


class BucketRecords:
    """Records that are relayed to a bucket, with the mirror's own, in one object."""

    def __init__(self, bucket: Bucket, record: OwnRecord) -> None:
        self.name = bucket.url
        self._bucket = bucket
        self._mirror = record
        self._object = receivers_object(record.current.receiver)
        self._current: list[ReceiverRecord] = []
        self._put: list[ReceiverRecord] = []
        """Records that the object holds."""
        self._put_at = -TIMING.bucket_heartbeat_s

    def write(self, records: Collection[ReceiverRecord]) -> None:
        """Put the records, if an interval has passed."""
        self._current = [replace(self._mirror.current, is_relayed=True), *records]
        # Receivers are about to apply the version that the mirror has copied, so its progress goes
        # with their records: a put now would delay these by an interval.
        has_changed = _significant(self._current) != _significant(self._put)
        limit_s = TIMING.bucket_records_s if has_changed else TIMING.bucket_heartbeat_s
        if time.monotonic() - self._put_at >= limit_s:
            self._put_object()

    def close(self) -> None:
        """Put the last records. The mirror's own may say that it has ended."""
        self._current[:1] = [replace(self._mirror.current, is_relayed=True)]
        if self._current != self._put:
            self._put_object()

    def _put_object(self) -> None:
        current = self._current
        record = BucketReceivers(records=current, updated_at=time.time())
        self._bucket.put(self._object, encode(record))
        self._put, self._put_at = current, time.monotonic()


def _significant(records: list[ReceiverRecord]) -> list[ReceiverRecord]:
    """Return a mirror's records without times, and its own without its progress."""
    of_mirror = [replace(record, staged=None, stats={}) for record in records[:1]]
    return [replace(record, updated_at=0.0) for record in (*of_mirror, *records[1:])]


class MirrorObject(NamedTuple):
    """Object with a mirror's records, as it was read last."""

    e_tag: str | None
    put_at: float
    """Time of its put, by the service's clock."""
    changed_at: float
    """Time at which it was seen changed, by this host's monotonic clock."""
    records: list[ReceiverRecord]
    fault: str | None
    """Reason that its records cannot be read, or None."""


class ReceiversOfBucket:
    """Reader of all records in a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.objects: dict[str, MirrorObject] = {}
        self.latest: dict[ReceiverKey, tuple[MirrorObject, ReceiverRecord]] = {}
        """Latest record of each receiver, and the object that it is in."""

    def receivers(self) -> list[ReceiverRecord]:
        """Return all records; only objects that have changed are read again."""
        listed = self._bucket.list(RECEIVERS_PREFIX)
        listed = {name: listed[name] for name in listed if is_of_receivers(name)}
        self.objects = {name: self.objects[name] for name in self.objects if name in listed}
        before = {name: read.e_tag for name, read in self.objects.items()}
        changed = [name for name in listed if before.get(name, "") != listed[name].e_tag]
        self._bucket.in_parallel(lambda name: self._read(name, listed[name]), changed)
        records = [(read, record) for read in self.objects.values() for record in read.records]
        # A receiver whose mirror has changed its id has a record in two objects: the later counts.
        records.sort(key=lambda pair: (pair[1].updated_at, pair[0].changed_at))
        self.latest = {_key_of(record): (read, record) for read, record in records}
        return self.last_read()

    def last_read(self) -> list[ReceiverRecord]:
        """Return the records that were read last."""
        return [record for _, record in self.latest.values()]

    def may_live(self, record: ReceiverRecord) -> bool:
        """Whether a record's receiver may be alive: its mirror is, and does not say otherwise."""
        latest = self.latest.get(_key_of(record))
        if latest is None or record.has_ended:
            return False
        return time.monotonic() - latest[0].changed_at < TIMING.bucket_presumed_dead_after_s

    def _read(self, name: str, listed: Listed) -> None:
        records, fault = list[ReceiverRecord](), None
        try:
            read = self._bucket.read(BucketReceivers, name)
        except StoreNotFoundError:  # it was removed just now
            return
        except UNDECODABLE as error:
            fault = f"ignoring unusable records, remove them: {error}"
            log_once(logger, "%s", fault)
        else:
            assert read is not None  # noqa: S101 - without a tag it is read
            records = read[0].records
        changed_at = time.monotonic()
        self.objects[name] = MirrorObject(listed.e_tag, listed.put_at, changed_at, records, fault)


class AcknowledgementRelay:
    """Copies receivers' records from the target to the source, until :meth:`close`.

    A sender waits for receivers by the records in its own store; a mirror's readers have theirs in
    the local store, or in the bucket. Relays chain as mirrors do: a relay of the next store finds
    these records again. A relay keeps a record alive for as long as the receiver itself may live;
    then it copies the record's last state, and with it that the receiver has ended.
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
        ended = {_key_of(record) for record in self._records if not self._reader.may_live(record)}
        self._records = self._reader.receivers()
        self._writer.write([_relayed(record, ended) for record in self._records])


def _relayed(record: ReceiverRecord, ended: Collection[ReceiverKey]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    has_ended = record.has_ended or _key_of(record) in ended
    return replace(record, held=None, stats={}, is_relayed=True, has_ended=has_ended)


def _key_of(record: ReceiverRecord) -> ReceiverKey:
    return record.receiver, record.token
