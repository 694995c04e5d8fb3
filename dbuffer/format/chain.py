"""Limits on the number and the size of deltas in a chain.

When a chain reaches a limit, the sender or mirror writes the next version whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbuffer.format.lineage import VersionId

MAX_CHAIN = 64
"""Largest number of deltas in a chain. A reader without an earlier version applies all of them."""

MAX_CHAIN_SHARE = 0.5


def until_anchor(num_deltas: int, delta_bytes: int, version_bytes: int) -> tuple[int, int]:
    """Return how many more deltas, and how many more bytes of deltas, a chain can have.

    If the first number is not positive, or the second is negative, the next version is an anchor:
    a version that is published whole.
    """
    return MAX_CHAIN - num_deltas, int(MAX_CHAIN_SHARE * version_bytes) - delta_bytes


def is_within_limits(delta_bytes: Sequence[int], version_bytes: int) -> bool:
    return min(until_anchor(len(delta_bytes), sum(delta_bytes), version_bytes)) >= 0


def trimmed(
    delta_bytes: dict[VersionId, int], version_bytes: int, anchor: VersionId | None
) -> dict[VersionId, int]:
    """Drop the oldest versions of a chain until the chain is within the limits.

    ``delta_bytes`` has the size of the delta that leads to each version, oldest first. The delta
    that leads to the oldest version does not count. ``anchor`` is the earlier version in the
    weights file, or None if the file has the newest version. The anchor and later versions stay.
    Return {} if only the newest version would stay: a single version is no chain.
    """
    versions = list(delta_bytes)
    while len(versions) > 1 and versions[0] != anchor:
        if is_within_limits([delta_bytes[version] for version in versions[1:]], version_bytes):
            break
        del versions[0]
    return {version: delta_bytes[version] for version in versions if len(versions) > 1}
