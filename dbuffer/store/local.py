"""`LocalMedium`: a disk, or memory, of this host alone.

Locks hold: the kernel drops one when its process dies. A file is rewritten in place, under an
exclusive lock that waits for those who read it; readers map it. Changes are seen at once, and
inotify tells of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from dbuffer.errors import StoreCorruptError
from dbuffer.format import places
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.medium import Medium, Records, WeightsFiles

logger = logging.getLogger(__name__)

REWRITABLE_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs"})
"""Filesystems on which allocated space stays allocated when it is written again.

A copy-on-write filesystem (btrfs, zfs) needs new space for old pages, and a mapped page for
which there is none is a SIGBUS. There each version gets a new file.
"""

LOCAL_FILESYSTEMS = REWRITABLE_FILESYSTEMS | frozenset(
    {"bcachefs", "btrfs", "ecryptfs", "exfat", "f2fs", "hugetlbfs", "jfs", "nilfs2", "ntfs3"}
    | {"reiserfs", "rootfs", "ubifs", "vfat", "zfs"}
)
"""Filesystems that only this host writes. All others count as network mounts: what works between
hosts also works on one, and not the other way round."""


class LocalMedium(Medium):
    """Locks, mappings and events; see the module."""

    name = "local"
    maps_files = True
    reaches_other_hosts = False

    @property
    def can_rewrite_in_place(self) -> bool:
        return self.filesystem in REWRITABLE_FILESYSTEMS

    def now(self) -> float:
        return time.time()

    def shows_life(self, record: Path) -> bool:
        """Whether the record is locked."""
        return filesystem.is_locked(record)

    def lock_to_read(self, file: Descriptor) -> bool:
        return filesystem.try_lock(file.number, exclusive=False)

    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        """Lock a record: the kernel drops the lock when its owner dies, in whatever container."""
        scratch = self.root / places.SCRATCH_DIRECTORY
        file = filesystem.replace_file(
            path, data, scratch=scratch, durable=durable, lock=shows_life
        )
        if before is not None:  # its own lock showed life until now
            before.close()
        if shows_life:
            return file
        file.close()
        return None

    def weights_files(self, records: Records, reader_timeout_s: float) -> WeightsFiles:
        return _RewrittenFiles(records, reader_timeout_s, can_rewrite=self.can_rewrite_in_place)


class _RewrittenFiles(WeightsFiles):
    """Each buffer has one file, which is written again unless its layout changes."""

    access = os.O_RDWR

    def __init__(self, records: Records, reader_timeout_s: float, *, can_rewrite: bool) -> None:
        super().__init__(records, reader_timeout_s)
        self._can_rewrite = can_rewrite

    def reuse(
        self, buffer: str, old: Manifest | None, layout_xxh3: str | None, file_bytes: int
    ) -> Descriptor | None:
        file = self._lock_existing(buffer, old) if old is not None else None
        if file is None or old is None:
            return None
        if self._is_fit(file, old, layout_xxh3, file_bytes):
            return file
        self.forget(file)
        return None

    def _is_fit(
        self, file: Descriptor, old: Manifest, layout_xxh3: str | None, file_bytes: int
    ) -> bool:
        return (
            self._can_rewrite
            # Readers of a network mount take no lock, and rely on it that it stays as it is.
            and not old.is_final
            and old.state == "complete"
            and old.layout_xxh3 == layout_xxh3
            and old.file_bytes == file_bytes
            # A file that someone cut short would be a SIGBUS.
            and os.fstat(file.number).st_size == file_bytes
        )

    def _lock_existing(self, buffer: str, manifest: Manifest) -> Descriptor | None:
        """The buffer's file, locked against readers; None if there is none, or readers hold on.

        A reader that outlasts the time-out keeps the bytes it maps: the buffer moves to a new
        file. It is told that it was evicted when it compares generations.
        """
        file = self._open_again(self.records.root / buffer / manifest.file)
        if file is None:
            return None
        if not filesystem.lock_within(file.number, self.reader_timeout_s):
            logger.warning(
                "evicting %s from buffer %s of %s (version %d): held for more than %g s",
                self._holders(manifest.version) or "a reader",
                buffer,
                self.records.root,
                manifest.version,
                self.reader_timeout_s,
            )
            self.forget(file)
            return None
        return file

    def _open_again(self, path: Path) -> Descriptor | None:
        known = self.open.get(path)
        try:
            if known is not None and os.path.samestat(os.fstat(known.number), path.stat()):
                return known
            if known is not None:
                self.forget(known)
            owner_only = self.records.owner_only
            file = filesystem.open_regular(path, os.O_RDWR, owner_only=owner_only)
        except FileNotFoundError:
            return None
        except StoreCorruptError as error:
            logger.warning("making a new weights file: %s", error)
            return None
        self.open[path] = file
        return file

    def _holders(self, version: int) -> str:
        return ", ".join(
            f"receiver {record.receiver} (pid {record.pid}, {record.host})"
            for record in self.records.readers()
            if record.held_version == version
        )

    def retire(
        self,
        buffer: str,
        old: Manifest | None,  # noqa: ARG002
        *,
        keep: Collection[Path],
    ) -> None:
        """Unlink the files; processes that map them keep the bytes."""
        self.sweep(buffer, keep=keep)

    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:
        # Locked before anybody knows its name.
        filesystem.try_lock(file.number, exclusive=True)
        if num_bytes:
            filesystem.allocate(file.number, num_bytes, path)

    def sweep(self, directory: str, *, keep: Collection[Path]) -> None:
        """Remove the files: no reader looks for a file that no manifest names."""
        # What somebody else has removed is held open, and with it its room.
        opened = [path for path in self.open if path.parent == self.records.root / directory]
        for path in {*self.all_in(directory), *opened}:
            if path not in keep:
                self.close_at(path)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def note_published(self, read_back: Callable[[], None]) -> None:
        """Do nothing: readers see what was written."""
