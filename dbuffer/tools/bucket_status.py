"""`read_bucket_status`: a bucket's status, as the dictionary of a store's.

Liveness goes by the time at which the service says that an object was put, and by this host's
clock. A service refuses requests of a host whose clock is far out.
"""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from dbuffer.errors import StoreNotFoundError
from dbuffer.format.manifest import UNDECODABLE, ReceiverRecord
from dbuffer.format.objects import (
    POINTER_OBJECT,
    RECEIVERS_PREFIX,
    VERSIONS_PREFIX,
    BucketVersion,
    is_of_receivers,
    version_of,
)
from dbuffer.mirror.bucket import Bucket, Listed
from dbuffer.mirror.download import newest_version
from dbuffer.mirror.records import read_records
from dbuffer.mirror.retention import missing_objects
from dbuffer.runtime.messages import listed as in_words
from dbuffer.runtime.timing import TIMING
from dbuffer.tools.status import (
    EMPTY_BUFFER,
    anchor_status,
    in_order,
    make_status,
    receiver_status,
    version_status,
)


def read_bucket_status(bucket: Bucket) -> dict[str, Any]:
    """Return the status, as `dbuffer status --json` prints it; nothing is written.

    It takes a request, lists of the mirrors' records and of the versions' parts, and a request for
    each of these records.

    Raises:
        StoreNotFoundError: there is nothing of a mirror.
        StoreAccessError: the bucket does not exist, or cannot be read.
        StoreCorruptError: the record of its newest version is damaged.
    """
    problems: list[str] = []
    version = newest_version(bucket)
    names = {
        name: it for name, it in bucket.list(RECEIVERS_PREFIX).items() if is_of_receivers(name)
    }
    listed = bucket.list(VERSIONS_PREFIX)
    if version is None and not names and not any(map(version_of, listed)):
        raise StoreNotFoundError(f"nothing was published in {bucket.url} yet")
    missing = [] if version is None else missing_objects(listed, version)
    if version is None and any(map(version_of, listed)):
        missing = [POINTER_OBJECT]
    if missing:
        problems.append(
            f"{bucket.name_of(missing[0])} is missing, or has another size: the mirror into the "
            "bucket puts it within a minute"
        )
    manifest = None if version is None else version.manifest
    metadata = {} if manifest is None else manifest.metadata
    receivers = in_order(_receivers(bucket, names, problems))
    return make_status(
        bucket.url,
        "bucket",
        manifest,
        buffers=[] if version is None else [_version_status(version)],
        receivers=[
            receiver_status(record, manifest, metadata, is_alive=not _looks_dead(record))
            for record in receivers
        ],
        problems=problems,
    )


def _receivers(
    bucket: Bucket, names: dict[str, Listed], problems: list[str]
) -> list[ReceiverRecord]:
    """Read the records of all mirrors, and note mirrors that look dead."""
    found: dict[str, list[ReceiverRecord]] = {}

    def read(name: str) -> None:
        try:
            records = read_records(bucket, name)
        except StoreNotFoundError:  # it was removed just now
            return
        except UNDECODABLE as error:
            problems.append(f"ignoring unusable records, remove them: {error}")
            return
        found[name] = [replace(each, updated_at=names[name].put_at) for each in records]

    bucket.in_parallel(read, list(names))
    silent = [
        PurePosixPath(name).stem
        for name, records in sorted(found.items())
        if any(not record.has_ended and _looks_dead(record) for record in records)
    ]
    if silent:
        problems.append(
            f"mirrors look dead, and with them their receivers: {in_words(silent)}; no record was "
            f"put for {TIMING.bucket_presumed_dead_after_s:g} s"
        )
    return [record for records in found.values() for record in records]


def _looks_dead(record: ReceiverRecord) -> bool:
    age_s = max(0.0, time.time() - record.updated_at)
    return record.has_ended or age_s > TIMING.bucket_presumed_dead_after_s


def _version_status(version: BucketVersion) -> dict[str, Any]:
    manifest = version.manifest
    return {
        **EMPTY_BUFFER,
        **version_status(manifest),
        **anchor_status(manifest, sum(version.delta(it).num_bytes for it in manifest.since_anchor)),
        "state": "newest",
        "delta_bytes": sum(version.delta(each).num_bytes for each in manifest.chain[1:]),
    }
