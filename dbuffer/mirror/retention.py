"""`Retention`: which objects of a bucket are needed, and the end of those that are not."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection

from dbuffer.errors import StoreNotFoundError
from dbuffer.format.manifest import UNDECODABLE
from dbuffer.format.objects import (
    VERSIONS_PREFIX,
    BucketPointer,
    BucketVersion,
    is_of_version,
    version_in,
)
from dbuffer.mirror.bucket import Bucket
from dbuffer.runtime.timing import TIMING

KEEP_VERSIONS = 8
"""Newest versions that are kept: a reader that is no further behind goes on by deltas."""

KEEP_ANCHORS = 2
"""Newest anchors that are kept: versions that stand on older ones are not."""


class Retention:
    """Keeps the newest versions, and deletes other objects of mirrors.

    It deletes only objects that have the names of a mirror's, and those only when they have not
    been needed for `Timing.bucket_grace_s`.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._known: set[str] = set()
        self._kept: list[BucketVersion] = []
        """Versions that are kept, oldest first."""
        self._unneeded_since: dict[str, float] = {}

    def begin(self, newest: BucketPointer | None) -> BucketVersion | None:
        """Begin with what leads to the ``newest``; return the version that this names.

        None: there is none, or its record cannot be read. Objects that no version has needed for
        `Timing.bucket_grace_s` before that one was put are deleted with the next version.
        """
        self._kept = []
        listed = self._bucket.list(VERSIONS_PREFIX)
        put_at = {name: each.put_at for name, each in listed.items() if is_of_version(name)}
        self._known |= put_at.keys()
        if newest is None or newest.version_name not in put_at:
            return None
        names = _names_up_to(newest, put_at)
        # By the service's clock: mirrors may end sooner than what they no longer need is deleted.
        since = put_at[names[-1]] - TIMING.bucket_grace_s
        num_old = sum(put_at[name] < since for name in names)
        old, following = names[max(0, num_old - KEEP_VERSIONS) : num_old], names[num_old]
        recent = names[-KEEP_VERSIONS:]
        versions = self._read(sorted({*old, following, *recent}))

        def readable(names: list[str]) -> list[BucketVersion]:
            return [versions[name] for name in names if name in versions]

        self._kept = readable(recent)
        # Putting the version that followed may have taken long. Later ones need no older objects
        # than these do.
        needed = _objects_of([*_retained(readable(old)), *readable([following])])
        for name, at in put_at.items():
            if at < since and name not in needed:
                self._unneeded_since[name] = -math.inf
        return versions.get(newest.version_name)

    def _read(self, names: list[str]) -> dict[str, BucketVersion]:
        """Read versions' records, by name, without those that are gone or damaged."""
        versions: dict[str, BucketVersion] = {}

        def read(name: str) -> None:
            with contextlib.suppress(*UNDECODABLE, StoreNotFoundError):
                record = self._bucket.read(BucketVersion, name)
                if record is not None and record[0].name == name:
                    versions[name] = record[0]

        self._bucket.in_parallel(read, names)
        return versions

    def add(self, version: BucketVersion) -> None:
        """Keep a version that is about to be published."""
        # One that could not be published is put again.
        self._kept = [*(each for each in self._kept if each.id != version.id), version]
        self._known |= version.objects

    def sweep(self) -> None:
        """Delete objects that have not been needed for long enough."""
        self._kept = _retained(self._kept)
        needed = _objects_of(self._kept)
        now, before = time.monotonic(), self._unneeded_since
        since = {name: before.get(name, now) for name in self._known - needed}
        old = [name for name, at in since.items() if now - at >= TIMING.bucket_grace_s]
        self._bucket.delete(old)
        self._known.difference_update(old)
        self._unneeded_since = since


def _names_up_to(newest: BucketPointer, names: Collection[str]) -> list[str]:
    """Return the names of the records of versions that lead to the newest, oldest first."""
    # A mirror that was killed may have put a record above the pointer's, or another one of it.
    leading = {name: version for name in names if (version := version_in(name)) is not None}
    is_before = newest.lineage.reaches
    before = [name for name, version in leading.items() if is_before(version)]
    before = [name for name in before if leading[name] != newest.id]
    return [*sorted(before, key=lambda name: leading[name].number), newest.version_name]


def _retained(versions: list[BucketVersion]) -> list[BucketVersion]:
    """Return those of these versions, oldest first, that are kept."""
    anchors = list(dict.fromkeys(version.anchor for version in reversed(versions)))
    return [
        version for version in versions[-KEEP_VERSIONS:] if version.anchor in anchors[:KEEP_ANCHORS]
    ]


def _objects_of(versions: list[BucketVersion]) -> set[str]:
    return set[str]().union(*(version.objects for version in versions))
