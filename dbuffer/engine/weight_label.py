"""`WeightLabel`: how an engine's responses tell which version it has.

An engine without a version has weights that did not come from its store: the checkpoint that it was
started with, or what another load or sleep left. Its record then names no version, and it answers
under the label :data:`UNKNOWN_VERSION`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import ReceiverRecord, step_in

UNKNOWN_VERSION = "unknown"
"""Label of an engine without a version."""


def served_by(record: ReceiverRecord | None) -> Lineage | None:
    """Return the version that an engine serves by its record, or None if it is of no store."""
    return None if record is None or record.is_broken else record.lineage


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Label under which an engine answers: a version, and what its publisher said of it."""

    version: str = UNKNOWN_VERSION
    """Number of the version; or another text, of weights that did not come from the store."""
    run: str | None = None
    """Run of the version."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that the version was published with, a trainer's ``step`` for instance."""
    newest_run: str | None = None
    """Run of the store's newest version while the engine gets it ready; None if it is ``run``."""
    is_attested: bool = False
    """Whether the weights were seen to be the version's, while the engine served."""

    @classmethod
    def of(
        cls,
        version: Lineage | None,
        metadata: Mapping[str, Any],
        newest: int | VersionId | None = None,
        *,
        is_attested: bool = False,
    ) -> Self:
        """Make the label of an engine that has this version, published with this metadata.

        ``newest``: the version that it gets ready.
        """
        if version is None:
            return cls()
        run, number = version.id
        newest_run = newest.run if isinstance(newest, VersionId) and newest.run != run else None
        return cls(str(number), run, metadata, newest_run, is_attested)

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
        values = {
            "version": self.version,
            "run": self.run,
            "metadata": self.metadata,
            "newest_run": self.newest_run,
            "attested": self.is_attested,
        }
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
            return cls(
                version,
                values.get("run"),
                values.get("metadata", {}),
                values.get("newest_run"),
                values.get("attested", False),
            )
        except (ValueError, AttributeError):
            return cls(text)


def describe_weights(version: Lineage | None) -> str:
    """Describe the weights of an engine that has this version of the store that it follows."""
    if version is None:
        return "weights from outside the store (its checkpoint, or another load)"
    return f"version {version.id.number}"
