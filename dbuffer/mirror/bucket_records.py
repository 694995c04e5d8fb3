"""Receivers' records in a bucket: `BucketRecords` puts a mirror's, `ReceiversOfBucket` reads all.

Each mirror has one object, with its own record and its local store's. Clocks of two clusters are
not compared: a mirror shows life by putting its object again, and a reader goes by its own time
since the object has changed.
"""

from __future__ import annotations

import logging
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
from dbuffer.mirror.bucket import Bucket, Listed
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store.records import OwnRecord

logger = logging.getLogger(__name__)


ReceiverKey: TypeAlias = tuple[str, str]
"""Id and token of a receiver."""


def key_of(record: ReceiverRecord) -> ReceiverKey:
    """Return the key of a record's receiver."""
    return record.receiver, record.token


class BucketRecords:
    """Records that are relayed to a bucket, with the mirror's own, in one object."""

    def __init__(self, bucket: Bucket, own: OwnRecord) -> None:
        self._bucket = bucket
        self._own = own
        self._object = receivers_object(own.current.receiver)
        self._current: list[ReceiverRecord] = []
        self._put: list[ReceiverRecord] = []
        """Records that the object holds."""
        self._put_at = self._same_at = -TIMING.bucket_heartbeat_s
        """Time of the last put, and of the last look that found no change since."""

    @property
    def name(self) -> str:
        return self._bucket.url

    def write(self, records: Collection[ReceiverRecord]) -> None:
        self._current = [self._relayed_own(), *records]
        since, limit_s, now = self._put_at, TIMING.bucket_records_s, time.monotonic()
        if not self._has_changed:
            self._same_at, limit_s = now, TIMING.bucket_heartbeat_s
        elif _without_times(self._current[1:]) == _without_times(self._put[1:]):
            # Only the mirror's own record changed. Receivers are about to apply the version that it
            # has copied: a put now would delay their records by an interval.
            since = max(self._put_at, self._same_at)
        if now - since >= limit_s:
            self._put_object()

    def close(self) -> None:
        self._current[:1] = [self._relayed_own()]  # which may have ended
        if self._has_changed:
            self._put_object()

    def _relayed_own(self) -> ReceiverRecord:
        return replace(self._own.current, is_relayed=True)

    @property
    def _has_changed(self) -> bool:
        return _without_times(self._current) != _without_times(self._put)

    def _put_object(self) -> None:
        current = self._current
        record = BucketReceivers(records=current, updated_at=time.time())
        self._bucket.put(self._object, encode(record))
        self._put, self._put_at = current, time.monotonic()


def _without_times(records: list[ReceiverRecord]) -> list[ReceiverRecord]:
    return [replace(record, updated_at=0.0) for record in records]


class MirrorObject(NamedTuple):
    """Object with a mirror's records, as it was read last."""

    e_tag: str | None
    put_at: float
    """Time at which it was put, by the service's clock."""
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
        listed = {name: each for name, each in listed.items() if is_of_receivers(name)}
        self.objects = {name: each for name, each in self.objects.items() if name in listed}
        before = {name: each.e_tag for name, each in self.objects.items()}
        changed = [name for name in listed if before.get(name, "") != listed[name].e_tag]
        self._bucket.in_parallel(lambda name: self._read(name, listed[name]), changed)
        found = [(each, record) for each in self.objects.values() for record in each.records]
        # A receiver whose mirror has changed its id has a record in two objects: the later counts.
        found.sort(key=lambda pair: (pair[1].updated_at, pair[0].changed_at))
        self.latest = {key_of(record): (each, record) for each, record in found}
        return self.known()

    def known(self) -> list[ReceiverRecord]:
        """Return the records that were read last."""
        return [record for _, record in self.latest.values()]

    def may_live(self, record: ReceiverRecord) -> bool:
        """Whether a record's receiver may be alive: its mirror is, and does not say otherwise."""
        found = self.latest.get(key_of(record))
        if found is None or record.has_ended:
            return False
        return time.monotonic() - found[0].changed_at < TIMING.bucket_presumed_dead_after_s

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
        now = time.monotonic()
        self.objects[name] = MirrorObject(listed.e_tag, listed.put_at, now, records, fault)
