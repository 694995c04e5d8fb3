"""A store for the length of one job, in shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a directory of our own there


class JobDirectory:
    """A new directory that nobody else may enter, removed with this, or at this process's exit.

    A process that is killed leaves it behind.
    """

    def __init__(self) -> None:
        base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        self.path = Path(tempfile.mkdtemp(prefix="dbuffer-lightrft-", dir=base))
        self.remove = weakref.finalize(self, _remove, self.path, os.getpid())
        """Remove it now."""


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked off it
        shutil.rmtree(path, ignore_errors=True)
