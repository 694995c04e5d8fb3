"""`read_bucket_status`: a bucket's status, as the dictionary of a store's.

Liveness goes by the time at which the service says that an object was put, and by this host's
clock. A service refuses requests of a host whose clock is far out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from dbuffer.errors import StoreNotFoundError
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.objects import (
    POINTER_OBJECT,
    VERSIONS_PREFIX,
    BucketVersion,
    version_of,
)
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.download import missing_files, newest_version
from dbuffer.mirror.records import MirrorObject, ReceiversOfBucket
from dbuffer.runtime.messages import listed as in_words
from dbuffer.runtime.timing import TIMING
from dbuffer.tools.status import buffer_status, in_order, make_status, receiver_status

_MISSING = "is missing, or has another size: the mirror into the bucket puts it within a minute"


def read_bucket_status(bucket: Bucket) -> dict[str, Any]:
    """Return the status, as `dbuffer status --json` prints it; nothing is written.

    It takes a request, lists of the mirrors' records and of the versions' files, and a request for
    each of these records.

    Raises:
        StoreNotFoundError: there is nothing of a mirror.
        StoreAccessError: the bucket does not exist, or cannot be read.
        StoreCorruptError: the record of its newest version is damaged.
    """
    version, readers = newest_version(bucket), ReceiversOfBucket(bucket)
    readers.receivers()
    listed = bucket.list(VERSIONS_PREFIX)
    missing = [] if version is None else missing_files(listed, version)
    if version is None and any(map(version_of, listed)):
        missing = [POINTER_OBJECT]
    if version is None and not missing and not readers.objects:
        raise StoreNotFoundError(f"nothing was published in {bucket.url} yet")
    manifest = None if version is None else version.manifest
    metadata = {} if manifest is None else manifest.metadata
    records = in_order(_dated(read, record) for read, record in readers.latest.values())
    return make_status(
        bucket.url,
        "bucket",
        manifest,
        buffers=[] if version is None else [_version_status(version)],
        receivers=[
            receiver_status(record, manifest, metadata, is_alive=not _looks_dead(record))
            for record in records
        ],
        problems=[
            *(f"{bucket.name_of(name)} {_MISSING}" for name in missing[:1]),
            *(read.fault for read in readers.objects.values() if read.fault is not None),
            *_silent_mirrors(readers.objects),
        ],
    )


def _silent_mirrors(objects: dict[str, MirrorObject]) -> list[str]:
    """Return a problem if there are mirrors that look dead and were not closed."""
    silent = [
        PurePosixPath(name).stem
        for name, read in sorted(objects.items())
        if any(not it.has_ended and _looks_dead(_dated(read, it)) for it in read.records)
    ]
    if not silent:
        return []
    return [
        f"mirrors look dead, and with them their receivers: {in_words(silent)}; no record was put "
        f"for {TIMING.bucket_presumed_dead_after_s:g} s"
    ]


def _dated(read: MirrorObject, record: ReceiverRecord) -> ReceiverRecord:
    """Return a record with the time at which its mirror has put it."""
    return replace(record, updated_at=read.put_at)


def _looks_dead(record: ReceiverRecord) -> bool:
    age_s = max(0.0, time.time() - record.updated_at)
    return record.has_ended or age_s > TIMING.bucket_presumed_dead_after_s


def _version_status(version: BucketVersion) -> dict[str, Any]:
    files = version.delta_files

    def delta_bytes(versions: Iterable[VersionId]) -> int:
        return sum(files[version].content.num_bytes for version in versions)

    return buffer_status("", "newest", version.manifest, delta_bytes)
