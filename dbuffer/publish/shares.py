"""`Share`: the part of each version that one rank writes, and how it differs from the last one.

A sender alone writes all tensors (`WholeShare`), a rank of a sharded trainer boxes of tensors
(`BoxShare`, in `box_share`). `Publisher` calls a share's methods, on all ranks at once.

With deltas, the next version is compared with the last one:

- On a local mount each version is written whole; then its file is compared with the published one.
- On a network mount a version may have no file of its own. A `KeptCopy` of the last version is
  brought to the next, and a file, if there is one, is written from the copy.

The trainer may write to its memory at any time. So the delta, the checksums, and the bytes that the
next version is compared with all come from the file, or from the copy.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dbuffer.errors import StoreCorruptError
from dbuffer.format.lineage import VersionId
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Changes, Patch, apply_patch, find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import MappedTensors
from dbuffer.publish.delta_chain import UNREADABLE, DeltaChain, max_changed
from dbuffer.publish.draft import ClaimInfo, Draft, Progress, counter
from dbuffer.publish.kept_copy import KeptCopy
from dbuffer.publish.shard_writer import join_digests_of_parts
from dbuffer.ranks.world import World
from dbuffer.store.hold import hold_newest
from dbuffer.weights.sources import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PublishRequest:
    """Weights to publish, with their version and metadata."""

    started: float
    """Time of the call, by `time.monotonic`."""
    source: Source
    footer: Footer | None
    """Footer of their file; None for a stream."""
    version: int
    """Number of the version, above the last one; on rank 0."""
    metadata: dict[str, Any]
    """Checked metadata; on rank 0."""
    progress: Progress | None = None
    patch: Patch | None = None
    """In place of a source: new words for the last version."""


class Share(ABC):
    """The part of each version that one rank writes.

    Args:
        footer: footer of the versions; None for a stream.
        world: the ranks.
        copier: its threads do the work.
        copy: on a network mount, with deltas; else None.
    """

    def __init__(
        self, footer: Footer | None, world: World, copier: Copier, copy: KeptCopy | None
    ) -> None:
        self.version: VersionId | None = None
        """Version that was published last."""
        self._footer = footer
        self._world = world
        self._copier = copier
        self._copy = copy
        self._file: MappedTensors | None = None
        """File of the version that was written last, on a local mount, with deltas."""
        self._file_before: MappedTensors | None = None
        """File of the version before, until the two are compared."""

    @property
    def footer(self) -> Footer:
        assert self._footer is not None  # noqa: S101 - deltas are of no streams
        return self._footer

    @property
    def copy(self) -> KeptCopy:
        assert self._copy is not None  # noqa: S101 - asked for on network mounts alone
        return self._copy

    @abstractmethod
    def update(self, request: PublishRequest, *, is_compared: bool) -> Changes | None:
        """Bring the copy to the next version.

        Returns:
            On rank 0, what that changed; elsewhere, and unless it ``is_compared``, None.
        """

    @abstractmethod
    def write(self, request: PublishRequest, info: ClaimInfo) -> list[int] | None:
        """Write the version into the claimed file, if it has one.

        Returns:
            The checksums of all tensors, if versions have any.
        """

    def compare(self) -> Changes | None:
        """Compare the written file with the one before it.

        Returns:
            On rank 0, what differs; elsewhere None.
        """
        before, self._file_before = self._file_before, None
        assert before is not None  # noqa: S101
        assert self._file is not None  # noqa: S101 - there are two versions
        find = partial(
            find_changes,
            before.data,
            self._file.data,
            self.footer.layout,
            self._copier,
            share=(self._world.rank, self._world.size),
            max_changed=max_changed(self.footer.layout),
        )
        return self._of_all_ranks(find)

    def _of_all_ranks(self, find: Callable[[], Changes]) -> Changes | None:
        """Return the changes of all ranks on rank 0, None elsewhere."""
        by_rank = self._world.collect("send what changed", find, Changes.encode, Changes.decode)
        return Changes.joined(by_rank) if by_rank else None

    def _checksums_of_copy(self) -> list[int]:
        """Return the checksums of all tensors, by the copies of all ranks."""
        by_rank = self._world.each("hash its boxes", self.copy.digests)
        return join_digests_of_parts(self.footer.layout, by_rank)

    def unmap(self) -> None:
        """Let go of the files, after an error: each keeps its room for as long as it is mapped."""
        self._file = self._file_before = None

    def _keep_file(self, mapped: MappedTensors) -> None:
        self._file_before, self._file = self._file, mapped


class WholeShare(Share):
    """All tensors, for a sender alone.

    Args:
        footer: footer of the versions; None for a stream.
        world: the sender alone.
        chain: the store's, with the draft that is written.
        copier: its threads do the work.
        is_kept: whether the next version is compared with this one.
    """

    def __init__(
        self,
        footer: Footer | None,
        world: World,
        chain: DeltaChain,
        copier: Copier,
        *,
        is_kept: bool,
    ) -> None:
        copy = None
        if footer is not None and is_kept and not chain.maps_files:
            copy = KeptCopy(None, footer.layout, copier)
        super().__init__(footer, world, copier, copy)
        self._chain = chain
        self._is_kept = is_kept
        self._patched: Changes | None = None
        """Result of a patch, for `compare`."""

    def update(self, request: PublishRequest, *, is_compared: bool) -> Changes | None:
        if request.patch is not None:
            return self.copy.patch(request.patch)
        elements, numbers = _elements_of(request), range(len(request.source.specs))
        one_by_one, changes = request.source.is_lazy, None
        if is_compared:
            most = max_changed(self.footer.layout)
            changes = self.copy.update(
                numbers, lambda _: next(elements), most, one_by_one=one_by_one
            )
        else:
            self.copy.fill(numbers, lambda _: next(elements), one_by_one=one_by_one)
        next(elements, None)  # so that the source learns that its last tensor was copied
        return changes

    def write(self, request: PublishRequest, info: ClaimInfo) -> list[int] | None:  # noqa: ARG002
        draft, source = self._chain.draft, request.source
        if self._copy is not None:
            if draft.has_file:
                return draft.fill(self._copy.contents.views, self._copier)
            return self._checksums_of_copy() if self._chain.hashed else None
        if request.patch is not None:
            checksums = self._write_patch(draft, request.patch)
        elif source.stream is not None:
            checksums = draft.fill_from_stream(source.stream, source.new_names, request.progress)
        elif source.is_lazy:
            # A tensor that was gathered or read is dropped before the next.
            checksums = draft.fill_one_by_one(source.fetched(), self._copier, request.progress)
        else:
            checksums = draft.fill(source.eager, self._copier)
        if self._is_kept:
            self._keep_file(draft.mapped)
        return checksums

    def compare(self) -> Changes | None:
        patched, self._patched = self._patched, None
        if patched is None:
            return super().compare()
        self._file_before = None
        return patched

    def _write_patch(self, draft: Draft, patch: Patch) -> list[int] | None:
        """Bring a draft's file to the last version, and write a patch into it.

        Raises:
            StoreCorruptError: the published buffer was damaged.
        """
        self._bring_up_to_date(draft)
        mapped = draft.mapped
        self._patched = changes = apply_patch(patch, mapped.data, mapped.layout, self._copier)
        checksums = self._chain.last.checksums
        if checksums is None:
            return None
        changed = sorted(changes.tensors)
        new = self._copier.checksums(mapped, changed)
        by_index = dict(enumerate(checksums)) | dict(zip(changed, new, strict=True))
        return list(by_index.values())

    def _bring_up_to_date(self, draft: Draft) -> None:
        """Let a draft's file hold the last version, undamaged if that has checksums."""
        mapped, last, copier = draft.mapped, self._chain.last, self._copier
        held = hold_newest(self._chain.writer.store, newer_than=None)
        since = draft.claim.held_before
        if held is not None:
            with held, contextlib.suppress(*UNREADABLE):
                if since is not None and since in held.manifest.chain:
                    ChainReader(held, mapped.layout).read(mapped, copier, since=since)
                    if last.checksums is None or last.checksums == copier.checksums(mapped):
                        return
                    logger.warning(
                        "%s was damaged since it was written: writing it anew", draft.claim.path
                    )
        assert self._file is not None  # noqa: S101 - the published one
        copier.write(mapped, self._file.views)
        if last.checksums is None:
            return
        checksums = copier.checksums(mapped)
        pairs = zip(mapped.layout.specs, last.checksums, checksums, strict=True)
        for spec, expected, checksum in pairs:
            if checksum != expected:
                raise StoreCorruptError(
                    f"{self._chain.writer.root}: {spec.name} was damaged after it was published, "
                    "so what changed since cannot be published upon it; send all weights"
                )


def _elements_of(request: PublishRequest) -> Iterator[torch.Tensor]:
    """Yield a source's tensors in their order, and tell of the progress if they are lazy."""
    source = request.source
    if not source.is_lazy:
        yield from source.eager
        return
    on_bytes = counter(request.progress, sum(spec.num_bytes for spec in source.specs))
    for spec, tensor in zip(source.specs, source.fetched(), strict=True):
        yield tensor
        if on_bytes is not None:
            on_bytes(spec.num_bytes)
