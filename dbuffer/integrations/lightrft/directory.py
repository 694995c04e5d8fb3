"""A store for the length of one job, in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from dbuffer import filesystem
from dbuffer.filesystem import Descriptor

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a directory of our own there
_PREFIX = "dbuffer-lightrft-"
_LOOKED_AT_S = 5.0
"""How long a new directory may be held by someone who looks whether it was left over."""


class JobDirectory:
    """A new directory that nobody else may enter, removed with this, or at this process's exit.

    A process that is killed leaves it behind, and the memory that is in it: so its lock tells
    whether its owner lives, and the next of the same user on this machine removes it.
    """

    def __init__(self) -> None:
        base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        _remove_left_over(base)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _open(path)
        filesystem.lock_within(lock.number, _LOOKED_AT_S)
        self.store = path / "store"
        """Where a store may be; made by whoever writes it."""
        self.remove = weakref.finalize(self, _remove, path, lock, os.getpid())
        """Remove it now."""


def _open(path: Path) -> Descriptor:
    return Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def _remove(path: Path, lock: Descriptor, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked off it
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


def _remove_left_over(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or someone else's
            lock = _open(path)
            try:
                # One without a store may be so new that it is not locked yet.
                if (path / "store").exists() and filesystem.try_lock(lock.number, exclusive=True):
                    shutil.rmtree(path)
            finally:
                lock.close()
