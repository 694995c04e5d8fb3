"""`StoreTarget`: the store that a mirror copies into."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
    WaitTimeoutError,
)
from dbuffer.format import places
from dbuffer.format.chain import trimmed
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import Relation, VersionId, relation
from dbuffer.format.manifest import UNDECODABLE, Pointer
from dbuffer.io.chain_reader import read_version
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import KeptMappings
from dbuffer.io.transfer import chunks_of, read_tensors
from dbuffer.mirror.ends import OpenSourceVersion, Source, require_no_sender, source_of_mirror
from dbuffer.publish.draft import Draft
from dbuffer.publish.part import Part
from dbuffer.publish.publisher import Publication
from dbuffer.ranks.world import World
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer, require_own_directory
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.open_version import OpenStoreVersion, open_newest
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")


def copy_deltas(
    last: VersionId | None,
    opened: OpenSourceVersion,
    layout: Layout,
    target: str,
    copy: Callable[[VersionId, Path | str, Descriptor], T],
) -> dict[VersionId, T]:
    """Copy the deltas that lead from ``last``, the version copied last, to the open version.

    ``copy`` is called for each delta, with three arguments: the version that the delta leads to,
    the delta's name, and its file. Return the results of ``copy`` by version, or an empty
    dictionary if some delta cannot be copied.
    """
    manifest, copied = opened.manifest, dict[VersionId, T]()
    # The copy is one file. If trainer ranks wrote the source's file in parts, the layouts differ,
    # and the source's deltas do not fit the copy.
    if last not in manifest.chain[:-1] or manifest.layout_xxh3 != layout.xxh3:
        return {}
    try:
        for version in manifest.deltas_after(last):
            name, file = opened.open_delta(version)
            with file:
                copied[version] = copy(version, name, file)
    except (*UNDECODABLE, StoreNotFoundError, StoreFullError) as error:
        message = "%s: copying version %d without its deltas: %s"
        logger.warning(message, target, manifest.version, str(error))
        return {}
    return copied


class StoreTarget:
    """Store that a mirror publishes in.

    Of all mirrors into the store, the elected one copies: the mirror that has the store's lock for
    mirrors. When its process ends, the kernel releases the lock, and another mirror can take it.
    """

    def __init__(
        self,
        root: Path,
        source: Source,
        copier: Copier,
        reader_timeout_s: float,
        *,
        allow_shared_store: bool,
    ) -> None:
        self.receivers = self._store = DoubleBuffer(root, allow_shared_store=allow_shared_store)
        self.name = str(root)
        self._source = source
        self._copier = copier
        self._reader_timeout_s = reader_timeout_s
        self._lock: Descriptor | None = None
        """File lock that the elected mirror holds, or None if this mirror is not elected."""
        self._writer: BufferWriter | None = None
        self._mappings = KeptMappings()
        self._layout: Layout | None = None
        """Layout that the version copied last has in the source."""

    def newest(self) -> Pointer | None:
        """Return the target's version pointer, or None if the pointer is missing or damaged."""
        with contextlib.suppress(StoreCorruptError):
            return self._store.newest_pointer() if self._store.exists() else None
        return None

    def elect(self) -> bool:
        """Try to be the target's elected mirror. Return False if another mirror is elected.

        Raises:
            OptionError: a sender publishes in the target, or the target is the source.
            WaitTimeoutError: the target has versions, but the source has no version.
        """
        root = self._store.root
        if self._store.exists():
            require_no_sender(self._source, self._store)
        filesystem.make_directory(root, parents=True)
        require_own_directory(root)
        self._store.check()
        lock = filesystem.take_lock(
            root / places.MIRROR_LOCK_FILE, "mirror's", may_lack_locks=False
        )
        if lock is None:
            return False
        self._lock = lock
        try:
            self._require_source()
            if self._has_forked():
                # Withdraw the target's versions, so that no reader loads one from a replaced run.
                message = "%s: withdrawing versions that forked from %s"
                logger.warning(message, root, self._source.store)
                with contextlib.closing(self._new_writer()) as writer:
                    writer.withdraw()
        except BaseException:
            self.close()
            raise
        with contextlib.suppress(OSError):  # such as a full disk; mirrors can do without the name
            os.ftruncate(lock.number, 0)
            filesystem.write_at(lock.number, 0, os.fsencode(self._source.store))
        return True

    def take_over(self) -> None:
        """Check again that no sender has the target, unless this mirror has the writer's lock.

        An elected mirror takes the writer's lock at its first copy: until then, a sender that
        starts on this host may turn out to have its store here.

        Raises:
            OptionError: as :meth:`elect`.
        """
        if self._writer is None:
            require_no_sender(self._source, self._store)

    def is_removed(self) -> bool:
        """Whether the target was removed since this mirror was elected."""
        path = self._store.root / places.MIRROR_LOCK_FILE
        return self._lock is not None and not filesystem.is_at(self._lock, path)

    def is_fit(self) -> bool:
        """Whether receivers can use the target: no version in it has forked from the source.

        If versions have forked, the elected mirror is about to replace them.

        Raises:
            WaitTimeoutError: the versions have forked, and the elected mirror follows another
                source.
        """
        if not self._has_forked():
            return True
        source = source_of_mirror(self._store)
        if source == str(self._source.store):
            message = "waiting until the mirror of %s has replaced versions that forked from %s"
            log_once(logger, message, self.name, source)
            return False
        raise WaitTimeoutError(
            f"{self.name} holds a version that does not lead to the newest version of "
            f"{self._source.store}, and the mirror of {self.name} follows {source}: stop that "
            "mirror, or name another directory"
        )

    def close(self) -> None:
        """Stop writing, and let another mirror be elected."""
        self._mappings.keep_only()
        opened = self._writer, self._lock
        self._writer = self._lock = None
        for owned in opened:
            if owned is not None:
                owned.close()

    def copy(self, opened: OpenSourceVersion) -> Publication:
        """Publish a copy of an open version in the store."""
        if self._writer is None:
            self.take_over()
            self._writer = self._new_writer()
        writer = self._writer
        started, manifest = time.monotonic(), opened.manifest
        if self._layout is None or self._layout.xxh3 != manifest.layout_xxh3:
            with opened.noticing_loss():
                self._layout = opened.read_layout()
        if not isinstance(opened, OpenStoreVersion):
            opened.copies = self._store
        remote, layout = self._layout, self._layout.joined
        hashed = manifest.checksums_xxh3 is not None
        self._mappings.keep_only(layout if writer.rewrites_files else None)
        draft = Draft(
            writer.store,
            self._mappings,
            self._copier,
            Part(layout),
            is_mapped=writer.medium.maps_files,
            hashed=hashed,
        )
        with self._source.reader.reporting_unreadable(opened), draft:
            draft.begin(writer, manifest.lineage)
            with opened.noticing_loss():
                checksums = self._fill(draft, opened, remote)
                self._source.reader.verify(opened, layout, checksums)
            opened.require_unchanged()
            chain, delta_bytes = self._copy_deltas(opened, draft)
            try:
                draft.commit(
                    manifest.metadata, checksums, published_at=manifest.published_at, chain=chain
                )
            except StoreAccessError as error:
                pointer = self.newest()
                if pointer is None or pointer.id != manifest.id:
                    raise
                logger.warning("%s: %s", self.name, str(error))  # the version is published anyway
        return Publication.of(manifest.id, layout, started, delta_bytes or None)

    def _fill(self, draft: Draft, opened: OpenSourceVersion, remote: Layout) -> list[int] | None:
        """Fill a draft with an open version; return the tensors' checksums if the version has any.

        Only deltas are read if the version has checksums and if deltas lead from a version in the
        target to the open version.
        """
        if draft.is_mapped and opened.manifest.checksums_xxh3 is not None:
            since = self._put_earlier(draft, opened)
            checksums = self._source.reader.apply_changes(draft.mapped, since, opened)
            if checksums is not None:
                return checksums
        copier, hashed = self._copier, draft.hashed and draft.is_mapped
        if not isinstance(opened, OpenStoreVersion):
            memory = draft.memory()
            checksums = opened.read_into(memory, copier, hashed=hashed)
        elif draft.is_mapped or opened.manifest.anchor is not None:
            memory = draft.memory()
            checksums = read_version(opened, remote, memory, copier, hashed=hashed)
        else:
            file, weights = opened.file.number, draft.claim.weights
            return read_tensors(file, opened.path, remote, weights, copier, hashed=draft.hashed)
        if draft.is_mapped:
            return checksums
        draft.write(range(len(memory.views)), memory.views)
        return draft.finish_parts(World())

    def _put_earlier(self, draft: Draft, opened: OpenSourceVersion) -> VersionId | None:
        """Return the version in the draft's file, or None if the file has no undamaged version.

        If deltas lead to the source's version from the target's newest version, but not from the
        version in the file, first copy the newest version into the file. This is faster than
        reading all of the source's version over a network.
        """
        since, chain = draft.claim.earlier, opened.manifest.chain
        if since in chain or not chain:
            return since
        with contextlib.suppress(*UNDECODABLE, StoreNotFoundError):  # damaged: read the source
            newest = open_newest(self._store, newer_than=None)
            if newest is None:
                return since
            with newest:
                layout_xxh3 = newest.manifest.layout_xxh3
                if newest.manifest.id not in chain or layout_xxh3 != draft.layout.xxh3:
                    return since
                read_version(newest, draft.layout, draft.mapped, self._copier)
                return newest.manifest.id
        return None

    def _copy_deltas(self, opened: OpenSourceVersion, draft: Draft) -> tuple[list[VersionId], int]:
        """Copy the deltas that lead from the target's newest version to the open version.

        Return the versions of the copy's chain, and the size of the copied deltas.
        """

        def copy(version: VersionId, path: Path | str, file: Descriptor) -> int:
            return draft.writer.add_delta(draft.claim, version, chunks_of(file, path))

        before = self._delta_sizes()
        copied = copy_deltas(next(reversed(before), None), opened, draft.layout, self.name, copy)
        chain = list(trimmed(before | copied, draft.layout.num_bytes, None)) if copied else []
        return chain, sum(copied.get(version, 0) for version in chain[1:])

    def _delta_sizes(self) -> dict[VersionId, int]:
        """Return the delta size of each version in the chain to the target's newest version."""
        pointer = self.newest()
        manifest = None if pointer is None else self._store.undamaged_manifest(pointer.buffer)
        if manifest is None:
            return {}
        first, *later = manifest.chain or [manifest.id]
        try:
            sizes = [self._store.delta_path(version).stat().st_size for version in later]
        except OSError:
            return {}  # a delta is missing: begin another chain
        return {first: 0} | dict(zip(later, sizes, strict=True))

    def _new_writer(self) -> BufferWriter:
        return BufferWriter(
            self._store.root,
            durable=False,
            reader_timeout_s=self._reader_timeout_s,
            allow_shared_store=not self._store.owner_only,
        )

    def _has_forked(self) -> bool:
        pointer, newest = self.newest(), self._source.newest()
        if pointer is None or newest is None:
            return False
        return relation(pointer.lineage, newest.lineage) is Relation.FORKED

    def _require_source(self) -> None:
        """Refuse a target that has versions if the source has none: the source may be mistyped.

        If a receiver of the target is alive, accept the target: it is in use, and the source may
        only be unreachable for now.
        """
        store = self._store
        if self.newest() is None or self._source.newest() is not None:
            return
        if any(store.may_live(record) for record in store.receivers()):
            return
        raise WaitTimeoutError(
            f"{self.name} holds versions of an earlier run, and {self._source.store} holds no "
            "version yet: check the source's name; if it is right, name another target, or remove "
            "this one (unless a version in it is pinned)"
        )
