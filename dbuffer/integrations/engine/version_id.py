"""`VersionId` and `WeightLabel`: the version that an engine has, and how its responses tell it.

An engine without a version has weights that did not come from its store: the checkpoint that it was
started with, or what another load or sleep left. Its record then names no version, and it answers
under the label :data:`UNKNOWN_VERSION`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from dbuffer.format.manifest import Pointer, ReceiverRecord, differ, step_in

UNKNOWN_VERSION = "unknown"
"""Label of an engine without a version."""


class VersionId(NamedTuple):
    """A version of a store: the one that an engine has, or one to switch it to."""

    version: int
    history: str | None
    """History that it belongs to; None: there is no store yet that would say."""
    identity: str | None = None
    """Identity of what was published; None: it is not known."""

    @classmethod
    def of(cls, record: ReceiverRecord | None) -> VersionId | None:
        """Read the version that an engine's record says it serves; None: none of this store."""
        if record is None or record.applied_version is None or record.is_broken:
            return None
        return cls(record.applied_version, record.history, record.applied_identity)

    @classmethod
    def named_by(cls, pointer: Pointer | None) -> VersionId:
        """Return a store's newest version; None: it has none, which is version 0."""
        return cls(pointer.version, pointer.history, pointer.identity) if pointer else cls(0, None)

    def is_replaced(self, newest: VersionId) -> bool:
        """Whether a store with this newest version has replaced this one.

        By another history, or, where it was put back from a copy, by another version of one number.
        """
        is_again = self.version == newest.version and differ(self.identity, newest.identity)
        return is_again or self.is_of_another_history(newest.history)

    def is_of_another_history(self, history: str | None) -> bool:
        """Whether versions of this history say nothing about this one."""
        return differ(self.history, history)


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Label under which an engine answers: a version, and what its publisher said of it."""

    version: str = UNKNOWN_VERSION
    """Number of the version; or another text, of weights that did not come from the store."""
    history: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that the version was published with, a trainer's ``step`` for instance."""

    @classmethod
    def of(cls, version: VersionId | None, metadata: Mapping[str, Any]) -> Self:
        """Make the label of an engine that has this version, published with this metadata."""
        return cls() if version is None else cls(str(version.version), version.history, metadata)

    @property
    def number(self) -> int | None:
        """The version's number; None: the weights did not come from a store."""
        is_number = self.version.isascii() and self.version.isdecimal()
        return int(self.version) if is_number else None

    @property
    def step(self) -> float | None:
        """The number ``step`` of the metadata, if it has one."""
        return step_in(self.metadata)

    def as_json(self) -> dict[str, Any]:
        """Return it as responses have it, without what is not known."""
        values = {"version": self.version, "history": self.history, "metadata": self.metadata}
        return {name: value for name, value in values.items() if value}

    def encode(self) -> str:
        """Return it as one text: the version, and JSON of the rest if there is any."""
        rest = self.as_json()
        del rest["version"]
        return " ".join([self.version, *([json.dumps(rest)] if rest else [])])

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote; any other text is a version's label by itself."""
        version, _, rest = text.partition(" ")
        try:
            values = json.loads(rest) if rest else {}
            return cls(version, values.get("history"), values.get("metadata", {}))
        except (ValueError, AttributeError):
            return cls(text)


def describe_weights(version: VersionId | None) -> str:
    """Describe the weights of an engine that has this version of the store that it follows."""
    if version is None:
        return "weights from outside the store (its checkpoint, or another load)"
    return f"version {version.version}"
