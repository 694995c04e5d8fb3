"""`Retention`: which objects of a bucket are needed, and the end of those that are not."""

from __future__ import annotations

import contextlib
import time

from dbuffer.errors import StoreNotFoundError
from dbuffer.format.manifest import UNDECODABLE
from dbuffer.format.objects import BucketPointer, BucketVersion, is_of_version
from dbuffer.mirror.bucket import Bucket
from dbuffer.runtime.timing import TIMING

KEEP_VERSIONS = 8
"""Newest versions that are kept: a reader that is no further behind goes on by deltas."""

KEEP_ANCHORS = 2
"""Newest anchors that are kept: versions that stand on older ones are not."""


class Retention:
    """Keeps the newest versions of the history that is copied, and deletes what else was put.

    It deletes only objects of this mirror's histories that have the names of a mirror's objects,
    and those only when they have not been needed for `Timing.bucket_grace_s`.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._known: set[str] = set()
        self._kept: list[BucketVersion] = []
        """Versions that are kept, oldest first."""
        self._unneeded_since: dict[str, float] = {}

    def begin(self, history: str, newest: BucketPointer | None) -> BucketVersion | None:
        """Begin with what there is of a history; return the version that the pointer names.

        None: there is none, or its record cannot be read.
        """
        self._kept = []
        there = {name for name in self._bucket.list(history) if is_of_version(name)}
        self._known |= there
        if newest is None:
            return None
        # A mirror that was killed may have put a record above the pointer's, or another one of it.
        last, above = newest.version_name, f"{history}/versions/{newest.version:019}"
        names = sorted(name for name in there if f"{history}/versions/" < name < above)
        for name in (*names[1 - KEEP_VERSIONS :], last):
            with contextlib.suppress(*UNDECODABLE, StoreNotFoundError):
                read = self._bucket.read(BucketVersion, name)
                if read is not None and read[0].name == name:
                    self._kept.append(read[0])
        if not self._kept or self._kept[-1].name != last:
            return None
        return self._kept[-1]

    def add(self, version: BucketVersion) -> None:
        """Keep a version that is about to be published."""
        # One that could not be published is put again.
        identity = version.manifest["origin"]
        kept = [each for each in self._kept if each.manifest["origin"] != identity]
        self._kept = [*kept, version]
        self._known |= version.objects

    def sweep(self) -> None:
        """Delete objects that have not been needed for long enough."""
        anchors = list(dict.fromkeys(version.anchor for version in reversed(self._kept)))
        self._kept = [
            version
            for version in self._kept[-KEEP_VERSIONS:]
            if version.anchor in anchors[:KEEP_ANCHORS]
        ]
        needed = set[str]().union(*(version.objects for version in self._kept))
        now, before = time.monotonic(), self._unneeded_since
        since = {name: before.get(name, now) for name in self._known - needed}
        old = [name for name, at in since.items() if now - at >= TIMING.bucket_grace_s]
        self._bucket.delete(old)
        self._known.difference_update(old)
        self._unneeded_since = since
