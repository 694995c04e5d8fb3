"""`default_store`: the directory of a store that the user of an integration did not name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a store belongs to one user, which is checked


def default_store(system: str, port: object) -> Path:
    """Return a directory in this machine's shared memory, the same one after a restart.

    The store outlives the job; remove it when the run is over.

    Args:
        system: the name of the integration.
        port: the port that tells the job from the user's other ones on this machine. The SLURM
            job, if there is one, is in the name too.
    """
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    job = os.environ.get("SLURM_JOB_ID")
    parts = ["dbuffer", system, str(os.getuid()), *([f"job{job}"] if job else []), str(port)]
    return base / "-".join(parts)
