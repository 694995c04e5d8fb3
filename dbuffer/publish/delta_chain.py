"""`DeltaChain`: the versions that deltas connect, up to the one that was published last."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
)
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import UNDECODABLE, Manifest
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Diff
from dbuffer.io.copier import Copier
from dbuffer.io.delta import encode_delta
from dbuffer.io.footer import Footer
from dbuffer.publish.draft import Draft, Drafts
from dbuffer.runtime.trouble import log_once
from dbuffer.store.hold import Held, hold_newest

logger = logging.getLogger(__name__)

MAX_CHAIN = 64
"""Most deltas that a version names: late readers apply them one after another."""

MAX_CHAIN_SHARE = 0.5
"""Largest share that a chain's deltas may have of the whole version's bytes. Beyond, an anchor is
the cheaper way."""

MAX_CHANGED_SHARE = 0.5
"""Largest share of all elements that a delta may change. Beyond, a version is published whole."""

UNREADABLE = (*UNDECODABLE, StoreAccessError, StoreNotFoundError)
"""Errors of a version that cannot be read back, or is not what was published."""


def is_worth_a_delta(num_changed: int, layout: Layout) -> bool:
    """Whether so many changed words are few enough not to publish the version whole."""
    return num_changed <= MAX_CHANGED_SHARE * layout.num_elements


@dataclass(frozen=True, slots=True, eq=False)
class ChainHead:
    """The version that was published last, at the end of its chain."""

    manifest: Manifest
    buffer: str
    """Buffer with its manifest."""
    footer: Footer
    checksums: list[int] | None
    """Checksums of its tensors, as they were published; None: it has none."""
    chain: dict[str, int]
    """Bytes of the deltas of the versions up to it, by identity, oldest first. No delta leads to
    the first."""
    anchor_version: int
    """Version in whose weights file it lies; its own, where that is whole."""

    @classmethod
    def of(cls, held: Held, chain: ChainReader, footer: Footer, *, hashed: bool) -> Self:
        """Describe a held version by its own records; ``hashed``: with its checksums."""
        manifest = held.manifest
        checksums = chain.expected({}) if hashed else None
        if hashed and checksums is None:
            raise StoreCorruptError(
                f"{held.path}: its checksums were damaged after it was published"
            )
        first, *later = manifest.chain or [manifest.identity]
        chain_bytes = {first: 0} | {name: chain.header(name).num_bytes for name in later}
        anchor_version = manifest.version
        if since_anchor := manifest.deltas_after(manifest.anchor or manifest.identity):
            anchor_version = chain.header(since_anchor[0]).record.version - 1
        return cls(manifest, held.buffer, footer, checksums, chain_bytes, anchor_version)

    @property
    def anchor(self) -> str:
        """Identity of the version in whose weights file it lies."""
        return self.manifest.anchor or self.manifest.identity

    @property
    def is_far_from_anchor(self) -> bool:
        """Whether late readers fare better with a new anchor than with one more delta."""
        names = list(self.chain)
        since = names[names.index(self.anchor) + 1 :]
        return _is_long([self.chain[name] for name in since], self.footer.layout)

    def follows(self, identity: str | None) -> bool:
        """Whether a delta leads to it from this version."""
        return len(self.chain) > 1 and list(self.chain)[-2] == identity

    def checksums_after(self, changed: dict[int, int] | None) -> list[int] | None:
        """Return the checksums of all tensors when some have ``changed``; None: it has none.

        Those of the others are as they were published, whatever lies in the file now.
        """
        if self.checksums is None or changed is None:
            return None
        return [changed.get(index, known) for index, known in enumerate(self.checksums)]


class DeltaChain:
    """Begins and commits versions: whole ones, and such as build upon the last.

    Only the writer of a store has one: of a trainer's ranks, the first.
    """

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self.head: ChainHead | None = None
        """Version that was published last, as far as the next may build upon it."""
        self._version = 0
        """Version that was begun, as all that follows."""
        self._base: ChainHead | None = None
        """Version that it builds upon; None: it is whole."""
        self._chain: dict[str, int] = {}
        """Chain that leads to its base, as `ChainHead.chain`; empty: none does."""
        self._needs_file = True
        self._delta_bytes: int | None = None

    @property
    def last(self) -> ChainHead:
        """Head, for callers that have just made it."""
        assert self.head is not None  # noqa: S101
        return self.head

    @property
    def base(self) -> ChainHead:
        """Version that the begun one builds upon."""
        assert self._base is not None  # noqa: S101 - it was begun as a delta
        return self._base

    @property
    def keeps_buffers_whole(self) -> bool:
        """Whether every version has a file that holds all of it."""
        return self.drafts.writer.medium.maps_files

    def resume_from_store(self, footer: Footer | None, *, hashed: bool) -> ChainHead | None:
        """Make the version that an earlier sender left the head, and return it.

        None: there is none, it has other tensors or is not as this sender would publish it; or,
        logged, it cannot be read.

        Args:
            footer: footer of the tensors to be published; None: whatever that version has.
            hashed: whether this sender's versions have checksums.
        """
        self.head = None
        store = self.drafts.writer.store
        try:
            held = hold_newest(store, newer_than=None)
            if held is None:
                return None
            with held:
                if not self._could_have_published(held.manifest, hashed=hashed):
                    return None
                if footer is None:
                    layout = held.read_layout()
                    footer = self.drafts.footer_of(layout.specs, layout.aliases)
                if footer.layout_xxh3 == held.manifest.layout_xxh3:
                    chain = ChainReader(held, footer.layout)
                    self.head = ChainHead.of(held, chain, footer, hashed=hashed)
        except UNREADABLE as error:
            self.log_full_publish(str(error))
        return self.head

    def log_full_publish(self, reason: str) -> None:
        """Log why the next version does not build upon the last."""
        root = self.drafts.writer.root
        logger.warning("%s: publishing a whole version, not upon its last: %s", root, reason)

    def _could_have_published(self, manifest: Manifest, *, hashed: bool) -> bool:
        writer = self.drafts.writer
        return (
            manifest.history == writer.record.history
            and manifest.is_final != writer.medium.can_rewrite_in_place
            and (manifest.checksums_xxh3 is not None) == hashed
            and (manifest.anchor is None or not self.keeps_buffers_whole)
        )

    def begin(
        self, version: int, footer: Footer | None, *, is_delta: bool, hashed: bool = False
    ) -> Draft:
        """Begin a version of these tensors.

        Args:
            version: its number.
            footer: that of its tensors; None where they are known only when the last has come.
            is_delta: it builds upon the head, and has a file only where buffers are kept whole or
                its anchor is far.
            hashed: its draft takes the checksums as it is filled.
        """
        self.adopt(version, is_delta=is_delta)
        # A delta's checksums are known: nothing is hashed as it is written.
        hashed = hashed and not is_delta
        return self.drafts.begin(version, footer, hashed=hashed, with_file=self._needs_file)

    def adopt(self, version: int, *, is_delta: bool) -> None:
        """Let the next commit be this version, in a draft that was begun elsewhere."""
        head, self.head = self.head, None
        self._version, self._delta_bytes = version, None
        self._base, self._chain, self._needs_file = None, {}, True
        if is_delta and head is not None:
            is_broken = self._is_broken(head)
            self._base = head
            self._chain = {head.manifest.identity: 0} if is_broken else head.chain
            if not (is_broken or self.keeps_buffers_whole):
                self._needs_file = head.is_far_from_anchor

    def _is_broken(self, head: ChainHead) -> bool:
        """Whether readers cannot have the head or its deltas: by its files, or one said so.

        Nor do they take what others could have written.
        """
        writer = self.drafts.writer
        manifest = writer.store.undamaged_manifest(head.buffer)
        if manifest is None or manifest.identity != head.manifest.identity:
            # What no manifest names is removed with the next claim.
            logger.warning("%s lost its newest manifest: publishing a whole version", writer.root)
            return True
        _, *later = head.chain.items()
        files = {writer.store.delta_path(name): num_bytes for name, num_bytes in later}
        files[writer.store.weights_path(head.buffer, manifest)] = manifest.file_bytes
        problem = writer.problem_with(files)
        if problem is not None:
            self.log_full_publish(problem)
            return True
        if self.keeps_buffers_whole:
            return False
        versions = range(head.anchor_version + 1, head.manifest.version + 1)
        for record in writer.store.receivers():
            if record.cannot_read(versions, writer.record.history):
                logger.warning(
                    "%s cannot read version %s of %s, which stands on deltas: publishing it whole",
                    record.receiver,
                    record.unreadable_version,
                    writer.root,
                )
                return True
        return False

    def add_delta(self, draft: Draft, diff: Diff, copier: Copier) -> None:
        """Write the delta that leads from the base to a draft.

        A version that has a file does without its delta, where there is no room.
        """
        base = self.base
        encoded = encode_delta(
            diff,
            None,
            copier,
            base=base.manifest.identity,
            identity=draft.claim.identity,
            version=self._version,
            layout_xxh3=base.footer.layout_xxh3,
        )
        try:
            self._delta_bytes = draft.add_delta((encoded.header, *encoded.chunks))
        except StoreFullError:
            if not draft.has_file:
                raise
            log_once(
                logger,
                "%s has no room for deltas: publishing versions without, until it has",
                draft.root,
            )
            self._chain = {}

    def commit(
        self, draft: Draft, metadata: dict[str, Any], checksums: list[int] | None
    ) -> int | None:
        """Publish a draft, which is the head then.

        Args:
            draft: as it was begun last, here or elsewhere.
            metadata: the version's.
            checksums: of all its tensors.

        Returns:
            The bytes of the delta that leads to it; None: there is none.
        """
        base, version = self._base, self._version
        chain = {**self._chain, draft.claim.identity: self._delta_bytes or 0}
        anchor_version, anchor_fields = version, {}
        if base is not None and not draft.has_file:
            anchor_version = base.anchor_version
            anchor_fields = base.manifest.upon(base.buffer)
        chain = trimmed(chain, draft.layout, anchor_fields.get("anchor"))
        draft.checksums = checksums
        manifest = draft.commit(metadata, version=version, chain=names_in(chain), **anchor_fields)
        buffer, footer = draft.claim.buffer, draft.footer
        self.head = ChainHead(manifest, buffer, footer, checksums, chain, anchor_version)
        self._base = None
        return self._delta_bytes


def _is_long(delta_bytes: Iterable[int], layout: Layout) -> bool:
    sizes = list(delta_bytes)
    return len(sizes) >= MAX_CHAIN or sum(sizes) > MAX_CHAIN_SHARE * layout.num_bytes


def trimmed(chain: dict[str, int], layout: Layout, anchor: str | None) -> dict[str, int]:
    """Drop the oldest versions of a long chain, but for the anchor and what leads from it."""
    names = list(chain)
    while len(names) > 1 and names[0] != anchor:
        if not _is_long([chain[name] for name in names[1:]], layout):
            break
        names = names[1:]
    return {name: chain[name] for name in names}


def names_in(chain: dict[str, int]) -> list[str]:
    """Return a chain as a manifest has it: none, where no delta leads to the version."""
    return list(chain) if len(chain) > 1 else []
