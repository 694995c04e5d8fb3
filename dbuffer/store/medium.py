"""`Medium`: how a store's filesystem is used, and all that rests on it.

Whether a file can be rewritten under its readers, whether locks hold, what other hosts see and
when: a mount decides it, and a medium is the one place that knows. :func:`medium_of` looks at the
mount, once for a store; nothing else asks what kind of mount there is.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from dbuffer.errors import OptionError
from dbuffer.format import places
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.filesystem import MOUNT_VARIABLE, Descriptor, real_path

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
"""Filesystems that only this host writes. All others count as network mounts: the ways that
work between hosts also work on one host."""
_CLOCK_S = 60.0
"""Interval at which a server's clock is compared with this host's."""


class Medium:
    """A store's directory, as far as its mount decides how it is written and read.

    On a local mount, locks hold, readers map files, changes are seen at once, and inotify tells of
    them. On a network mount, no lock can be trusted by all hosts, and caches are late: records are
    touched now and then, and a reader opens the directory before it looks for a version, and polls.
    """

    def __init__(
        self, root: Path, filesystem_name: str, source: str, *, reaches_other_hosts: bool
    ) -> None:
        self.root = root
        self.filesystem = filesystem_name
        """The kernel's name of the type: ``tmpfs``, ``ext4``, ``nfs4`` ..."""
        self.source = source
        """Device that is mounted, or ``server:/export``."""
        self.reaches_other_hosts = reaches_other_hosts
        """Whether processes of other hosts may use the store.

        Then inotify does not report every change, locks may have no effect, files are seen when
        they are flushed, the pointer may be missing while it is replaced, and checksums are the
        default.
        """
        self._ahead_s = time.time() - time.monotonic()
        """Difference of the mount's clock from the monotonic clock, in seconds."""
        self._measured_at: float | None = None

    @property
    def maps_files(self) -> bool:
        """Whether writers and readers map weights files, and each file holds a version whole.

        Otherwise bytes go through pwrite and pread, because a mapped file that is removed causes
        a SIGBUS; and a version may be an earlier version's file and the deltas since.
        """
        return not self.reaches_other_hosts

    @property
    def is_in_memory(self) -> bool:
        """Whether files have no place but main memory."""
        return self.filesystem in ("tmpfs", "ramfs")

    @property
    def can_rewrite_in_place(self) -> bool:
        """Whether a weights file is written again and again; else each version has a new file.

        Another host would read half of the old bytes and half of the new.
        """
        return not self.reaches_other_hosts and self.filesystem in REWRITABLE_FILESYSTEMS

    def now_s(self) -> float:
        """Return seconds since the epoch, by the clock of files' times."""
        if not self.reaches_other_hosts:
            return time.time()
        since_boot_s = time.monotonic()
        if self._measured_at is None or since_boot_s - self._measured_at > _CLOCK_S:
            self._measured_at = since_boot_s
            # Without write access the clock cannot be measured, and counts as this host's.
            with contextlib.suppress(OSError):
                time_s = filesystem.time_at(self.root / places.SCRATCH_DIRECTORY)
                self._ahead_s = time_s - since_boot_s
        return since_boot_s + self._ahead_s

    def shows_life(self, record: Path) -> bool:
        """Whether the owner of a receiver's record, of another container or host, may live."""
        if not self.reaches_other_hosts:
            return filesystem.is_locked(record)
        return filesystem.was_touched_since(record, self.now_s() - TIMING.presumed_dead_after_s)

    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        """Replace a small file of the store in one step, so that other processes see it.

        ``shows_life``: for a receiver's record. On a local mount it is locked before it has its
        name: the kernel drops the lock when its owner dies, in any container. On a network mount
        the file's time shows life, and other hosts see the file once it is flushed.

        Returns:
            The file, to be kept open until it is replaced (then it is ``before``) or its owner
            ends, or None if it need not be.
        """
        is_remote = self.reaches_other_hosts
        file = filesystem.replace_file(
            path,
            data,
            scratch=self.root / places.SCRATCH_DIRECTORY,
            flush=is_remote,
            durable=durable,
            lock=shows_life and not is_remote,
            before=before if is_remote else None,
        )
        if not is_remote and before is not None:  # its own lock showed life until now
            before.close()
        if is_remote or shows_life:
            return file
        file.close()
        return None


def medium_of(path: Path) -> Medium:
    """Return the medium of ``path``, which need not exist yet."""
    mounted, source = _mount_of(real_path(path))
    name = os.environ.get(MOUNT_VARIABLE, "auto")
    if name not in ("local", "network", "auto"):
        raise OptionError(
            f"invalid {MOUNT_VARIABLE} {name!r:.80}: use 'local', 'network' or 'auto'"
        )
    is_local = mounted in LOCAL_FILESYSTEMS if name == "auto" else name == "local"
    return Medium(path, mounted, source, reaches_other_hosts=not is_local)


def _mount_of(path: Path) -> tuple[str, str]:
    """Return filesystem and source of the mount under a path, which need not exist yet."""
    places_above = {str(place) for place in (path, *path.parents)}
    mounted, longest = ("unknown", "unknown"), -1
    for point, mount in _mounts():
        # Later lines hide earlier ones at the same place.
        if point in places_above and len(point) >= longest:
            mounted, longest = mount, len(point)
    return mounted


def _mounts() -> Iterator[tuple[str, tuple[str, str]]]:
    """Return mount points, each with its filesystem and source, as the kernel lists them."""
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:  # not Linux
        return
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        kind, source = after.split(" ")[:2]
        yield _unescape(point), (kind, _unescape(source))


def _unescape(text: str) -> str:
    """The kernel writes spaces, tabs and backslashes in a mount point as octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
