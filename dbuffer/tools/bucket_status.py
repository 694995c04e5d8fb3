"""`BucketStatus`: the status of a bucket, as `dbuffer status` prints it.

Liveness goes by the time at which the service says that an object was put, and by this host's
clock. A service refuses requests of a host whose clock is far out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from dbuffer.errors import DBufferError, StoreNotFoundError
from dbuffer.format.layout import KeptLayouts
from dbuffer.format.manifest import UNDECODABLE, ReceiverRecord
from dbuffer.format.objects import (
    POINTER_OBJECT,
    BucketPointer,
    BucketVersion,
    is_of_receivers,
    is_of_version,
    version_in,
)
from dbuffer.mirror.bucket import Bucket, Listed
from dbuffer.mirror.bucket_records import read_records
from dbuffer.mirror.download import hold_version, newest_pointer
from dbuffer.runtime.messages import counted
from dbuffer.runtime.messages import listed as in_words
from dbuffer.runtime.timing import TIMING
from dbuffer.tools.status import EMPTY_BUFFER, in_order, receiver_status, version_status


class BucketStatus:
    """Reads a bucket's status. What has not changed since the last time is not fetched again."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._version: BucketVersion | None = None
        """Record of the version that was the newest."""
        self._records: dict[tuple[str, str | None], list[ReceiverRecord]] = {}
        """Records in each object, by its name and ETag."""

    def read(self) -> dict[str, Any]:
        """Return the status, as `dbuffer status --json` prints it; nothing is written.

        It takes two requests, a list of all objects, and a request for each mirror whose records
        have changed.

        Raises:
            StoreNotFoundError: there is nothing of a mirror.
            StoreAccessError: the bucket does not exist, or cannot be read.
            StoreCorruptError: its pointer is damaged.
        """
        problems: list[str] = []
        pointer = newest_pointer(self._bucket)
        version = None if pointer is None else self._read_version(pointer, problems)
        there = self._bucket.list("")
        if pointer is None and not any(map(is_of_receivers, there)):
            raise StoreNotFoundError(
                f"nothing was published in {self._bucket.url}: of its "
                f"{counted(len(there), 'object')}, none is a mirror's pointer or records"
            )
        if version is not None:
            problems += self._missing(version, there)
        return {
            "store": self._bucket.url,
            "filesystem": "bucket",
            "version": None if pointer is None else pointer.version,
            "run": None if pointer is None else pointer.id.run,
            "writer": None if pointer is None else _writer(pointer, there),
            "buffers": [] if version is None else [_version_status(version)],
            "files": {} if version is None else _files_of(version),
            "objects": _objects(there),
            "receivers": self._receivers(pointer, version, there, problems),
            "problems": problems,
        }

    def _read_version(self, pointer: BucketPointer, problems: list[str]) -> BucketVersion | None:
        if self._version is None or self._version.name != pointer.version_name:
            self._version = None
            try:
                with hold_version(self._bucket, pointer, KeptLayouts()) as held:
                    self._version = held.record
            except DBufferError as error:
                problems.append(f"version {pointer.version} cannot be read: {error}")
        return self._version

    def _missing(self, version: BucketVersion, there: Mapping[str, Listed]) -> list[str]:
        """Describe parts of a version that are not there, or have another size."""
        wrong = [
            name
            for name, num_bytes in version.part_sizes.items()
            if name not in there or there[name].num_bytes != num_bytes
        ]
        if not wrong:
            return []
        return [
            f"parts of version {version.manifest.version} are missing, or have another size: "
            f"{in_words(wrong)}; see `dbuffer verify {self._bucket.url}`"
        ]

    def _receivers(
        self,
        pointer: BucketPointer | None,
        version: BucketVersion | None,
        there: Mapping[str, Listed],
        problems: list[str],
    ) -> list[dict[str, Any]]:
        """Return the statuses of all receivers of which mirrors have put records."""
        names = {name: each for name, each in there.items() if is_of_receivers(name)}
        self._read_records(names, problems)
        metadata = {} if version is None else version.manifest.metadata
        records = [
            replace(record, updated_at=each.put_at)
            for name, each in names.items()
            for record in self._records[name, each.e_tag]
        ]
        silent = [
            PurePosixPath(name).stem
            for name, each in names.items()
            if _is_late(each.put_at)
            and not all(record.has_ended for record in self._records[name, each.e_tag])
        ]
        if silent:
            problems.append(
                f"mirrors look dead, and with them their receivers: {in_words(silent)}; no record "
                f"was put for {TIMING.bucket_presumed_dead_after_s:g} s"
            )
        return [
            receiver_status(
                record,
                pointer,
                metadata,
                is_alive=not record.has_ended and not _is_late(record.updated_at),
            )
            for record in in_order(records)
        ]

    def _read_records(self, names: Mapping[str, Listed], problems: list[str]) -> None:
        """Read the objects that have changed."""
        before = self._records
        self._records = {}

        def read(name: str) -> None:
            key = name, names[name].e_tag
            try:
                records = before[key] if key in before else read_records(self._bucket, name)
            except StoreNotFoundError:  # it was removed just now
                records = []
            except UNDECODABLE as error:
                records = []
                problems.append(f"ignoring unusable records, remove them: {error}")
            self._records[key] = records

        self._bucket.in_parallel(read, list(names))


def _writer(pointer: BucketPointer, there: Mapping[str, Listed]) -> dict[str, Any]:
    put = there.get(POINTER_OBJECT)
    return {"mirror": pointer.writer, "put_age_s": None if put is None else _age_s(put.put_at)}


def _version_status(version: BucketVersion) -> dict[str, Any]:
    deltas = map(version.delta_parts, version.manifest.chain[1:])
    return {
        **EMPTY_BUFFER,
        **version_status(version.manifest),
        "state": "newest",
        "delta_bytes": sum(delta.num_bytes for delta in deltas),
    }


def _files_of(version: BucketVersion) -> dict[str, Any]:
    weights = version.weights_parts
    anchor = {
        "version": version.anchor.number,
        "num_bytes": weights.num_bytes,
        "num_parts": len(weights.digests),
    }
    deltas = {each: version.delta_parts(each) for each in version.manifest.chain[1:]}
    return {
        "anchor": anchor,
        "deltas": [
            {"version": str(each), "num_bytes": delta.num_bytes, "num_parts": len(delta.digests)}
            for each, delta in deltas.items()
        ],
    }


def _objects(there: Mapping[str, Listed]) -> dict[str, int]:
    """Count what is kept for readers, and objects that are not a mirror's."""
    directories = {PurePosixPath(name).parent for name in there if is_of_version(name)}
    others = [
        each.num_bytes
        for name, each in there.items()
        if not (is_of_version(name) or is_of_receivers(name) or name == POINTER_OBJECT)
    ]
    return {
        "num_versions": sum(version_in(name) is not None for name in there),
        "num_anchors": sum(path.suffix == ".weights" for path in directories),
        "num_objects": len(there) - len(others),
        "num_bytes": sum(each.num_bytes for each in there.values()) - sum(others),
        "num_others": len(others),
        "num_other_bytes": sum(others),
    }


def _is_late(put_at: float) -> bool:
    return _age_s(put_at) > TIMING.bucket_presumed_dead_after_s


def _age_s(put_at: float) -> float:
    return max(0.0, time.time() - put_at)
