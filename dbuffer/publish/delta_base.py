"""`DeltaBase`: the last version, as the base of a delta to the next version."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dbuffer.errors import StoreFullError
from dbuffer.format.chain import chain_of, is_long, trimmed
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Manifest
from dbuffer.io.changes import Changes
from dbuffer.io.delta import encode_delta
from dbuffer.publish.draft import Draft
from dbuffer.runtime.trouble import log_once
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)

MAX_CHANGED_SHARE = 0.5
"""Largest fraction of all elements that a delta may change. Beyond, a full version is published."""


def max_changed(layout: Layout) -> float:
    """Return the largest number of changed words that a delta is worth."""
    return MAX_CHANGED_SHARE * layout.num_elements


def is_worth(changes: Changes, layout: Layout, root: Path) -> bool:
    """Whether a delta is worth it; if not, log that too much changed."""
    if changes.num_changed <= max_changed(layout):
        return True
    explain_full(root, f"more than {100 * MAX_CHANGED_SHARE:.0f} % of all elements changed")
    return False


def explain_full(root: Path, reason: str) -> None:
    """Log, for those who ask for a delta, why the next version comes without one."""
    logger.info("%s: no delta: %s", root, reason)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """The version that was published last, as rank 0 knows it."""

    manifest: Manifest
    buffer: str
    """Buffer with its manifest."""
    layout: Layout
    checksums: Sequence[int] | None
    """Published checksums of its tensors, or None if it has none."""
    delta_bytes: dict[VersionId, int]
    """Bytes of the deltas of its chain, by the versions they lead to, oldest first. The chain's
    first version is there with 0 bytes."""

    def checked(self, writer: BufferWriter) -> Self:
        """Return the base, without its chain if readers cannot have the version or its deltas."""
        problem = self._problem(writer)
        if problem is None:
            return self
        message = "%s: the next deltas lead from the next version on: %s"
        logger.warning(message, writer.root, problem)
        return replace(self, delta_bytes={self.manifest.id: 0})

    def _problem(self, writer: BufferWriter) -> str | None:
        """Return why readers cannot have the version or its deltas, or None if they can.

        By its files, which other users must not be able to write, and receivers' records.
        """
        store = writer.store
        manifest = store.undamaged_manifest(self.buffer)
        if manifest is None or manifest.id != self.manifest.id:
            # Files that no manifest names are removed with the next claim.
            return "it lost its newest manifest"
        _, *later = self.delta_bytes.items()
        files = {store.delta_path(name): num_bytes for name, num_bytes in later}
        files[store.weights_path(self.buffer, manifest)] = manifest.file_bytes
        problem = writer.problem_with(files)
        if problem is not None or writer.medium.maps_files:
            return problem
        since_anchor = self.manifest.since_anchor
        for record in store.receivers():
            if record.unreadable in since_anchor:
                return f"{record.receiver} cannot read {record.unreadable}, which stands on deltas"
        return None

    def is_far_from_anchor(self) -> bool:
        """Whether a new anchor serves late readers better than one more delta."""
        sizes = [self.delta_bytes[version] for version in self.manifest.since_anchor]
        return is_long(sizes, self.layout.num_bytes)

    def write_delta(
        self, writer: BufferWriter, draft: Draft, changes: Changes, checksums: list[int] | None
    ) -> int | None:
        """Write the delta that leads to a draft; return its bytes.

        A version that has a file is published without its delta if that is too long, or the store
        has no room for it: return None then.

        Args:
            writer: writes the store.
            draft: the next version.
            changes: what differs from this version.
            checksums: checksums of all tensors of the draft, if it has any.
        """
        layout = self.layout
        before = self.checksums
        encoded = encode_delta(
            changes,
            None if before is None or checksums is None else (before, checksums),
            base=self.manifest.id,
            version=draft.id,
            layout_xxh3=layout.xxh3,
        )
        num_bytes = sum(map(len, encoded))
        if draft.has_file and is_long([num_bytes], layout.num_bytes):
            reason = f"it would have {num_bytes} bytes, and a full version {layout.num_bytes}"
            explain_full(writer.root, reason)
            return None
        try:
            return writer.add_delta(draft.claim, draft.id, encoded)
        except StoreFullError:
            if not draft.has_file:
                raise
            message = "%s has no room for deltas: publishing versions without, until it has"
            log_once(logger, message, writer.root)
            return None

    @classmethod
    def commit(
        cls,
        draft: Draft,
        metadata: dict[str, Any],
        checksums: list[int] | None,
        base: DeltaBase | None,
        num_bytes: int | None,
    ) -> Self:
        """Publish a draft; return it as the next version's base.

        Args:
            draft: the version.
            metadata: the version's.
            checksums: checksums of all its tensors, if it has any.
            base: version before it, if the draft stands on that or has a delta from it.
            num_bytes: bytes of this delta, or None without one.
        """
        delta_bytes, anchor_fields = {draft.id: 0}, {}
        if base is not None and num_bytes is not None:
            delta_bytes = {**base.delta_bytes, draft.id: num_bytes}
        if base is not None and not draft.has_file:
            anchor_fields = base.manifest.upon(base.buffer)
        layout = draft.layout
        delta_bytes = trimmed(delta_bytes, layout.num_bytes, anchor_fields.get("anchor"))
        manifest = draft.commit(metadata, checksums, chain=chain_of(delta_bytes), **anchor_fields)
        return cls(manifest, draft.claim.buffer, layout, checksums, delta_bytes)
