"""`default_store`: default path of a store, if the user of an integration gives no path."""

from __future__ import annotations

import os
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - stores check that one user owns them


def default_store(system: str, port: object) -> Path:
    """Return the default path of a store, in this machine's shared memory.

    The path contains ``system`` (the name of the integration), the user's id, the SLURM job's id in
    a SLURM job, and ``port``, which distinguishes this job from the user's other jobs. A restarted
    job gets the same path. The store outlives the job.
    """
    job = os.environ.get("SLURM_JOB_ID")
    parts = ["dbuffer", system, str(os.getuid()), *([f"job{job}"] if job else []), str(port)]
    return _SHARED_MEMORY / "-".join(parts)
