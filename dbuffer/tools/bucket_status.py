"""`read_bucket_status`: the status of a bucket, with the same keys as a store's status."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
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
from dbuffer.mirror.bucket_source import newest_version
from dbuffer.mirror.bucket_target import missing_files
from dbuffer.mirror.records import ReceiversOfBucket
from dbuffer.runtime.timing import TIMING
from dbuffer.tools.status import buffer_status, in_order, make_status, receiver_status

_MISSING = "is missing or has a wrong size: a running mirror uploads it again within a minute"


def read_bucket_status(bucket: Bucket) -> dict[str, Any]:
    """Return the status of a bucket, as `dbuffer status --json` prints it.

    Raises:
        StoreNotFoundError: no mirror has put a version or a record into the bucket.
        StoreAccessError: the bucket does not exist, or cannot be read.
        StoreCorruptError: the record of the newest version is damaged.
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
    records = in_order(
        replace(record, updated_at=read.listed.put_at) for read, record in readers.latest.values()
    )
    return make_status(
        bucket.url,
        "bucket",
        manifest,
        buffers=[]
        if version is None
        else [buffer_status("", "newest", version.manifest, partial(_delta_bytes, version))],
        receivers=[
            receiver_status(record, manifest, metadata, is_alive=_may_live(record))
            for record in records
        ],
        problems=[
            *(f"{bucket.name_of(name)} {_MISSING}" for name in missing[:1]),
            *(read.fault for read in readers.objects.values() if read.fault is not None),
        ],
    )


def _may_live(record: ReceiverRecord) -> bool:
    # Trust this host's clock: a bucket's service refuses requests of a host with a wrong clock.
    age_s = time.time() - record.updated_at
    return not record.has_ended and age_s < TIMING.bucket_presumed_dead_after_s


def _delta_bytes(version: BucketVersion, deltas: Iterable[VersionId]) -> int:
    files = version.deltas
    return sum(files[delta].num_bytes for delta in deltas)
