"""`Medium`: properties of a store's filesystem that decide how the store is written and read.

No other module checks the type of a mount. ``docs/design.md`` ("Network mounts") says how network
mounts differ from local mounts.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dbuffer.errors import OptionError
from dbuffer.format import places
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.filesystem import MOUNT_VARIABLE, Descriptor, real_path

REWRITABLE_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "ramfs", "tmpfs"})
"""Filesystems that can write an allocated page again without new space.

A copy-on-write filesystem (btrfs, zfs, xfs with reflinks) needs new space to write an old page, and
a write to a mapped page without space raises SIGBUS. An overlay filesystem copies a file of a lower
layer when the file is first opened for writing, and older mappings keep showing the old file. On
all filesystems that are not listed here, each version gets a new file.
"""

LOCAL_FILESYSTEMS = REWRITABLE_FILESYSTEMS | frozenset(
    {"bcachefs", "btrfs", "ecryptfs", "exfat", "f2fs", "hugetlbfs", "jfs", "nilfs2", "ntfs3"}
    | {"overlay", "reiserfs", "rootfs", "ubifs", "vfat", "xfs", "zfs"}
)
"""Filesystems that only this host writes to. On any other filesystem, dbuffer reads and writes as
on a network mount, which is slower, but correct on one host, too."""
_CLOCK_S = 60.0


@dataclass(eq=False)
class Medium:
    """Properties of the filesystem mount that holds a store's directory."""

    root: Path
    filesystem: str
    """Kernel's name of the filesystem type, such as ``tmpfs``, ``ext4`` or ``nfs4``."""
    source: str
    """Mounted device, or ``server:/export``."""
    reaches_other_hosts: bool
    """Whether processes on other hosts may use the store, as on a network mount."""
    _ahead_s: float = field(default_factory=lambda: time.time() - time.monotonic(), init=False)
    _measured_at: float | None = field(default=None, init=False)

    @property
    def maps_files(self) -> bool:
        """Whether writers and readers map weights files into memory.

        If they map the files, each file holds a whole version. Otherwise they use pread and pwrite,
        and a version may consist of an earlier version's file (its anchor) and deltas.
        """
        return not self.reaches_other_hosts

    @property
    def is_in_memory(self) -> bool:
        return self.filesystem in ("tmpfs", "ramfs")

    @property
    def can_rewrite_in_place(self) -> bool:
        """Whether a writer may overwrite a weights file with a later version.

        If not, each version gets a new file.
        """
        return not self.reaches_other_hosts and self.filesystem in REWRITABLE_FILESYSTEMS

    def now_s(self) -> float:
        """Return seconds since the epoch, by the clock that sets file times on the mount."""
        if not self.reaches_other_hosts:
            return time.time()
        since_boot_s = time.monotonic()
        if self._measured_at is None or since_boot_s - self._measured_at > _CLOCK_S:
            self._measured_at = since_boot_s
            # Without write access the clock cannot be measured: this host's clock is used.
            with contextlib.suppress(OSError):
                time_s = filesystem.time_at(self.root / places.SCRATCH_DIRECTORY)
                self._ahead_s = time_s - since_boot_s
        return since_boot_s + self._ahead_s

    def shows_life(self, record: Path) -> bool:
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
        """Replace a small file of the store atomically, and show the new file to other hosts.

        ``shows_life``: the file is a receiver's record, whose lock shows that the receiver lives.
        On a local mount the record is locked before it gets its name. The kernel drops the lock
        when the receiver's process dies, in any container.

        Returns:
            The open file, or None if the caller need not keep a file open. The caller keeps the
            file open until the process ends, or until the next call gets the file as ``before``.
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
        if not is_remote and before is not None:  # until now the old record's lock showed life
            before.close()
        if is_remote or shows_life:
            return file
        file.close()
        return None


def medium_of(path: Path) -> Medium:
    """Return the kind of mount that ``path`` is on. The path need not exist yet."""
    mounted, source = _mount_of(real_path(path))
    name = os.environ.get(MOUNT_VARIABLE, "auto")
    if name not in ("local", "network", "auto"):
        raise OptionError(
            f"invalid {MOUNT_VARIABLE} {name!r:.80}: use 'local', 'network' or 'auto'"
        )
    is_local = mounted in LOCAL_FILESYSTEMS if name == "auto" else name == "local"
    return Medium(path, mounted, source, reaches_other_hosts=not is_local)


def _mount_of(path: Path) -> tuple[str, str]:
    """Return filesystem type and device of the mount that a path is on; both may be "unknown"."""
    places_above = {str(place) for place in (path, *path.parents)}
    mounted, longest = ("unknown", "unknown"), -1
    for point, mount in _mounts():
        # Of two mounts at one path, use the later one: it hides the earlier one.
        if point in places_above and len(point) >= longest:
            mounted, longest = mount, len(point)
    return mounted


def _mounts() -> Iterator[tuple[str, tuple[str, str]]]:
    table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        kind, source = after.split(" ")[:2]
        yield _unescape(point), (kind, _unescape(source))


def _unescape(text: str) -> str:
    """Decode the octal escapes that the kernel writes for spaces, tabs and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
