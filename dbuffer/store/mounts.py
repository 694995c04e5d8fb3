"""`mount_of`: the mount under a path, as the kernel describes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dbuffer.store.filesystem import real_path


class Mount(NamedTuple):
    """A mount, as the kernel describes it."""

    filesystem: str
    """Type of the filesystem: ``tmpfs``, ``ext4``, ``nfs4`` ..."""
    source: str
    """A device, ``server:/export``."""


def mount_of(path: Path) -> Mount:
    """Return the mount under ``path``, which need not exist yet."""
    path = real_path(path)
    places = {str(place) for place in (path, *path.parents)}
    mounted, longest = Mount("unknown", "unknown"), -1
    for point, mount in _mounts():
        # Later lines hide earlier ones at the same place.
        if point in places and len(point) >= longest:
            mounted, longest = mount, len(point)
    return mounted


def _mounts() -> Iterator[tuple[str, Mount]]:
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:  # not Linux
        return
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        kind, source = after.split(" ")[:2]
        yield _unescape(point), Mount(kind, _unescape(source))


def _unescape(text: str) -> str:
    """The kernel writes spaces, tabs and backslashes in a mount point as octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
