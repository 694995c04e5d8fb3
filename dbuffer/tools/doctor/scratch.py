"""The directories that probes are made in: for their owner only, and removed afterwards."""

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

from dbuffer.store.filesystem import os_errors

logger = logging.getLogger(__name__)

PREFIX = ".dbuffer-doctor-"
"""How all that is made in a user's directory begins."""

STALE_S = 24 * 3600.0
"""What is older was left by a doctor that was killed: none that lives waits that long."""


@contextlib.contextmanager
def scratch(directory: Path, kind: str = "probe") -> Iterator[Path]:
    """A new directory in ``directory``, removed at the end of the block."""
    with os_errors("make a directory", directory):
        place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=directory))
    try:
        yield place
    finally:
        remove_tree(place)


def remove_stale(directory: Path) -> None:
    """Remove what doctors that were killed have left behind."""
    with scratch(directory) as place:
        # Both times are the filesystem's: hosts may disagree on what time it is.
        now = place.stat().st_mtime
        for path in directory.glob(f"{PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
                if is_ours and now - found.st_mtime > STALE_S:
                    remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory; again, where a network mount keeps a file's name while it is open."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.1)
    logger.warning("%s could not be removed; remove it by hand", path)
