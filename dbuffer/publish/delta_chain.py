"""`DeltaChain`: what the next version can be built upon, and what its manifest says of that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
    UnsupportedError,
)
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import Manifest
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Found
from dbuffer.io.copier import Copier
from dbuffer.io.delta import EncodedDelta, encode_delta
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors
from dbuffer.publish.draft import Draft, Drafts
from dbuffer.runtime.trouble import log_once
from dbuffer.store.buffer import Held

logger = logging.getLogger(__name__)

MAX_CHAIN = 64
"""DeltaPublisher that a version may name: late readers apply them one after another."""

MAX_CHAIN_SHARE = 0.5
"""Bytes of a chain's deltas, of the whole version's. Beyond, an anchor is the cheaper way."""


MAX_CHANGED_SHARE = 0.5
"""Of all elements. A version of which more changed is published whole."""

UNREADABLE = (StoreAccessError, StoreCorruptError, StoreNotFoundError, UnsupportedError)
"""What a version raises that cannot be read back, or is not what was published."""

T = TypeVar("T")


def is_worth_a_delta(num_changed: int, layout: Layout) -> bool:
    """Whether so many changed words are few enough not to publish the version whole."""
    return num_changed <= MAX_CHANGED_SHARE * layout.num_elements


class Link(NamedTuple):
    """A version of the chain, and the bytes of the delta that leads to it."""

    identity: str
    delta_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ChainHead:
    """The version that was published last, at the end of its chain."""

    manifest: Manifest
    buffer: str
    """The one with its manifest."""
    footer: Footer
    checksums: list[int] | None
    """Of its tensors, as they were published; None: it has none."""
    chain: list[Link]
    """The versions that deltas connect, up to it; the first one's bytes do not count."""
    anchor_version: int
    """That whose weights file it stands on; its own, where that is whole."""

    @classmethod
    def of(cls, held: Held, chain: ChainReader, footer: Footer, *, hashed: bool) -> Self:
        """A held version, by what it says of itself; ``hashed``: with its checksums."""
        manifest = held.manifest
        checksums = chain.expected({}) if hashed else None
        if hashed and checksums is None:
            raise StoreCorruptError(
                f"{held.path}: its checksums were damaged after it was published"
            )
        names = manifest.chain or [manifest.identity]
        links = [Link(name, chain.header(name).num_bytes) for name in names[1:]]
        anchor_version = manifest.version
        if upon_anchor := manifest.deltas_after(manifest.anchor or manifest.identity):
            anchor_version = chain.header(upon_anchor[0]).record.version - 1
        chain_so_far = [Link(names[0], 0), *links]
        return cls(manifest, held.buffer, footer, checksums, chain_so_far, anchor_version)

    @property
    def since_anchor(self) -> list[Link]:
        """What leads from the version in the weights file to this one."""
        names = [link.identity for link in self.chain]
        return self.chain[names.index(self.manifest.anchor or self.manifest.identity) + 1 :]

    def follows(self, identity: str | None) -> bool:
        """Whether a delta leads to it from this version."""
        return len(self.chain) > 1 and self.chain[-2].identity == identity

    def checksums_after(self, changed: dict[int, int] | None) -> list[int] | None:
        """Those of all tensors when some have ``changed``; None: they were not taken.

        By what was published of the others, and not by what lies there.
        """
        if self.checksums is None or changed is None:
            return None
        return [changed.get(index, known) for index, known in enumerate(self.checksums)]


class DeltaChain:
    """Begins versions: whole ones, and such as are built upon the last."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts

    @property
    def keeps_buffers_whole(self) -> bool:
        """Whether every version has a file that holds all of it."""
        return self.drafts.writer.medium.keeps_buffers_whole

    def resume_from_store(
        self,
        footer: Footer | None,
        read: Callable[[Held, ChainReader, ChainHead], T],
        *,
        hashed: bool,
    ) -> T | None:
        """What ``read`` makes of the version that the sender before this one has left.

        None: there is none, it has other tensors or is not as this sender would publish it; or,
        logged, it cannot be read.

        Args:
            footer: that of the tensors to be published; None: whatever that version has.
            read: called while the version is held. What it raises of `UNREADABLE` is that.
            hashed: whether this sender's versions have checksums.
        """
        store = self.drafts.writer.store
        try:
            held = store.hold_newest(newer_than=None)
            if held is None:
                return None
            with held:
                if not self._could_have_published(held.manifest, hashed=hashed):
                    return None
                if footer is None:
                    layout = held.read_layout()
                    footer = self.drafts.footer_of(layout.specs, layout.aliases)
                if footer.layout_xxh3 != held.manifest.layout_xxh3:
                    return None
                chain = ChainReader(held, footer.layout)
                return read(held, chain, ChainHead.of(held, chain, footer, hashed=hashed))
        except UNREADABLE as error:
            self.log_full_publish(str(error))
            return None

    def log_full_publish(self, reason: str) -> None:
        """Log why nothing is built upon the version that is there."""
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

    def begin(self, version: int, footer: Footer, *, hashed: bool = False) -> Step:
        """A whole version, which begins a chain; ``hashed``: its draft takes the checksums."""
        return Step(self.drafts.begin(version, footer, hashed=hashed), version)

    def begin_delta(self, tip: ChainHead, version: int) -> Step:
        """A version to which a delta leads from the last one."""
        # Far from their anchor, late readers fare better with a new one.
        is_far = _is_long(tip.since_anchor, tip.footer.layout)
        chain, has_file = tip.chain, self.keeps_buffers_whole or is_far
        if self._is_broken(tip):
            chain, has_file = chain[-1:], True
        # Its checksums are known: nothing is hashed as it is written.
        draft = self.drafts.begin(version, tip.footer, hashed=False, with_file=has_file)
        return Step(draft, version, tip, chain)

    def adopt(self, draft: Draft, version: int, tip: ChainHead | None) -> Step:
        """The same of a draft that was begun, and filled, before; whole, without a ``tip``."""
        if tip is None:
            return Step(draft, version)
        return Step(draft, version, tip, tip.chain[-1:] if self._is_broken(tip) else tip.chain)

    def _is_broken(self, tip: ChainHead) -> bool:
        """Whether readers cannot have the last version or its deltas: by its files, or one said so.

        Nor do they take what others could have written.
        """
        writer = self.drafts.writer
        found = writer.store.undamaged_manifest(tip.buffer)
        if found is None or found.identity != tip.manifest.identity:
            # What no manifest names is removed with the next claim.
            logger.warning("%s lost its newest manifest: publishing a whole version", writer.root)
            return True
        files = {writer.store.delta_path(link.identity): link.delta_bytes for link in tip.chain[1:]}
        files[writer.store.weights_path(tip.buffer, found)] = found.file_bytes
        problem = writer.problem_with(files)
        if problem is not None:
            self.log_full_publish(problem)
            return True
        if self.keeps_buffers_whole:
            return False
        versions = range(tip.anchor_version + 1, tip.manifest.version + 1)
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


class Step:
    """A version in the making. Leaving its ``with`` block without a commit abandons it."""

    def __init__(
        self, draft: Draft, version: int, tip: ChainHead | None = None, chain: Sequence[Link] = ()
    ) -> None:
        self.draft = draft
        self.delta_bytes: int | None = None
        """None: no delta leads to it."""
        self._version = version
        self._tip = tip
        self._chain = chain

    def add_delta(self, found: Found, before: FileTensors | None, copier: Copier) -> EncodedDelta:
        """Write the delta that leads to it; ``before`` as for `encode_delta`.

        A version that has a file does without its delta, where there is no room.
        """
        assert self._tip is not None  # noqa: S101 - of a step that was begun upon one
        encoded = encode_delta(
            found,
            before,
            copier,
            base=self._tip.manifest.identity,
            identity=self.draft.claim.identity,
            version=self._version,
            layout_xxh3=self._tip.footer.layout_xxh3,
        )
        try:
            self.delta_bytes = self.draft.add_delta((encoded.header, *encoded.chunks))
        except StoreFullError:
            if not self.draft.has_file:
                raise
            log_once(
                logger,
                "%s has no room for deltas: publishing versions without, until it has",
                self.draft.root,
            )
            self._chain = ()
        return encoded

    def commit(self, metadata: dict[str, Any], checksums: list[int] | None) -> ChainHead:
        """Publish it. ``checksums``: of all its tensors."""
        draft, tip = self.draft, self._tip
        chain = [*self._chain, Link(draft.claim.identity, self.delta_bytes or 0)]
        anchor_version, upon = self._version, {}
        if tip is not None and not draft.has_file:
            anchor_version, upon = tip.anchor_version, tip.manifest.upon(tip.buffer)
        chain = trimmed(chain, draft.layout, upon.get("anchor"))
        draft.checksums = checksums
        manifest = draft.commit(metadata, version=self._version, chain=names_in(chain), **upon)
        return ChainHead(
            manifest, draft.claim.buffer, draft.footer, checksums, chain, anchor_version
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.draft.abandon()


def _is_long(links: Sequence[Link], layout: Layout) -> bool:
    num_bytes = sum(link.delta_bytes for link in links)
    return len(links) >= MAX_CHAIN or num_bytes > MAX_CHAIN_SHARE * layout.num_bytes


def trimmed(chain: list[Link], layout: Layout, anchor: str | None) -> list[Link]:
    """A chain without its oldest versions, where it is long; what leads from the anchor stays."""
    while len(chain) > 1 and chain[0].identity != anchor and _is_long(chain[1:], layout):
        chain = chain[1:]
    return chain


def names_in(chain: list[Link]) -> list[str]:
    """As a manifest has them."""
    return [link.identity for link in chain] if len(chain) > 1 else []
