"""`Share`: the part of each version that one rank writes.

A sender alone writes all tensors (`WholeShare`), a rank of a sharded trainer
writes boxes of tensors (`BoxShare`, in `box_share`). `Publisher` calls a share's methods, on all
ranks at once:

- With deltas, a share keeps the bytes of the last version. `compare` finds what differs from them
  in the next weights, `write_diff` brings them and the claimed file up to date, and `take_diff`
  returns the differences for the delta.
- If too much differs, or nothing is kept, a new share writes all weights: `write_all`.
- A new sender fills a new share with the version that an earlier one left: `read_back`, then
  `checksums`.

The trainer may write to its memory while it is compared, and after. So the delta, the checksums,
and the bytes that the next version is compared with all come from the bytes that a share keeps.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dbuffer.errors import StoreCorruptError
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Diff, TensorDiff, cut_work, words_of, write_changes
from dbuffer.io.copier import Copier
from dbuffer.io.devices import any_on_gpu
from dbuffer.io.find_changes import find_changes
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors, MappedTensors
from dbuffer.publish.delta_chain import DeltaChain, max_changed
from dbuffer.publish.draft import Draft, Progress
from dbuffer.store import filesystem
from dbuffer.store.hold import Held
from dbuffer.weights.sources import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """Description of the buffer that rank 0 has claimed, for all ranks."""

    version: str
    """Id of the version."""
    buffer: str
    file: str
    inode: list[int] | None
    """Device and inode of the file on rank 0's host; None: the version has no file of its own."""
    is_patched: bool
    """Whether the file holds the version before the last, so that only changes are written."""

    @classmethod
    def of(cls, draft: Draft, *, is_patched: bool) -> ClaimInfo:
        claim = draft.claim
        inode = None if claim.file is None else [*filesystem.identity_of(claim.file.number)]
        return cls(str(draft.id), claim.buffer, claim.path.name, inode, is_patched)

    def path_in(self, store: Path) -> Path:
        return store / self.buffer / self.file


class Share(ABC):
    """The part of each version that one rank writes, and its bytes in the last version."""

    def __init__(self, footer: Footer | None) -> None:
        self._footer = footer
        """Footer of the versions; None for a stream, of which nothing is kept."""

    @property
    def footer(self) -> Footer:
        assert self._footer is not None  # noqa: S101 - deltas are of no streams
        return self._footer

    @abstractmethod
    def read_back(self, held: Held) -> None:
        """Read this rank's part of a published version, as the last one; not collective.

        Raises:
            StoreNotFoundError, StoreCorruptError, StoreAccessError: it cannot.
        """

    @abstractmethod
    def checksums(self) -> list[int] | None:
        """Return the checksums of all tensors as they were read back."""

    @abstractmethod
    def compare(self, source: Source) -> int:
        """Find what differs from the last version.

        Returns:
            The number of changed words on all ranks. Once it is above `max_changed`, the rest may
            not have been counted.
        """

    @abstractmethod
    def write_all(
        self, source: Source, info: ClaimInfo, progress: Progress | None
    ) -> list[int] | None:
        """Write the weights into the claimed file; return the checksums of all tensors, if any."""

    @abstractmethod
    def write_diff(self, info: ClaimInfo) -> list[int] | None:
        """Write what differs into the kept bytes and the claimed file, if the version has one.

        Returns:
            The checksums of all tensors, if any.
        """

    @abstractmethod
    def take_diff(self) -> Diff:
        """Return on rank 0 what all ranks have written by `write_diff`; once."""


class WholeShare(Share):
    """All tensors, for a sender alone.

    On a local mount, the kept bytes are the published buffer. The claimed file, the idle buffer,
    holds the version before that: it lacks the changes of two versions. On a network mount, the
    kept bytes are a copy in memory.

    Args:
        footer: footer of the versions; None for a stream.
        chain: the store's, with the draft that is written.
        copier: its threads do the work.
        is_kept: whether the next version is compared with this one.
    """

    def __init__(
        self,
        footer: Footer | None,
        chain: DeltaChain,
        copier: Copier,
        *,
        is_kept: bool,
    ) -> None:
        super().__init__(footer)
        self._chain = chain
        self._copier = copier
        self._is_kept = is_kept
        self._contents: FileTensors | None = None
        self._compared: Diff | None = None
        """Differences of the version that is written, until `take_diff`."""
        self._last_changes: list[TensorDiff] | None = None
        """Changes that led to the last version, which the idle buffer lacks; None: not known."""

    @property
    def contents(self) -> FileTensors:
        """Bytes of the last version: the published buffer, or a copy of it."""
        assert self._contents is not None  # noqa: S101 - it was written, or read back
        return self._contents

    def read_back(self, held: Held) -> None:
        if self._chain.keeps_buffers_whole:
            self._contents = self._chain.map_published(held, self.footer)
        else:
            self._contents = FileTensors.in_memory(self.footer.layout)
            ChainReader(held, self.footer.layout).read(self._contents, self._copier)

    def checksums(self) -> list[int] | None:
        return self._copier.checksums(self.contents)

    def compare(self, source: Source) -> int:
        contents = self.contents
        is_sent = any_on_gpu(source.eager)  # to the GPU, to be compared there
        is_in_memory = self._chain.writer.medium.is_in_memory
        if is_sent and is_in_memory and isinstance(contents, MappedTensors):
            contents.expect_device()
        self._compared = diff = find_changes(
            contents,
            source.eager,
            self._copier,
            max_changed=max_changed(self.footer.layout),
        )
        return diff.num_changed

    def patch(self, changes: Iterable[TensorDiff]) -> None:
        """Use changes that the trainer named as what differs, in place of `compare`."""
        contents, changes = self.contents, list(changes)

        def work(first: int, end: int) -> None:
            for index, change in enumerate(changes[first:end], first):
                replaced = words_of(contents, change.tensor)[change.positions]
                changes[index] = change._replace(replaced=replaced)

        sizes = [len(change.values) for change in changes]
        self._copier.in_parallel(work, cut_work(sizes, self._copier))
        self._compared = Diff(contents.layout, changes, sum(sizes))

    def write_all(
        self,
        source: Source,
        info: ClaimInfo,  # noqa: ARG002
        progress: Progress | None,
    ) -> list[int] | None:
        draft = self._chain.begun
        if source.stream is not None:
            return draft.fill_from_stream(source.stream, source.new_names, progress)
        if source.is_lazy:
            # A tensor that was gathered or read is dropped before the next.
            return draft.fill_one_by_one(source.fetched(), self._copier, progress)
        tensors = source.eager
        if self._is_kept and self._chain.keeps_buffers_whole:
            self._contents = draft.mapped
        elif self._is_kept:
            self._contents = FileTensors.in_memory(draft.footer.layout)
            self._copier.write(self._contents, tensors)
            tensors = self._contents.views
        return draft.fill(tensors, self._copier)

    def write_diff(self, info: ClaimInfo) -> list[int] | None:  # noqa: ARG002
        draft, diff = self._chain.begun, self._diff
        if self._chain.keeps_buffers_whole:
            mapped = draft.mapped
            self._bring_up_to_date(mapped)
            write_changes(diff.changes, mapped, self._copier)
            changes = with_values_in(mapped, diff.changes)
            self._contents, self._last_changes = mapped, _without_replaced(changes)
        else:
            changes = apply_detached(diff.changes, self.contents, self._copier)
            if draft.has_file:
                draft.fill(self.contents.views, self._copier)
        self._compared = replace(diff, changes=changes)
        if not self._chain.hashed:
            return None
        # Not of the trainer's memory, which may have changed since it was compared.
        changed = [change.tensor for change in changes]
        checksums = self._copier.checksums(self.contents, changed)
        return self._chain.base.checksums_after(dict(zip(changed, checksums, strict=True)))

    def take_diff(self) -> Diff:
        diff, self._compared = self._diff, None
        return diff

    @property
    def _diff(self) -> Diff:
        assert self._compared is not None  # noqa: S101 - called after `compare` or `patch`
        return self._compared

    def _bring_up_to_date(self, mapped: MappedTensors) -> None:
        """Let the draft's file hold the last version, undamaged if that has checksums.

        Raises:
            StoreCorruptError: the published buffer was damaged, too.
        """
        draft, base = self._chain.begun, self._chain.base
        if self._last_changes is not None and base.follows(draft.claim.held_before):
            write_changes(self._last_changes, mapped, self._copier)
            if base.checksums is None or self._copier.checksums(mapped) == base.checksums:
                return
            logger.warning("%s was damaged since it was written: writing it anew", draft.claim.path)
        self._copier.write(mapped, self.contents.views)
        if base.checksums is None:
            return
        checksums = self._copier.checksums(mapped)
        for spec, expected, checksum in zip(
            mapped.layout.specs, base.checksums, checksums, strict=True
        ):
            if checksum != expected:
                raise StoreCorruptError(
                    f"{self._chain.writer.root}: {spec.name} was damaged after it was published, "
                    "so what changed since cannot be published upon it; send all weights"
                )


def with_values_in(contents: FileTensors, changes: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return changes that were written into ``contents``, none with values in the trainer's memory.

    The values of a tensor that changed as a whole were there; now they are in ``contents``.
    """
    return [
        change._replace(values=words_of(contents, change.tensor))
        if change.positions is None
        else change
        for change in changes
    ]


def apply_detached(
    changes: Iterable[TensorDiff], contents: FileTensors, copier: Copier
) -> list[TensorDiff]:
    """Write changes into a copy of the last version; return them with values in the copy.

    The replaced values of a tensor that changed as a whole lie in the copy, and are saved before.
    """
    kept = [
        change._replace(replaced=change.replaced.copy())
        if change.positions is None and change.replaced is not None
        else change
        for change in changes
    ]
    write_changes(kept, contents, copier)
    return with_values_in(contents, kept)


def _without_replaced(changes: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return changes that are kept to be written again, without replaced values of whole tensors.

    These lie in a mapping, which keeps an unlinked file's room.
    """
    return [one._replace(replaced=None) if one.positions is None else one for one in changes]
