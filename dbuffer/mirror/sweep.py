"""Objects of a bucket that its newest version lacks, and objects that no reader needs any more."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dbuffer.format.lineage import VersionId
from dbuffer.format.objects import BucketVersion, is_of_receivers, version_of
from dbuffer.mirror.bucket import Listed
from dbuffer.runtime.timing import TIMING

KEEP_ANCHORS = 2
"""Newest anchors that are kept, with the deltas since: a reader of an earlier one may be slow."""


def missing_objects(listed: Mapping[str, Listed], newest: BucketVersion) -> list[str]:
    """Return the names of the newest version's parts that are missing, or have another size."""
    return [
        part.name
        for part in newest.parts
        if part.name not in listed or listed[part.name].num_bytes != part.num_bytes
    ]


def unneeded_objects(listed: Mapping[str, Listed], newest: BucketVersion) -> list[str]:
    """Return the names of parts that may be deleted.

    Kept are the newest version's parts, the last anchors and their deltas, and all parts that are
    younger than `Timing.bucket_grace_s`. Times are the service's; the last part's is taken for now.
    """
    needed = {part.name for part in newest.parts}
    objects = {name: version for name in listed if (version := version_of(name)) is not None}
    limit = max(listed[name].put_at for name in objects) - TIMING.bucket_grace_s
    leading = {each for each in objects.values() if newest.manifest.lineage.reaches(each)}
    anchors = {of.number for name, of in objects.items() if of in leading and ".weights/" in name}
    oldest = min(sorted(anchors)[-KEEP_ANCHORS:])

    def is_kept(name: str, version: VersionId) -> bool:
        is_recent = version in leading and version.number >= oldest
        return is_recent or name in needed or listed[name].put_at > limit

    return [name for name, version in objects.items() if not is_kept(name, version)]


def forgotten_objects(listed: Mapping[str, Listed]) -> list[str]:
    """Return the names of records of mirrors that have put none for long.

    A mirror that runs puts its object again.
    """
    limit = time.time() - TIMING.forget_receivers_after_s
    return [name for name, each in listed.items() if is_of_receivers(name) and each.put_at < limit]
