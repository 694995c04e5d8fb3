"""`Deltas`: what a sender remembers of the last version, so that the next is only what changed.

Where buffers are kept whole, the published one is what the next version is compared with; the idle
one holds the version before it and is brought up to date by the last two deltas. Elsewhere a copy
in memory is compared with, and a version is the file of an earlier one, its anchor, with the deltas
since. Either way a delta's file tells who has the version before what differs.

What is published is never written. Whatever fails, the next version is published whole. A sender
that has just begun takes up what the one before it has left, where that can be read and is right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dbuffer.errors import (
    ChecksumError,
    StoreAccessError,
    StoreCorruptError,
    StoreInsecureError,
    StoreNotFoundError,
    VersionError,
)
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import Manifest, delta_file
from dbuffer.io.chain import Chain
from dbuffer.io.changes import Change, Found, find_changes, words_of, write_changes
from dbuffer.io.copier import Copier
from dbuffer.io.delta import encode_delta
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors
from dbuffer.publish.draft import Draft, Drafts
from dbuffer.publish.patches import SparsePatch, changes_of
from dbuffer.store.buffer import Held

logger = logging.getLogger(__name__)

MAX_CHAIN = 64
"""Deltas that a version may name: late readers apply them one after another."""

MAX_CHAIN_SHARE = 0.5
"""Bytes of a chain's deltas, of the whole version's. Beyond, an anchor is the cheaper way."""

MAX_CHANGED_SHARE = 0.5
"""Of all elements. A version of which more changed is published whole."""


class Link(NamedTuple):
    """A version of the chain, and the bytes of the delta that leads to it."""

    identity: str
    delta_bytes: int


class Wanted(NamedTuple):
    """What is to be published with the weights."""

    version: int
    metadata: dict[str, Any]
    check: Callable[[], None] = lambda: None
    """Called when the weights have been read, before the commit; what it raises prevents that."""


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """The version that was published last."""

    manifest: Manifest
    buffer: str
    """The one with its manifest."""
    footer: Footer
    contents: FileTensors
    """Its bytes: the published buffer, or a copy of it."""
    checksums: list[int] | None
    """Of its tensors, as they were published; None: it has none."""
    chain: list[Link]
    """The versions that deltas connect, up to it; the first one's bytes do not count."""
    anchor_version: int
    """That whose weights file it stands on; its own, where that is whole."""
    changes: list[Change] | None = None
    """What differs in it from the one before; None: it was published whole."""

    @property
    def since_anchor(self) -> list[Link]:
        """What leads from the version in the weights file to this one."""
        names = [link.identity for link in self.chain]
        return self.chain[names.index(self.manifest.anchor or self.manifest.identity) + 1 :]

    @property
    def is_far_from_anchor(self) -> bool:
        """Whether late readers fare better with a new anchor."""
        return _is_long(self.since_anchor, self.footer.layout)


class Published(NamedTuple):
    """What came of it."""

    footer: Footer
    delta_bytes: int | None
    """None: it was published whole, with no delta."""


class Deltas:
    """Publishes versions by what changed since the one before, where that is worth it."""

    def __init__(self, drafts: Drafts, copier: Copier, *, hashed: bool) -> None:
        self._drafts = drafts
        self._copier = copier
        self._hashed = hashed
        self._last: _Last | None = None
        self._has_begun = False

    def publish(self, footer: Footer, tensors: Sequence[torch.Tensor], wanted: Wanted) -> Published:
        """Publish these tensors.

        Raises:
            As `Draft.fill` and `Draft.commit`. Nothing was published, and the next one is whole.
        """
        last, self._last = self._last or self._taken_up(footer), None
        if last is not None and last.footer is footer:
            found = find_changes(last.contents, tensors, self._copier, hashed=self._hashed)
            if found.num_changed <= MAX_CHANGED_SHARE * _num_elements(footer):
                return self._publish_found(last, found, wanted)
        return self._publish_whole(footer, tensors, wanted)

    def publish_patches(self, patches: Iterable[SparsePatch], wanted: Wanted) -> Published:
        """Publish the last version with other values in some places.

        Raises:
            InvalidWeightsError, WeightsMismatchError: a patch does not fit; nothing was touched.
            VersionError: there is nothing that could be patched.
            ChecksumError: what was published is damaged; all weights are to be sent.
        """
        self._last = last = self._last or self._taken_up()
        if last is None:
            raise VersionError(
                f"there is no version in {self._drafts.writer.root} to patch: send all weights "
                "once, and after each error"
            )
        changes = changes_of(patches, last.footer.layout)
        self._last = None
        checksums = self._checksums_after(changes, last) if self._hashed else None
        num_changed = sum(len(change.values) for change in changes)
        found = Found(last.footer.layout, changes, checksums, num_changed)
        return self._publish_found(last, found, wanted)

    def _taken_up(self, footer: Footer | None = None) -> _Last | None:
        """What the sender before this one has left; None: nothing that can be built upon.

        It is read whole, and compared with its checksums, where it has them. Once: after an error,
        the next version is whole.
        """
        if self._has_begun:
            return None
        self._has_begun = True
        store = self._drafts.writer.store
        try:
            held = store.hold_newest(newer_than=None)
            if held is None:
                return None
            with held:
                return self._read(held, footer)
        except (
            StoreAccessError,
            StoreCorruptError,
            StoreInsecureError,
            StoreNotFoundError,
        ) as error:
            logger.warning(
                "%s: publishing a whole version, not upon its last: %s", store.root, error
            )
            return None

    def _could_have_published(self, manifest: Manifest) -> bool:
        writer = self._drafts.writer
        return (
            manifest.history == writer.record.history
            and manifest.is_final != writer.medium.can_rewrite_in_place
            and (manifest.checksums_xxh3 is not None) == self._hashed
            and (manifest.anchor is None or not self._keeps_buffers_whole)
        )

    def _read(self, held: Held, footer: Footer | None) -> _Last | None:
        if not self._could_have_published(held.manifest):
            return None
        if footer is None:
            layout = held.read_layout()
            footer = self._drafts.footer_of(layout.specs, layout.aliases)
        if footer.layout_xxh3 != held.manifest.layout_xxh3:
            return None
        with Chain(held, footer.layout) as chain:
            return self._read_along(chain, held, footer)

    def _read_along(self, chain: Chain, held: Held, footer: Footer) -> _Last:
        manifest = held.manifest
        if self._keeps_buffers_whole:
            contents: FileTensors = self._drafts.map_file(held.path, held.file.number, footer)
        else:
            contents = FileTensors.in_memory(footer.layout)
            chain.read(contents, self._copier)
        checksums = None
        if self._hashed:
            checksums = chain.expected({})
            if checksums is None or self._copier.checksums(contents) != checksums:
                raise ChecksumError(f"{held.path}: damaged after it was published")
        names = manifest.chain or [manifest.identity]
        links = [Link(name, chain.header(name).num_bytes) for name in names[1:]]
        anchor_version = manifest.version
        if upon_anchor := manifest.deltas_after(manifest.anchor or manifest.identity):
            anchor_version = chain.header(upon_anchor[0]).version - 1
        return _Last(
            manifest,
            held.buffer,
            footer,
            contents,
            checksums,
            chain=[Link(names[0], 0), *links],
            anchor_version=anchor_version,
        )

    def _publish_whole(
        self, footer: Footer, tensors: Sequence[torch.Tensor], wanted: Wanted
    ) -> Published:
        with self._drafts.begin(wanted.version, footer, hashed=self._hashed) as draft:
            if self._keeps_buffers_whole:
                draft.fill(list(tensors), self._copier)
                contents: FileTensors = draft.mapped
            else:
                contents = FileTensors.in_memory(footer.layout)
                self._copier.write(contents, list(tensors))
                # Out of the copy: what is compared with later is what was published.
                draft.fill(contents.views, self._copier)
            wanted.check()
            manifest = draft.commit(wanted.metadata)
        self._last = _Last(
            manifest,
            draft.buffer,
            footer,
            contents,
            draft.checksums,
            chain=[Link(manifest.identity, 0)],
            anchor_version=wanted.version,
        )
        return Published(footer, None)

    def _publish_found(self, last: _Last, found: Found, wanted: Wanted) -> Published:
        footer, chain = last.footer, last.chain
        is_broken = self._is_broken(last)
        is_whole = self._keeps_buffers_whole or is_broken or last.is_far_from_anchor
        if is_broken:
            chain = chain[-1:]
        checksums = _checksums_of(last, found)
        with self._drafts.begin(
            wanted.version, footer, hashed=self._hashed, with_file=is_whole
        ) as draft:
            delta_bytes = self._add_delta(draft, last, found, wanted.version)
            contents = self._fill(draft, last, found, checksums) if is_whole else last.contents
            wanted.check()
            upon = {} if is_whole else last.manifest.upon(last.buffer)
            chain = [*chain, Link(draft.identity, delta_bytes)]
            chain = trimmed(chain, footer.layout, upon.get("anchor"))
            manifest = draft.commit(wanted.metadata, chain=names_in(chain), **upon)
        if not is_whole:
            write_changes(found.changes, contents, self._copier)
        self._last = _Last(
            manifest,
            draft.buffer,
            footer,
            contents,
            checksums,
            chain=chain,
            anchor_version=wanted.version if is_whole else last.anchor_version,
            changes=_kept(found.changes, contents),
        )
        return Published(footer, delta_bytes)

    def _add_delta(self, draft: Draft, last: _Last, found: Found, version: int) -> int:
        encoded = encode_delta(
            found,
            last.contents,
            self._copier,
            base=last.manifest.identity,
            identity=draft.identity,
            version=version,
            layout_xxh3=last.footer.layout_xxh3,
        )
        return draft.add_delta((encoded.header, *encoded.chunks))

    def _is_broken(self, last: _Last) -> bool:
        """Whether a late reader cannot have the last version: files are lost, or one said so."""
        writer = self._drafts.writer
        found = writer.store.undamaged_manifest(last.buffer)
        if found is None or found.identity != last.manifest.identity:
            # What no manifest names is removed with the next claim.
            logger.warning("%s lost its newest manifest: publishing a whole version", writer.root)
            return True
        if self._keeps_buffers_whole:
            return False
        needed = {delta_file(link.identity) for link in last.since_anchor}
        lost = sorted(needed - writer.delta_files())
        if not writer.has_weights(last.buffer, found):
            lost.append(found.file)
        if lost:
            logger.warning("%s lost %s: publishing a whole version", writer.root, lost[0])
            return True
        versions = range(last.anchor_version + 1, last.manifest.version + 1)
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

    def _fill(
        self, draft: Draft, last: _Last, found: Found, checksums: list[int] | None
    ) -> FileTensors:
        """Write the whole version into the draft's file; where it lies, to be compared with."""
        if not self._keeps_buffers_whole:
            write_changes(found.changes, last.contents, self._copier)
            draft.fill(last.contents.views, self._copier)
            return last.contents
        mapped = draft.mapped
        before = last.chain[-2].identity if len(last.chain) > 1 else None
        if last.changes is not None and draft.held_before == before is not None:
            write_changes(last.changes, mapped, self._copier)
        else:
            self._copier.write(mapped, last.contents.views)
        write_changes(found.changes, mapped, self._copier)
        # What is not written now may have been damaged since it was.
        if checksums is not None and self._copier.checksums(mapped) != checksums:
            logger.warning("%s was damaged since it was written: writing it anew", draft.path)
            self._copier.write(mapped, last.contents.views)
            write_changes(found.changes, mapped, self._copier)
            found_now = self._copier.checksums(mapped)
            names = [spec.name for spec in mapped.layout.specs]
            for name, right, now in zip(names, checksums, found_now, strict=True):
                if now != right:
                    raise ChecksumError(self._damaged(name))
        draft.checksums = checksums
        return mapped

    def _checksums_after(self, changes: list[Change], last: _Last) -> dict[int, int]:
        """Of each tensor as it will be; one at a time, away from what is compared with."""
        assert last.checksums is not None  # noqa: S101 - for who writes checksums
        contents, checksums = last.contents, {}
        for change in changes:
            spec = contents.layout.specs[change.tensor]
            data = contents.tensor(change.tensor).clone().reshape(-1).view(torch.uint8)
            alone = FileTensors(data, Layout.of([spec]))
            if self._copier.checksums(alone) != [last.checksums[change.tensor]]:
                raise ChecksumError(self._damaged(spec.name))
            write_changes([replace(change, tensor=0)], alone, self._copier)
            [checksums[change.tensor]] = self._copier.checksums(alone)
        return checksums

    def _damaged(self, name: str) -> str:
        return (
            f"{self._drafts.writer.root}: {name} was damaged after it was published, so what "
            "changed since cannot be published upon it; send all weights"
        )

    @property
    def _keeps_buffers_whole(self) -> bool:
        return self._drafts.writer.medium.keeps_buffers_whole


def _is_long(links: Sequence[Link], layout: Layout) -> bool:
    num_bytes = sum(link.delta_bytes for link in links)
    return len(links) >= MAX_CHAIN or num_bytes > MAX_CHAIN_SHARE * layout.num_bytes


def trimmed(chain: list[Link], layout: Layout, anchor: str | None) -> list[Link]:
    """A chain without its oldest versions, where it is long; what leads from the anchor stays."""
    while len(chain) > 1 and chain[0].identity != anchor and _is_long(chain[1:], layout):
        chain = chain[1:]
    return chain


def _checksums_of(last: _Last, found: Found) -> list[int] | None:
    """Those of all tensors after the change, by what was published and not by what lies there."""
    if last.checksums is None or found.checksums is None:
        return None
    return [found.checksums.get(index, known) for index, known in enumerate(last.checksums)]


def names_in(chain: list[Link]) -> list[str]:
    """As a manifest has them."""
    return [link.identity for link in chain] if len(chain) > 1 else []


def _kept(changes: list[Change], contents: FileTensors) -> list[Change]:
    """The same, with nothing in them that is the trainer's memory."""
    return [
        replace(change, values=words_of(contents, change.tensor))
        if change.positions is None
        else change
        for change in changes
    ]


def _num_elements(footer: Footer) -> int:
    return sum(math.prod(spec.shape) for spec in footer.layout.specs)
