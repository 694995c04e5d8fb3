"""Length of a chain of deltas: when a full version serves readers better than one more delta.

Senders and mirrors share the rule, and `dbuffer status` shows when the next anchor comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbuffer.format.lineage import VersionId

MAX_CHAIN = 64
"""Most deltas that a version names: late readers apply them one after another."""

MAX_CHAIN_SHARE = 0.5
"""Largest fraction of a full version's bytes that a chain's deltas may have. Beyond, an anchor is
smaller."""


def until_anchor(num_deltas: int, delta_bytes: int, version_bytes: int) -> tuple[int, int]:
    """Return how many deltas, and how many bytes of them, a chain still has room for.

    Without room for a delta, or with fewer than 0 bytes, the next version is an anchor.
    """
    return MAX_CHAIN - num_deltas, int(MAX_CHAIN_SHARE * version_bytes) - delta_bytes


def is_long(delta_bytes: Sequence[int], version_bytes: int) -> bool:
    """Whether deltas of these sizes are a worse way to a version than a new anchor."""
    num_deltas, num_bytes = until_anchor(len(delta_bytes), sum(delta_bytes), version_bytes)
    return num_deltas <= 0 or num_bytes < 0


def trimmed(
    delta_bytes: dict[VersionId, int], version_bytes: int, anchor: VersionId | None
) -> dict[VersionId, int]:
    """Drop the oldest versions of a long chain, but not the anchor, nor the deltas after it.

    ``delta_bytes`` has the size of each version's delta, of the chain's first version 0. A single
    delta that is too long goes as well: then no delta leads to the version.
    """
    versions = list(delta_bytes)
    while len(versions) > 1 and versions[0] != anchor:
        if not is_long([delta_bytes[version] for version in versions[1:]], version_bytes):
            break
        versions = versions[1:]
    return {version: delta_bytes[version] for version in versions}


def chain_of(delta_bytes: dict[VersionId, int]) -> list[VersionId]:
    """Return a chain as a manifest has it: empty if no delta leads to the version."""
    return list(delta_bytes) if len(delta_bytes) > 1 else []
