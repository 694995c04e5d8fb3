"""`Share`: the part of each version that one rank writes, and its bytes in the last one.

A sender alone writes all of it (`WholeShare`), a rank of a sharded trainer boxes of tensors
(`BoxShare`). Either finds what changed, and brings its own copy of the last version up to date.

The trainer's memory is read once: it may be written to behind the back of the check. The delta, and
what the next version is compared with, come of what was written then.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dbuffer.errors import StoreCorruptError
from dbuffer.format.layout import Layout
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Diff, TensorDiff, find_changes, words_of, write_changes
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors, MappedTensors
from dbuffer.publish.delta_chain import ChainHead, DeltaChain
from dbuffer.publish.draft import Draft, Progress, counter
from dbuffer.store import filesystem
from dbuffer.store.hold import Held
from dbuffer.weights.sources import Source, fetch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """Description of the buffer that rank 0 has claimed, for all ranks."""

    version: int
    buffer: str
    file: str
    identity: list[int] | None
    """Identity of the file on rank 0's host; None: the version has no file of its own."""
    is_patched: bool
    """Whether the file holds the version before the last, so that only changes are written."""

    @classmethod
    def of(cls, version: int, draft: Draft, *, is_patched: bool) -> ClaimInfo:
        claim = draft.claim
        identity = None if claim.file is None else [*filesystem.identity_of(claim.file.number)]
        return cls(version, claim.buffer, claim.path.name, identity, is_patched)

    def path_in(self, store: Path) -> Path:
        return store / self.buffer / self.file


class Share(ABC):
    """The part of each version that one rank writes, and its bytes in the last one.

    A publish calls `find` and `write_diff`, or `write_all`, on all ranks.
    """

    def __init__(self, footer: Footer | None) -> None:
        self.footer = footer
        """Footer of the versions; None for a stream, of which nothing is kept."""

    @abstractmethod
    def read_back(self, held: Held) -> None:
        """Read this rank's part of a version that is there; not collective.

        Raises:
            StoreNotFoundError, StoreCorruptError, StoreAccessError: it cannot.
        """

    @abstractmethod
    def checksums(self) -> list[int] | None:
        """Return the checksums of all tensors as they were read back."""

    @abstractmethod
    def find(self, source: Source) -> int:
        """Compare the weights with the last version; how many words of all tensors differ."""

    @abstractmethod
    def write_all(
        self, source: Source, info: ClaimInfo, draft: Draft | None, progress: Progress | None
    ) -> list[int] | None:
        """Write the weights into the claimed file; the checksums of all tensors, if wanted.

        ``draft`` is rank 0's.
        """

    @abstractmethod
    def write_diff(self, info: ClaimInfo, draft: Draft | None) -> list[int] | None:
        """Bring copy and claimed file up to date; the checksums of all tensors, if wanted."""

    @abstractmethod
    def take_diff(self, checksums: list[int] | None) -> Diff:
        """Return on rank 0 what was found on all ranks and written, for the delta; once."""


class WholeShare(Share):
    """All tensors, for a sender alone.

    Where buffers are kept whole, the published one is compared with the next version, and the idle
    one, which holds the version before, is brought up to date by the last two deltas. Elsewhere a
    copy in memory is compared with.

    Args:
        footer: as for `Share`.
        chain: the writer's.
        copier: its threads do the work.
        hashed: whether versions have checksums.
        is_kept: whether the next version is compared with this one.
    """

    def __init__(
        self,
        footer: Footer | None,
        chain: DeltaChain,
        copier: Copier,
        *,
        hashed: bool,
        is_kept: bool,
    ) -> None:
        super().__init__(footer)
        self._chain = chain
        self._copier = copier
        self._hashed = hashed
        self._is_kept = is_kept
        self._contents: FileTensors | None = None
        self._diff: Diff | None = None
        self._changes: list[TensorDiff] | None = None
        """Changes from the version before, to be written again; None: not known."""

    @property
    def contents(self) -> FileTensors:
        """Bytes of the last version: the published buffer, or a copy of it."""
        assert self._contents is not None  # noqa: S101 - it was written, or read back
        return self._contents

    def adopt(self, contents: FileTensors, changes: Iterable[TensorDiff] | None) -> None:
        """Take the bytes of a version that was published, and what changed in it, if known."""
        self._contents = contents
        self._changes = None if changes is None else _without_replaced(changes)

    def read_back(self, held: Held) -> None:
        footer = self._chain.last.footer
        if self._chain.keeps_buffers_whole:
            self._contents = self._chain.drafts.map_file(held.path, held.file.number, footer)
        else:
            self._contents = FileTensors.in_memory(footer.layout)
            ChainReader(held, footer.layout).read(self._contents, self._copier)

    def checksums(self) -> list[int] | None:
        return self._copier.checksums(self.contents)

    def find(self, source: Source) -> int:
        return self.find_in(source.eager)

    def find_in(self, tensors: Sequence[torch.Tensor]) -> int:
        """Compare tensors with the last version; how many words differ."""
        self._diff = find_changes(self.contents, tensors, self._copier, hashed=self._hashed)
        return self._diff.num_changed

    def patch(self, changes: Iterable[TensorDiff]) -> None:
        """Take known changes of the last version for what differs.

        Raises:
            StoreCorruptError: what was published is damaged.
        """
        contents = self.contents
        changes = [
            replace(change, replaced=words_of(contents, change.tensor)[change.positions])
            for change in changes
        ]
        checksums = self._checksums_of(changes) if self._hashed else None
        num_changed = sum(len(change.values) for change in changes)
        self._diff = Diff(contents.layout, changes, checksums, num_changed)

    def write_all(
        self,
        source: Source,
        info: ClaimInfo,  # noqa: ARG002
        draft: Draft | None,
        progress: Progress | None,
    ) -> list[int] | None:
        draft = _of_rank_0(draft)
        if source.stream is not None:
            # The layout is known when the last tensor has come.
            count = counter(progress, 0)
            for spec, tensor in source.stream:
                draft.append(spec, tensor)
                if count is not None:
                    count(spec.num_bytes)
        elif source.is_lazy:
            # One at a time: what was gathered or read is dropped before the next.
            count = counter(progress, draft.layout.num_bytes)
            draft.fill_one_by_one(map(fetch, source.tensors), self._copier, count)
        elif not self._is_kept:
            draft.fill(source.eager, self._copier)
        elif self._chain.keeps_buffers_whole:
            draft.fill(source.eager, self._copier)
            self._contents = draft.mapped
        else:
            self._contents = FileTensors.in_memory(draft.layout)
            self._copier.write(self._contents, source.eager)
            draft.fill(self._contents.views, self._copier)
        return draft.checksums

    def write_diff(self, info: ClaimInfo, draft: Draft | None) -> list[int] | None:  # noqa: ARG002
        draft, diff = _of_rank_0(draft), self._found
        checksums = self._chain.base.checksums_after(diff.checksums)
        if self._chain.keeps_buffers_whole:
            mapped = draft.mapped
            self._fill(mapped, draft, diff, checksums)
            changes = detached_copy(diff.changes, mapped)
            self.adopt(mapped, changes)
        else:
            changes = apply_detached(diff.changes, self.contents, self._copier)
            if draft.has_file:
                draft.fill(self.contents.views, self._copier)
        self._diff = replace(diff, changes=changes)
        return checksums

    def take_diff(self, checksums: list[int] | None) -> Diff:  # noqa: ARG002
        diff, self._diff = self._found, None
        return diff

    def catch_up(self, mapped: MappedTensors, draft: Draft, head: ChainHead) -> bool:
        """Make of the version before ``head`` that one, in the draft's file, by the last changes.

        False: they are not known, or the file holds another version.
        """
        if self._changes is None or not head.follows(draft.claim.held_before):
            return False
        write_changes(self._changes, mapped, self._copier)
        return True

    @property
    def _found(self) -> Diff:
        assert self._diff is not None  # noqa: S101 - it is called after `find` or `patch`
        return self._diff

    def _fill(
        self, mapped: MappedTensors, draft: Draft, diff: Diff, checksums: list[int] | None
    ) -> None:
        """Write the whole version into the draft's file."""
        if not self.catch_up(mapped, draft, self._chain.base):
            self._copier.write(mapped, self.contents.views)
        write_changes(diff.changes, mapped, self._copier)
        # What is not written now may have been damaged since it was.
        if checksums is None or self._copier.checksums(mapped) == checksums:
            return
        logger.warning("%s was damaged since it was written: writing it anew", draft.claim.path)
        self._copier.write(mapped, self.contents.views)
        write_changes(diff.changes, mapped, self._copier)
        names = [spec.name for spec in mapped.layout.specs]
        written = self._copier.checksums(mapped)
        for name, expected, checksum in zip(names, checksums, written, strict=True):
            if checksum != expected:
                raise StoreCorruptError(self._damaged(name))

    def _checksums_of(self, changes: Sequence[TensorDiff]) -> dict[int, int]:
        """Hash each changed tensor as it will be, one at a time, in memory of its own."""
        published = self._chain.last.checksums
        assert published is not None  # noqa: S101 - of a sender that hashes
        checksums = {}
        for change in changes:
            spec = self.contents.layout.specs[change.tensor]
            data = self.contents.tensor(change.tensor).clone().reshape(-1).view(torch.uint8)
            alone = FileTensors(data, Layout.of([spec]))
            if self._copier.checksums(alone) != [published[change.tensor]]:
                raise StoreCorruptError(self._damaged(spec.name))
            write_changes([replace(change, tensor=0)], alone, self._copier)
            [checksums[change.tensor]] = self._copier.checksums(alone)
        return checksums

    def _damaged(self, name: str) -> str:
        return (
            f"{self._chain.drafts.writer.root}: {name} was damaged after it was published, so what "
            "changed since cannot be published upon it; send all weights"
        )


def _of_rank_0(draft: Draft | None) -> Draft:
    assert draft is not None  # noqa: S101 - a sender alone is the writer
    return draft


def detached_copy(changes: Iterable[TensorDiff], contents: FileTensors) -> list[TensorDiff]:
    """Return the changes without the trainer's memory; ``contents`` holds their values."""
    return [
        replace(change, values=words_of(contents, change.tensor))
        if change.positions is None
        else change
        for change in changes
    ]


def apply_detached(
    changes: Iterable[TensorDiff], contents: FileTensors, copier: Copier
) -> list[TensorDiff]:
    """Bring a copy of the last version up to date, and return the changes out of it.

    None of what they replace is in the copy's memory any more.
    """
    kept = [
        replace(change, replaced=change.replaced.copy())
        if change.positions is None and change.replaced is not None
        else change
        for change in changes
    ]
    write_changes(kept, contents, copier)
    return detached_copy(kept, contents)


def _without_replaced(changes: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return changes that are written again: whole tensors let go of the version before.

    A mapping keeps an unlinked file's room.
    """
    return [replace(one, replaced=None) if one.positions is None else one for one in changes]
