"""Directories that hold something other than a store: a checkpoint, other stores, TorchRL weights.

A sender must not write a store into any of them: other files would be mixed with a store's.
"""

from __future__ import annotations

from pathlib import Path

from dbuffer.errors import OptionError
from dbuffer.format import places
from dbuffer.store.filesystem import os_errors

_PARTS = {
    *places.BUFFERS,
    places.POINTER_FILE,
    places.WRITER_FILE,
    places.WRITER_LOCK_FILE,
    places.MIRROR_LOCK_FILE,
    places.RECEIVERS_DIRECTORY,
    places.DELTAS_DIRECTORY,
    places.KEPT_DIRECTORY,
    places.SCRATCH_DIRECTORY,
}
"""Names in a store's directory."""

_MARKS = (
    places.POINTER_FILE,
    places.WRITER_FILE,
    places.WRITER_LOCK_FILE,
    *(f"{buffer}/{places.MANIFEST_FILE}" for buffer in places.BUFFERS),
)
"""Files that make a directory a store, whatever else is in it."""

_OF_MOUNTS = "lost+found"
"""Directory at the root of an ext4 filesystem, which may be a store's own mount."""

_NUM_NAMED = 3


def other_contents(root: Path) -> str | None:
    """Name the contents of a directory, or return None if it is a store's, empty or not there.

    Remains of a store count as a store. Hidden names do not count: network mounts and backups
    keep theirs in any directory.
    """
    with os_errors("list", root):
        if any((root / mark).exists() for mark in _MARKS) or not root.is_dir():
            return None
        names = sorted(path.name for path in root.iterdir() if path.name[0] != ".")
    others = [name for name in names if name not in (*_PARTS, _OF_MOUNTS)]
    if not others:
        return None
    num_more = len(others) - _NUM_NAMED
    return ", ".join(others[:_NUM_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")


def is_store(root: Path) -> bool:
    """Whether a directory is a store, or the remains of one."""
    return other_contents(root) is None and any((root / name).exists() for name in _PARTS)


def require_own_directory(root: Path) -> None:
    """Refuse to write a store into a directory that holds something else.

    Raises:
        OptionError: the directory holds other files.
        StoreAccessError: the directory cannot be listed.
    """
    contents = other_contents(root)
    if contents is not None:
        raise OptionError(
            f"{root} holds {contents}, and no store: name a directory of the store's own, "
            f"such as {root / 'policy'}"
        )
