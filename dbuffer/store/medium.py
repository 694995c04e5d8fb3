"""`Medium`: how a store's filesystem is used, and all that rests on it.

Whether a file can be rewritten under its readers, whether locks hold, what other hosts see and
when: a mount decides it, and a medium is the one place that knows. :func:`medium_of` chooses it,
once for a store; nothing else asks what kind of mount there is. A new medium is a subclass of
`Medium`, or of one of the two here, with a row in :data:`MEDIA`; its writer's files are a subclass
of `WeightsFiles`, with a row in :data:`~dbuffer.store.writer.FILES`.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from dbuffer.errors import OptionError
from dbuffer.format import places
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem, mounts
from dbuffer.store.filesystem import MOUNT_VARIABLE, Descriptor

REWRITABLE_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "ramfs", "tmpfs"})
"""Filesystems on which allocated space stays allocated when it is written again.

A copy-on-write filesystem (btrfs, zfs, xfs with reflinks) needs new space for old pages, and
writing a mapped page without space is a SIGBUS. An overlay may lie on such a filesystem, and
replaces a file of a lower layer when the file is first opened for writing: older mappings keep
showing the old file, and the new one has its device and inode. On all of these each version gets a
new file.
"""

LOCAL_FILESYSTEMS = REWRITABLE_FILESYSTEMS | frozenset(
    {"bcachefs", "btrfs", "ecryptfs", "exfat", "f2fs", "hugetlbfs", "jfs", "nilfs2", "ntfs3"}
    | {"overlay", "reiserfs", "rootfs", "ubifs", "vfat", "xfs", "zfs"}
)
"""Filesystems that only this host writes. All others count as network mounts: what works between
hosts also works on one, and not the other way round."""
_CLOCK_S = 60.0
"""Interval at which a server's clock is compared with this host's."""


class Medium(ABC):
    """A store's directory, as far as its mount decides how it is written and read."""

    name: ClassVar[str]
    """Name in logs and in ``DBUFFER_MOUNT``."""
    reaches_other_hosts: ClassVar[bool]
    """Whether processes of other hosts may use the store.

    Then inotify does not report every change, locks may have no effect, files are seen when they
    are flushed, the pointer may be missing while it is replaced, and checksums are the default.
    """

    def __init__(self, root: Path, filesystem_name: str) -> None:
        self.root = root
        self.filesystem = filesystem_name
        """The kernel's name of the type: ``tmpfs``, ``ext4``, ``nfs4`` ..."""

    @property
    def maps_files(self) -> bool:
        """Whether writers and readers map weights files, each of which holds a version whole.

        Else bytes go through pwrite and pread, because a mapped file that goes away is a SIGBUS,
        and a version may be the file of an earlier one and the deltas since.
        """
        return not self.reaches_other_hosts

    @property
    def is_in_memory(self) -> bool:
        """Whether files have no place but main memory."""
        return self.filesystem in ("tmpfs", "ramfs")

    @property
    @abstractmethod
    def can_rewrite_in_place(self) -> bool:
        """Whether a weights file is written again and again; else each version has a new file."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch, by the clock that files' times are of."""

    @abstractmethod
    def shows_life(self, record: Path) -> bool:
        """Whether the owner of a receiver's record, of another container or host, may live."""

    @abstractmethod
    def lock_to_read(self, file: Descriptor) -> bool:
        """Keep writers from an open weights file; False if one has it."""

    @abstractmethod
    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        """Replace a small file of the store in one step, so that others see it.

        ``shows_life``: of a receiver's record, from before it has its name; see :meth:`shows_life`.

        Returns:
            The file, to be kept open until it is replaced (then it is ``before``), or its owner
            ends; None: it need not be.
        """


class LocalMedium(Medium):
    """A disk, or memory, of this host alone.

    Locks hold: the kernel drops one when its process dies. Readers map files; changes are seen at
    once, and inotify tells of them.
    """

    name = "local"
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
        """Lock a record: the kernel drops the lock when its owner dies, in any container."""
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


class NetworkMedium(Medium):
    """A mount that other hosts may write to and read from.

    No lock there can be trusted by all, and caches are late. So records are touched now and then,
    and who looks for a version opens the directory first, and polls.
    """

    name = "network"
    reaches_other_hosts = True

    def __init__(self, root: Path, filesystem_name: str) -> None:
        super().__init__(root, filesystem_name)
        self._ahead_s = time.time() - time.monotonic()
        """Seconds by which the mount's clock is ahead of the monotonic clock, which no one sets."""
        self._measured_at: float | None = None

    @property
    def can_rewrite_in_place(self) -> bool:
        """Another host would read half of the old bytes and half of the new."""
        return False

    def now(self) -> float:
        now = time.monotonic()
        if self._measured_at is None or now - self._measured_at > _CLOCK_S:
            self._measured_at = now
            # Who may not write there takes the clocks for the same.
            with contextlib.suppress(OSError):
                self._ahead_s = filesystem.time_at(self.root / places.SCRATCH_DIRECTORY) - now
        return now + self._ahead_s

    def shows_life(self, record: Path) -> bool:
        return filesystem.was_touched_within(record, TIMING.presumed_dead_after_s, self.now())

    def lock_to_read(self, file: Descriptor) -> bool:  # noqa: ARG002
        """Return at once: locks may have no effect, and no file is written a second time."""
        return True

    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,  # noqa: ARG002
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        """Flush the file, which others see no sooner, and keep it open; its time shows life."""
        scratch = self.root / places.SCRATCH_DIRECTORY
        return filesystem.replace_file(
            path, data, scratch=scratch, flush=True, durable=durable, before=before
        )


MEDIA: dict[str, type[Medium]] = {medium.name: medium for medium in (LocalMedium, NetworkMedium)}
"""All media, by their name in ``DBUFFER_MOUNT``."""


def medium_of(path: Path) -> Medium:
    """Choose the medium of ``path``, which need not exist yet.

    Raises:
        OptionError: ``DBUFFER_MOUNT`` names no medium.
        StoreAccessError: the path leads into a loop of links.
    """
    mounted = mounts.mount_of(path).filesystem
    name = os.environ.get(MOUNT_VARIABLE, "auto")
    if name == "auto":
        name = (LocalMedium if mounted in LOCAL_FILESYSTEMS else NetworkMedium).name
    if name not in MEDIA:
        names = ", ".join(map(repr, MEDIA))
        raise OptionError(f"invalid {MOUNT_VARIABLE} {name!r:.80}: use {names} or 'auto'")
    return MEDIA[name](path, mounted)
