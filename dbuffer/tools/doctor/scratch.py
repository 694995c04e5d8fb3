"""Directories for probes: for their owner only, and removed afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dbuffer.runtime.timing import TIMING
from dbuffer.store.filesystem import os_errors

logger = logging.getLogger(__name__)

PREFIX = ".dbuffer-doctor-"
"""Beginning of all names that the doctor makes in a user's directory."""


@contextlib.contextmanager
def scratch(directory: Path, kind: str = "probe") -> Iterator[Path]:
    """Make a directory in ``directory``, for a ``with`` block that removes it."""
    with os_errors("make a directory", directory):
        place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=directory))
    try:
        yield place
    finally:
        remove_tree(place)


def remove_stale(directory: Path) -> None:
    """Remove directories that killed doctors left behind."""
    with scratch(directory) as place:
        # Both times are the filesystem's: clocks of hosts may disagree.
        now = place.stat().st_mtime
        for path in directory.glob(f"{PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and now - status.st_mtime > TIMING.doctor_stale_s:
                    remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory; retry while a network mount keeps the names of open files."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.1)
    logger.warning("%s could not be removed; remove it by hand", path)
