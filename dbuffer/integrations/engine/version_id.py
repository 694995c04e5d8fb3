"""`VersionId`: the version that an engine has, with its label and its words.

An engine without a version has weights that are no version of its store, or may be none. Its record
then names no version, and it answers under the label :data:`UNKNOWN_VERSION`.
"""

from __future__ import annotations

from typing import NamedTuple

from dbuffer.format.manifest import ReceiverRecord

UNKNOWN_VERSION = "unknown"
"""Label of an engine without a version."""


class VersionId(NamedTuple):
    """A version of a store: the one that an engine has, or one to switch it to."""

    version: int
    history: str | None
    """History that it belongs to; None: there is no store yet that would say."""

    @classmethod
    def of(cls, record: ReceiverRecord | None) -> VersionId | None:
        """Read the version that an engine's record says it serves; None: none of this store."""
        if record is None or record.applied_version is None or record.is_broken:
            return None
        return cls(record.applied_version, record.history)

    def is_of_another_history(self, history: str | None) -> bool:
        """Whether versions of this history say nothing about this one."""
        return None not in (self.history, history) and self.history != history


def label_of(version: VersionId | None) -> str:
    """Return the label that an engine with this version reports with its responses."""
    return UNKNOWN_VERSION if version is None else str(version.version)


def describe_weights(version: VersionId | None) -> str:
    """Describe the weights of an engine that has this version of the store that it follows."""
    if version is None:
        return "weights that are no version of its store"
    return f"version {version.version}"
