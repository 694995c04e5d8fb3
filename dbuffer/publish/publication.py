"""`Publication`: result of publishing a version."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Result of publishing a version, by `send`, `send_patches` or `republish`, or by a mirror."""

    id: VersionId
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
    duration_s: float
    """From the call until receivers can see the version, waiting for slow readers included."""
    delta_bytes: int | None = None
    """Bytes of the delta from the version before, or None without a delta."""

    @property
    def version(self) -> int:
        """The version's number."""
        return self.id.number

    @classmethod
    def of(
        cls, version: VersionId, layout: Layout, started: float, delta_bytes: int | None = None
    ) -> Self:
        return cls(
            id=version,
            num_tensors=len(layout.specs),
            num_bytes=layout.num_bytes,
            duration_s=time.monotonic() - started,
            delta_bytes=delta_bytes,
        )
