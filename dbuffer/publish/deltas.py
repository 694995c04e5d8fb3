"""`Deltas`: the last version of a sender, and the delta from it to the next version.

On a local mount, each version has a weights file. The sender compares this file with the last
version's file, and writes the delta into a second file. If the weights are on a GPU with enough
free memory (`_GPU_SHARE`), the sender compares them there, with a `KeptCopy` of the last version,
and encodes the changes while it writes the weights file. Not measured on a GPU.

On a network mount, the sender compares the weights with a `KeptCopy` of the last version. Most
versions with a delta have no weights file. Such a version consists of an anchor (an earlier version
with a weights file) and of the deltas after the anchor.

A version has no delta if

- it is the sender's first, or the publish before it failed;
- it has other tensors than the last version, or other ranks hold them;
- too much changed (`MAX_CHANGED_SHARE`);
- it has a weights file, and its delta would exceed the limits of a chain (`format.chain`);
- the store has no room for the delta of a version with a weights file.

On a network mount, a version with a delta gets a weights file too if

- another delta would exceed the limits of a chain;
- a file of the last version, or one of its deltas, is damaged or gone;
- a receiver has reported that it cannot read one of the versions after the anchor.

The sender logs each reason. Mirrors have rules of their own: see `StoreTarget` and `BucketTarget`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch

from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
)
from dbuffer.format.chain import is_within_limits, trimmed
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import UNDECODABLE, Manifest
from dbuffer.io.chain_reader import read_version
from dbuffer.io.changes import Changes, Patch, apply_patch, find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.delta import encode_delta
from dbuffer.io.devices import free_on, gpu_of
from dbuffer.io.tensors import MappedTensors
from dbuffer.publish.draft import Draft, fill, join_digests_of_parts
from dbuffer.publish.kept_copy import MAX_CHANGED_SHARE, KeptCopy
from dbuffer.publish.part import Part
from dbuffer.ranks.world import World
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.trouble import log_once
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.open_version import open_newest
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.sources import Source

logger = logging.getLogger(__name__)

_UNREADABLE = (*UNDECODABLE, StoreAccessError, StoreNotFoundError)

_GPU_SHARE = 0.25
"""Largest fraction of a GPU's free memory that a copy of the last version may take."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """Version that was published last, as the base of the next delta. Only rank 0 has it."""

    manifest: Manifest
    buffer: str
    checksums: Sequence[int] | None
    delta_bytes: dict[VersionId, int]
    """Size in bytes of the delta that leads to each version of the chain of deltas, oldest version
    first. The chain's first version has 0. Empty if no delta leads to the last version."""

    @property
    def is_full(self) -> bool:
        """Whether one more delta after the anchor would exceed the limits of a chain."""
        sizes = [self.delta_bytes[version] for version in self.manifest.since_anchor]
        return not is_within_limits([*sizes, 0], self.manifest.num_bytes)

    def problem(self, writer: BufferWriter) -> str | None:
        """Return why receivers cannot read the last version or its deltas, or None if they can."""
        store = writer.store
        manifest = store.undamaged_manifest(self.buffer)
        if manifest is None or manifest.id != self.manifest.id:
            # No manifest names the last version's files now, so the next claim may remove them.
            return "the store lost the last version's manifest"
        later = list(self.delta_bytes.items())[1:]
        files = {store.delta_path(name): num_bytes for name, num_bytes in later}
        files[store.weights_path(self.buffer, manifest)] = manifest.file_bytes
        problem = writer.problem_with(files)
        if problem is not None or writer.medium.maps_files:
            return problem
        since_anchor = self.manifest.since_anchor
        for record in store.receivers():
            if record.unreadable in since_anchor:
                return f"{record.receiver} cannot read the deltas of version {record.unreadable}"
        return None


class Deltas:
    """Maker of the deltas between a sender's versions, on one rank or on several ranks together.

    Each version takes the steps `compare`, `plan_file`, `write`, `commit` and `keep`, in this
    order. After an error, `forget` ends them.
    """

    def __init__(
        self,
        store: DoubleBuffer,
        world: World,
        copier: Copier,
        *,
        maps_files: bool,
    ) -> None:
        self._store = store
        self._world = world
        self._copier = copier
        self._maps_files = maps_files
        self._part: Part | None = None
        """This rank's part of the last version, or None if no delta can lead from it."""
        self._copy: KeptCopy | None = None
        self._file: MappedTensors | None = None
        self._base: DeltaBase | None = None
        self._why_none = "this sender has published no version yet"
        """Reason why the next version gets no delta from the version before it, if it gets none."""
        self._find: Callable[[], Changes] | None = None
        """Function that encodes and returns the changes that `compare` has found on a GPU."""
        self._changes: Changes | None = None
        """Changes from the last version to the version being published, on rank 0; None until the
        versions are compared."""

    def forget(self, reason: str = "the last publish failed") -> None:
        """Forget the last version. The next version has no delta, and the log gives ``reason``."""
        self._why_none = reason
        self._part = self._copy = self._file = self._base = self._changes = self._find = None

    def compare(self, part: Part, source: Source) -> None:
        """Write the version into the `KeptCopy`, if any, and find what changed. Collective.

        Without a copy, `write` finds what changed. If the copy is on a GPU, `write` encodes the
        changes.
        """
        if self._part is not part:
            other = "the last version had other tensors, or had them on other ranks"
            self.forget(self._why_none if self._part is None else other)
        # Until `keep` is called, count the last version as gone: any step before may fail.
        self._part = self._changes = self._find = None
        gpu = self._gpu_for_copy(part, source) if self._maps_files else None
        if self._maps_files and gpu is None:
            self._copy = None
            return
        is_new = self._copy is None
        if self._copy is None:
            self._copy = KeptCopy(part, self._copier, gpu)
        if source.patch is not None:
            self._changes = self._copy.patch(source.patch)
            return
        fill(self._copy, "copy" if is_new else "compare", source, self._world)
        if is_new:
            self._copy.take_changes()
        elif gpu is not None:
            self._find = self._copy.take_changes
        else:
            self._join(self._copy.take_changes)

    def _gpu_for_copy(self, part: Part, source: Source) -> torch.device | None:
        """Return the GPU that has the weights and room for a copy of the version, or None.

        With None, the sender compares the weights files of the two versions.
        """
        gpu = gpu_of(source.eager) if part.has_all else None
        if gpu is None or (self._copy is not None and self._copy.device == gpu):
            return gpu
        num_bytes, free_bytes = part.layout.checksums_offset, free_on(gpu)
        if num_bytes <= _GPU_SHARE * free_bytes:
            return gpu
        message = "%s: %s has %d bytes free, too few for a copy of %d bytes: comparing files"
        log_once(logger, message, self._store.root, gpu, free_bytes, num_bytes)
        return None

    def _join(self, find: Callable[[], Changes]) -> None:
        """Find the bytes that changed in this rank's share, and join them on rank 0. Collective."""
        with self._world.step("send what changed") as step:
            changes = find()
            if self._world.rank:
                step.message = msgspec.msgpack.encode(changes)
        if self._world.rank == 0:
            decoded = [msgspec.msgpack.decode(data, type=Changes) for data in step.messages]
            self._changes = Changes.joined([changes, *decoded])

    def plan_file(self, writer: BufferWriter, version: int) -> bool:
        """Return whether the version gets a weights file; log the reason if it gets one.

        Rank 0 calls this method before it claims a buffer. ``version`` is only for the log.
        """
        base = self._base
        if base is None or (self._changes is not None and not self._is_worth(base, self._changes)):
            self._base = None
            return True
        if problem := base.problem(writer):
            message = "%s: version %d gets a whole file, because earlier deltas cannot be used: %s"
            logger.warning(message, self._store.root, version, problem)
            self._base = replace(base, delta_bytes={})
            return True
        if self._maps_files or not base.is_full:
            return self._maps_files
        message = "%s: version %d gets a whole file: the deltas since its anchor are too long"
        logger.info(message, self._store.root, version)
        return True

    def write(self, draft: Draft, source: Source) -> list[int] | None:
        """Write the version's weights file, if any; find what changed, unless `compare` did.

        Collective. Return each tensor's checksum, or None if versions have no checksums.
        """
        world, copy, find = self._world, self._copy, self._find
        if copy is None:
            if source.patch is not None:
                return self._write_patch(draft, source.patch)
            fill(draft, "write", source, world)
        elif draft.has_file:
            with world.step("write its part"), ThreadPoolExecutor(1, "delta", leave_core) as thread:
                if find is not None:
                    try:
                        find = thread.submit(find).result
                    except RuntimeError as error:  # a limit on threads is reached
                        message = "%s: no thread to encode a delta with (%s): encoding it later"
                        log_once(logger, message, self._store.root, str(error))
                draft.write(range(len(copy.contents.views)), copy.contents.views)
        else:
            if not draft.hashed:
                return None
            with world.step("hash its part") as step:
                step.result = copy.digests()
            return join_digests_of_parts(draft.layout, step.results)
        checksums = draft.finish_parts(world)
        if find is None and self._file is not None:
            find = partial(
                find_changes,
                self._file.data,
                draft.mapped.data,
                draft.layout,
                self._copier,
                share=(world.rank, world.size),
                max_bytes=MAX_CHANGED_SHARE * draft.layout.num_bytes,
            )
        if find is not None:
            self._join(find)
        return checksums

    def _write_patch(self, draft: Draft, patch: Patch) -> list[int] | None:
        """Write the last version into the draft's file, and then the patch.

        Return all tensors' checksums, or None if the last version has none.
        """
        mapped, copier, base = draft.mapped, self._copier, self._base
        assert base is not None  # noqa: S101 - patches follow a version
        assert self._file is not None  # noqa: S101
        if not self._apply_deltas(draft, base):
            copier.write(mapped, self._file.views)
            if damaged := _damaged(mapped, base, copier):
                raise StoreCorruptError(
                    f"{self._store.root}: {damaged} was damaged after it was published, so "
                    "patches cannot follow it: send all weights"
                )
        self._changes = changes = apply_patch(patch, mapped.data, mapped.layout, copier)
        if base.checksums is None:
            return None
        changed = sorted(changes.tensors)
        new = zip(changed, copier.checksums(mapped, changed), strict=True)
        return list((dict(enumerate(base.checksums)) | dict(new)).values())

    def _apply_deltas(self, draft: Draft, base: DeltaBase) -> bool:
        """Apply deltas to the older version in the draft's file, so that it holds the last version.

        Return whether it does now. If not, the caller copies all tensors of the last version there.
        """
        mapped, since = draft.mapped, draft.claim.earlier
        with (
            contextlib.suppress(*_UNREADABLE),
            open_newest(self._store, newer_than=None) or contextlib.nullcontext() as newest,
        ):
            if newest is not None and since in newest.manifest.chain:
                read_version(newest, mapped.layout, mapped, self._copier, since=since)
                if not _damaged(mapped, base, self._copier):
                    return True
                logger.warning("%s was damaged after it was written: writing it again", draft.path)
        return False

    def commit(
        self,
        draft: Draft,
        source: Source,
        metadata: dict[str, Any],
        checksums: list[int] | None,
    ) -> int | None:
        """On rank 0, write the delta from the last version, and publish the version in ``draft``.

        All ranks must have written the draft. Return the delta's size in bytes, or None if the
        version has no delta.
        """
        base, fields, delta_bytes = self._base, dict[str, Any](), dict[VersionId, int]()
        num_bytes = None if base is None else self._write_delta(base, draft, checksums)
        if base is not None and not draft.has_file:
            fields = base.manifest.upon(base.buffer)
        if base is not None and num_bytes is not None:
            chain = (base.delta_bytes or {base.manifest.id: 0}) | {draft.id: num_bytes}
            delta_bytes = trimmed(chain, draft.layout.num_bytes, fields.get("anchor"))
        else:
            message = "%s: version %d has no delta: %s"
            logger.info(message, self._store.root, draft.id.number, self._why_none)
        source.check()
        manifest = draft.commit(metadata, checksums, chain=list(delta_bytes), **fields)
        self._base = DeltaBase(manifest, draft.claim.buffer, checksums, delta_bytes)
        return num_bytes

    def keep(self, draft: Draft) -> None:
        """Keep the mapped file, or the copy, to compare the next version with it."""
        if self._maps_files:
            self._file = draft.mapped
        self._part = draft.part

    def _write_delta(
        self, base: DeltaBase, draft: Draft, checksums: list[int] | None
    ) -> int | None:
        changes, layout = self._changes, draft.layout
        assert changes is not None  # noqa: S101 - a version with a base was compared with it
        if not self._is_worth(base, changes):
            return None
        encoded = encode_delta(
            changes.chunks,
            None if base.checksums is None or checksums is None else (base.checksums, checksums),
            base=base.manifest.id,
            version=draft.id,
            layout_xxh3=layout.xxh3,
        )
        num_bytes = sum(map(len, encoded))
        if draft.has_file and not is_within_limits([num_bytes], layout.num_bytes):
            self._why_none = (
                f"it would have {num_bytes} bytes, and all tensors have {layout.num_bytes}"
            )
            return None
        try:
            return draft.writer.add_delta(draft.claim, draft.id, encoded)
        except StoreFullError:
            if not draft.has_file:
                raise
            self._why_none = "the store has no room for it"
            message = "%s has no room for deltas: versions have no deltas until there is room"
            log_once(logger, message, self._store.root)
            return None

    def _is_worth(self, base: DeltaBase, changes: Changes) -> bool:
        """Whether so few bytes changed that a delta is useful. If not, set the reason."""
        if changes.num_bytes <= MAX_CHANGED_SHARE * base.manifest.num_bytes:
            return True
        self._why_none = f"more than {100 * MAX_CHANGED_SHARE:.0f} % of all bytes changed"
        return False


def _damaged(mapped: MappedTensors, base: DeltaBase, copier: Copier) -> str | None:
    if base.checksums is None:
        return None
    checksums = zip(mapped.layout.specs, base.checksums, copier.checksums(mapped), strict=True)
    return next((spec.name for spec, old, new in checksums if old != new), None)
