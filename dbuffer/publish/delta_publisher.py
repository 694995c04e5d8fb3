"""`DeltaPublisher`: publishes versions by what changed since the last one.

Where buffers are kept whole, the published one is what the next version is compared with; the idle
one holds the version before it and is brought up to date by the last two deltas. Elsewhere a copy
in memory is compared with, and a version is the file of an earlier one, its anchor, with the deltas
since. Either way a delta's file tells who has the version before what differs.

What is published is never written. Whatever fails, the next version is published whole. A sender
that has just begun takes up what the one before it has left, where that can be read and is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dbuffer.errors import StoreCorruptError, VersionError
from dbuffer.format.layout import Layout
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Change, Found, find_changes, words_of, write_changes
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors
from dbuffer.publish.delta_chain import ChainHead, DeltaChain, Step, is_worth_a_delta
from dbuffer.publish.draft import Draft, Drafts
from dbuffer.publish.patches import SparsePatch, changes_of
from dbuffer.store.buffer import Held

logger = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """What is to be published with the weights."""

    version: int
    metadata: dict[str, Any]
    check: Callable[[], None] = lambda: None
    """Called when the weights have been read, before the commit; what it raises prevents that."""


@dataclass(frozen=True, slots=True, eq=False)
class Last:
    """The version that was published last."""

    tip: ChainHead
    contents: FileTensors
    """Its bytes: the published buffer, or a copy of it."""
    changes: list[Change] | None = None
    """Changes from the version before, where they are written again; None: not known."""

    def found(
        self, footer: Footer, tensors: Sequence[torch.Tensor], copier: Copier, *, hashed: bool
    ) -> Found | None:
        """What differs from it in these; None: too much for a delta, or they are other tensors."""
        if self.tip.footer is not footer:
            return None
        found = find_changes(self.contents, tensors, copier, hashed=hashed)
        return found if is_worth_a_delta(found.num_changed, footer.layout) else None


class Published(NamedTuple):
    """What came of it."""

    layout: Layout
    delta_bytes: int | None
    """None: it was published whole, with no delta."""


class DeltaPublisher:
    """Publishes versions by what changed since the one before, where that is worth it."""

    def __init__(self, drafts: Drafts, copier: Copier, *, hashed: bool) -> None:
        self._chaining = DeltaChain(drafts)
        self._drafts = drafts
        self._copier = copier
        self._hashed = hashed
        self._last: Last | None = None
        self._has_begun = False

    def publish(self, footer: Footer, tensors: Sequence[torch.Tensor], wanted: Wanted) -> Published:
        """Publish these tensors.

        Raises:
            As `Draft.fill` and `Draft.commit`. Nothing was published, and the next one is whole.
        """
        last, self._last = self._last or self._taken_up(footer), None
        if last is not None:
            found = last.found(footer, tensors, self._copier, hashed=self._hashed)
            if found is not None:
                return self._publish_found(last, found, wanted)
        return self._publish_whole(footer, tensors, wanted)

    def publish_patches(self, patches: Iterable[SparsePatch], wanted: Wanted) -> Published:
        """Publish the last version with other values in some places.

        Raises:
            InvalidWeightsError, WeightsMismatchError: a patch does not fit; nothing was touched.
            VersionError: there is nothing that could be patched.
            StoreCorruptError: what was published is damaged; all weights are to be sent.
        """
        self._last = last = self._last or self._taken_up()
        if last is None:
            raise VersionError(
                f"there is no version in {self._drafts.writer.root} to patch: send all weights "
                "once, and after each error"
            )
        changes = changes_of(patches, last.tip.footer.layout)
        self._last = None
        checksums = self._checksums_after(changes, last) if self._hashed else None
        num_changed = sum(len(change.values) for change in changes)
        found = Found(last.tip.footer.layout, changes, checksums, num_changed)
        return self._publish_found(last, found, wanted)

    def _taken_up(self, footer: Footer | None = None) -> Last | None:
        """What the sender before this one has left; None: nothing that can be built upon.

        It is read whole, and compared with its checksums, where it has them. Once: after an error,
        the next version is whole.
        """
        if self._has_begun:
            return None
        self._has_begun = True
        return self._chaining.resume_from_store(footer, self._read, hashed=self._hashed)

    def _read(self, held: Held, chain: ChainReader, tip: ChainHead) -> Last:
        footer = tip.footer
        if self._chaining.keeps_buffers_whole:
            contents: FileTensors = self._drafts.map_file(held.path, held.file.number, footer)
        else:
            contents = FileTensors.in_memory(footer.layout)
            chain.read(contents, self._copier)
        if self._hashed and self._copier.checksums(contents) != tip.checksums:
            raise StoreCorruptError(f"{held.path}: damaged after it was published")
        return Last(tip, contents)

    def _publish_whole(
        self, footer: Footer, tensors: Sequence[torch.Tensor], wanted: Wanted
    ) -> Published:
        with self._chaining.begin(wanted.version, footer, hashed=self._hashed) as step:
            draft = step.draft
            if self._chaining.keeps_buffers_whole:
                draft.fill(list(tensors), self._copier)
                contents: FileTensors = draft.mapped
            else:
                contents = FileTensors.in_memory(footer.layout)
                self._copier.write(contents, list(tensors))
                # Out of the copy: what is compared with later is what was published.
                draft.fill(contents.views, self._copier)
            wanted.check()
            self._last = Last(step.commit(wanted.metadata, draft.checksums), contents)
        return Published(footer.layout, None)

    def _publish_found(self, last: Last, found: Found, wanted: Wanted) -> Published:
        checksums = last.tip.checksums_after(found.checksums)
        write = self._write_both if self._chaining.keeps_buffers_whole else self._write_delta
        with self._chaining.begin_delta(last.tip, wanted.version) as step:
            contents, changes = write(step, last, found, checksums)
            wanted.check()
            self._last = Last(step.commit(wanted.metadata, checksums), contents, changes)
        return Published(found.layout, step.delta_bytes)

    # The trainer's memory is read once: it may be written to behind the back of the check. What is
    # compared with next, and what readers make of the delta, come of what was written then.

    def _write_both(
        self, step: Step, last: Last, found: Found, checksums: list[int] | None
    ) -> tuple[FileTensors, list[Change] | None]:
        """Write the buffer, then the delta out of it; the version's memory, and what changed."""
        contents = self._fill(step.draft, last, found, checksums)
        changes = detached_copy(found.changes, contents)
        step.add_delta(replace(found, changes=changes), last.contents, self._copier)
        return contents, changes

    def _write_delta(
        self, step: Step, last: Last, found: Found, _checksums: list[int] | None
    ) -> tuple[FileTensors, list[Change] | None]:
        """Write the delta, apply it to the copy, and write that where there is to be a file."""
        encoded = step.add_delta(found, last.contents, self._copier)
        encoded.apply(last.contents, last.tip.footer.layout_xxh3, self._copier)
        if step.draft.has_file:
            step.draft.fill(last.contents.views, self._copier)
        return last.contents, None

    def _fill(
        self, draft: Draft, last: Last, found: Found, checksums: list[int] | None
    ) -> FileTensors:
        """Write the whole version into the draft's file, which is mapped; where it lies."""
        mapped = draft.mapped
        if last.changes is not None and last.tip.follows(draft.claim.held_before):
            write_changes(last.changes, mapped, self._copier)
        else:
            self._copier.write(mapped, last.contents.views)
        write_changes(found.changes, mapped, self._copier)
        # What is not written now may have been damaged since it was.
        if checksums is not None and self._copier.checksums(mapped) != checksums:
            logger.warning("%s was damaged since it was written: writing it anew", draft.claim.path)
            self._copier.write(mapped, last.contents.views)
            write_changes(found.changes, mapped, self._copier)
            found_now = self._copier.checksums(mapped)
            names = [spec.name for spec in mapped.layout.specs]
            for name, right, now in zip(names, checksums, found_now, strict=True):
                if now != right:
                    raise StoreCorruptError(self._damaged(name))
        return mapped

    def _checksums_after(self, changes: list[Change], last: Last) -> dict[int, int]:
        """Of each tensor as it will be; one at a time, away from what is compared with."""
        known = last.tip.checksums
        assert known is not None  # noqa: S101 - for who writes checksums
        contents, checksums = last.contents, {}
        for change in changes:
            spec = contents.layout.specs[change.tensor]
            data = contents.tensor(change.tensor).clone().reshape(-1).view(torch.uint8)
            alone = FileTensors(data, Layout.of([spec]))
            if self._copier.checksums(alone) != [known[change.tensor]]:
                raise StoreCorruptError(self._damaged(spec.name))
            write_changes([replace(change, tensor=0)], alone, self._copier)
            [checksums[change.tensor]] = self._copier.checksums(alone)
        return checksums

    def _damaged(self, name: str) -> str:
        return (
            f"{self._drafts.writer.root}: {name} was damaged after it was published, so what "
            "changed since cannot be published upon it; send all weights"
        )


def detached_copy(changes: list[Change], contents: FileTensors) -> list[Change]:
    """The same, with nothing in them that is the trainer's memory; ``contents`` has it all."""
    return [
        replace(change, values=words_of(contents, change.tensor))
        if change.positions is None
        else change
        for change in changes
    ]
