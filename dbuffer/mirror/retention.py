"""Objects of a bucket that its newest version lacks, and objects that no reader needs any more."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from dbuffer.format.lineage import VersionId
from dbuffer.format.objects import BucketVersion, version_of
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

    Kept are the newest version's parts, the last anchors and their deltas, and any anchor whose
    successor is younger than `Timing.bucket_grace_s`. Parts of another run may be deleted when the
    newest version's run and they are as old as that. Times are the service's; the last part's is
    taken for now.
    """
    needed = {part.name for part in newest.parts}
    objects = {name: version for name in listed if (version := version_of(name)) is not None}
    put_at = {name: listed[name].put_at for name in objects}
    limit = max(put_at.values()) - TIMING.bucket_grace_s
    leading = {each for each in objects.values() if newest.manifest.lineage.reaches(each)}
    began_at = min(put_at[name] for name, of in objects.items() if of.run == newest.id.run)
    anchors: dict[int, float] = {}
    for name, of in objects.items():
        if of in leading and ".weights/" in name:
            anchors[of.number] = max(anchors.get(of.number, 0.0), put_at[name])
    numbers = sorted(anchors)
    recent = [one for one, later in pairwise(numbers) if anchors[later] > limit]
    oldest = min([*numbers[-KEEP_ANCHORS:], *recent])

    def is_unneeded(name: str, version: VersionId) -> bool:
        if version in leading:
            return version.number < oldest
        return max(put_at[name], began_at) < limit

    return [name for name, of in objects.items() if name not in needed and is_unneeded(name, of)]
