"""`DeltaChain`: begins and commits versions, and decides which of them come with a delta."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from dbuffer.errors import StoreAccessError, StoreFullError, StoreNotFoundError
from dbuffer.format.chain import chain_of, is_long, trimmed
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import UNDECODABLE, Manifest
from dbuffer.io.changes import Changes
from dbuffer.io.delta import encode_delta
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import KeptMappings
from dbuffer.publish.draft import Draft
from dbuffer.runtime.trouble import log_once
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)

MAX_CHANGED_SHARE = 0.5
"""Largest fraction of all elements that a delta may change. Beyond, a full version is published."""

UNREADABLE = (*UNDECODABLE, StoreAccessError, StoreNotFoundError)
"""Errors of a version that cannot be read back, or is not what was published."""


def max_changed(layout: Layout) -> float:
    """Return the number of changed words up to which a delta is worth it."""
    return MAX_CHANGED_SHARE * layout.num_elements


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """The version that was published last: the next one may come with a delta from it."""

    manifest: Manifest
    buffer: str
    """Buffer with its manifest."""
    footer: Footer
    checksums: list[int] | None
    """Published checksums of its tensors, or None if it has none."""
    delta_bytes: dict[VersionId, int]
    """Bytes of the deltas of its chain, by the versions they lead to, oldest first. The chain's
    first version is there with 0 bytes."""


class DeltaChain:
    """Begins and commits a store's versions: full ones, and deltas from the version before.

    Each store has one: its sender's, or rank 0's of a sharded trainer.

    Args:
        writer: writes the store; closed with the chain.
        hashed: whether versions have checksums.
    """

    def __init__(self, writer: BufferWriter, *, hashed: bool) -> None:
        self.writer = writer
        self.hashed = hashed
        self.mappings = KeptMappings()
        self._last: DeltaBase | None = None
        """Version that was committed last."""
        self._draft: Draft | None = None
        self._base: DeltaBase | None = None
        """Version before the draft, if the draft may come with a delta from it."""
        self._num_bytes: int | None = None
        """Bytes of that delta, once it is written."""

    @property
    def draft(self) -> Draft:
        """Version that was begun."""
        assert self._draft is not None  # noqa: S101 - between begin and commit
        return self._draft

    @property
    def last(self) -> DeltaBase:
        """Version that was committed last."""
        assert self._last is not None  # noqa: S101 - there is one
        return self._last

    @property
    def maps_files(self) -> bool:
        """Whether the store is on a local mount, where each version has a whole file."""
        return self.writer.medium.maps_files

    def explain_full(self, reason: str) -> None:
        """Log, for those who ask for a delta, why the next version comes without one."""
        self.explain(f"no delta: {reason}")

    def explain(self, what: str) -> None:
        """Log how a version is published, for those who ask for a delta."""
        logger.info("%s: %s", self.writer.root, what)

    def begin(self, version: int, footer: Footer | None, *, with_delta: bool) -> Draft:
        """Claim the idle buffer for a version.

        On a network mount, a version with a delta gets a weights file only if its anchor is far, or
        readers cannot have the last version.

        Args:
            version: its number in the writer's run.
            footer: footer of its tensors; None for a stream, whose footer is known at its end.
            with_delta: whether it may come with a delta from the last one.
        """
        base, with_file = self._last if with_delta else None, True
        if base is not None:
            problem = self._problem_with(base)
            if problem is not None:
                message = "%s: the next deltas lead from the next version on: %s"
                logger.warning(message, self.writer.root, problem)
                base = replace(base, delta_bytes={base.manifest.id: 0})
            elif not self.maps_files:
                with_file = _is_far_from_anchor(base)
                if with_file:
                    self.explain(
                        "the next version gets a whole file: its anchor is many deltas, or bytes, "
                        "back"
                    )
        self._base, self._num_bytes = base, None
        self._draft = Draft(
            self.writer,
            self.mappings,
            self.writer.version(version),
            footer,
            hashed=self.hashed,
            with_file=with_file,
        )
        return self._draft

    def _problem_with(self, last: DeltaBase) -> str | None:
        """Return why readers cannot have the last version or its deltas, or None if they can.

        By its files, which other users must not be able to write, and receivers' records.
        """
        store = self.writer.store
        manifest = store.undamaged_manifest(last.buffer)
        if manifest is None or manifest.id != last.manifest.id:
            # Files that no manifest names are removed with the next claim.
            return "it lost its newest manifest"
        _, *later = last.delta_bytes.items()
        files = {store.delta_path(name): num_bytes for name, num_bytes in later}
        files[store.weights_path(last.buffer, manifest)] = manifest.file_bytes
        problem = self.writer.problem_with(files)
        if problem is not None or self.maps_files:
            return problem
        since_anchor = last.manifest.since_anchor
        for record in store.receivers():
            if record.unreadable in since_anchor:
                return f"{record.receiver} cannot read {record.unreadable}, which stands on deltas"
        return None

    def is_worth(self, changes: Changes, layout: Layout) -> bool:
        """Whether a delta is worth it; if not, log that too much changed."""
        if changes.num_changed <= max_changed(layout):
            return True
        self.explain_full(f"more than {100 * MAX_CHANGED_SHARE:.0f} % of all elements changed")
        return False

    def add_delta(self, changes: Changes, checksums: list[int] | None) -> None:
        """Write the delta that leads to the draft, if it has a base and few changes.

        A version that has a file is published without its delta if that is too long, or the store
        has no room for it.

        Args:
            changes: what differs from the last version.
            checksums: of all tensors of the draft, if it has any.
        """
        draft, base = self.draft, self._base
        layout = draft.footer.layout
        if base is None or not self.is_worth(changes, layout):
            return
        encoded = encode_delta(
            changes,
            None if base.checksums is None or checksums is None else (base.checksums, checksums),
            base=base.manifest.id,
            version=draft.id,
            layout_xxh3=base.footer.layout_xxh3,
        )
        num_bytes = sum(map(len, encoded))
        if draft.has_file and is_long([num_bytes], layout.num_bytes):
            self.explain_full(
                f"it would have {num_bytes} bytes, and a full version {layout.num_bytes}"
            )
            return
        try:
            self._num_bytes = self.writer.add_delta(draft.claim, draft.id, encoded)
        except StoreFullError:
            if not draft.has_file:
                raise
            log_once(
                logger,
                "%s has no room for deltas: publishing versions without, until it has",
                self.writer.root,
            )

    def commit(self, metadata: dict[str, Any], checksums: list[int] | None) -> int | None:
        """Publish the draft; return the bytes of the delta that leads to it, or None without one.

        Args:
            metadata: the version's.
            checksums: of all its tensors, if it has any.
        """
        draft, base, num_bytes = self.draft, self._base, self._num_bytes
        footer = draft.footer
        delta_bytes = {draft.id: 0}
        anchor_fields = {}
        if base is not None:
            if num_bytes is not None:
                delta_bytes = {**base.delta_bytes, draft.id: num_bytes}
            if not draft.has_file:
                anchor_fields = base.manifest.upon(base.buffer)
        delta_bytes = trimmed(delta_bytes, footer.layout.num_bytes, anchor_fields.get("anchor"))
        manifest = draft.commit(metadata, checksums, chain=chain_of(delta_bytes), **anchor_fields)
        self._last = DeltaBase(manifest, draft.claim.buffer, footer, checksums, delta_bytes)
        self._draft = None
        return num_bytes

    def abandon(self) -> None:
        """Abandon the draft, if there is one."""
        if self._draft is not None:
            self._draft.abandon()
            self._draft = None

    def close(self) -> None:
        self.mappings.clear()
        self.writer.close()


def _is_far_from_anchor(last: DeltaBase) -> bool:
    """Whether a new anchor serves late readers better than one more delta."""
    sizes = [last.delta_bytes[version] for version in last.manifest.since_anchor]
    return is_long(sizes, last.footer.layout.num_bytes)
