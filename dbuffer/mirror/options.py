"""`MirrorOptions`, and the id of a mirror."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from dbuffer.format.layout import digest
from dbuffer.format.manifest import host_in_id
from dbuffer.io.copier import Copier
from dbuffer.publish.draft import Progress
from dbuffer.store.liveness import Process

SWAPPED = "did you swap source and target? If not, name another target"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """Checked options of a mirror, as both of its ends get them."""

    poll_interval_s: float
    reader_timeout_s: float
    allow_shared_store: bool
    copier: Copier
    """Reads and hashes."""
    progress: Progress | None


def mirror_id(target: str) -> str:
    """Return the id of a target's mirrors: one for all that are started for it on one machine.

    A directory is told by its device and inode: containers may have different ones at one path.
    """
    where = f"{Process.here().machine} {target}"
    with contextlib.suppress(OSError):
        directory = Path(target).stat()
        where = f"{Process.here().machine} {directory.st_dev} {directory.st_ino}"
    return f"mirror-{host_in_id()}-{digest(os.fsencode(where))}"
