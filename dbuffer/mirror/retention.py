"""`unneeded_objects`: the objects of a bucket that no reader needs any more."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from dbuffer.format.lineage import VersionId
from dbuffer.format.objects import BucketPointer, BucketVersion, version_of
from dbuffer.mirror.bucket import Listed
from dbuffer.runtime.timing import TIMING

KEEP_VERSIONS = 8
"""Newest versions that are kept: a reader that is no further behind goes on by deltas."""

KEEP_ANCHORS = 2
"""Newest anchors that are kept: versions that stand on older ones are not."""


def unneeded_objects(
    listed: Mapping[str, Listed], pointer: BucketPointer, newest: BucketVersion
) -> list[str]:
    """Return the names of mirrors' objects that may be deleted.

    Kept are the newest versions, and any whose successor is younger than `Timing.bucket_grace_s`.
    Times are the service's; the newest version's is taken for now. Objects of another run may be
    deleted when the newest version's run and they are as old as that.
    """
    limit = listed[newest.name].put_at - TIMING.bucket_grace_s
    objects = {name: version for name in listed if (version := version_of(name)) is not None}
    leading = {name: of for name, of in objects.items() if pointer.lineage.reaches(of)}
    put_at: dict[int, float] = {}
    for name, version in leading.items():
        if name.endswith(".json"):
            put_at[version.number] = max(put_at.get(version.number, 0.0), listed[name].put_at)
    numbers = sorted(put_at)
    anchors = sorted({of.number for name, of in leading.items() if ".weights/" in name})
    anchors = anchors or [newest.anchor.number]
    oldest = max(numbers[-KEEP_VERSIONS:][0], anchors[-KEEP_ANCHORS:][0])
    recent = [number for number, later in pairwise(numbers) if put_at[later] > limit]
    oldest = min([oldest, *recent])
    oldest_anchor = max((number for number in anchors if number <= oldest), default=oldest)
    run_began_at = min(
        listed[name].put_at for name, of in leading.items() if of.run == newest.id.run
    )
    needed = newest.objects

    def is_unneeded(name: str, version: VersionId) -> bool:
        if name in needed:
            return False
        if name in leading:
            return version.number < (oldest if name.endswith(".json") else oldest_anchor)
        return max(listed[name].put_at, run_began_at) < limit

    return [name for name, version in objects.items() if is_unneeded(name, version)]
