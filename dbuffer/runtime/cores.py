"""Cores for dbuffer's own threads, where an engine binds the thread that starts them to one core.

On a CPU, vLLM binds each worker to its cores by variables of OpenMP, and the worker's main thread
to the first of them. All threads that a worker starts would stay on that core: copies by several
threads would share it, and staging would take it from the engine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os

_cores: set[int] = set()
"""Cores for new threads; if empty, a thread has the cores of the thread that starts it."""


def use_cores_of_parent() -> None:
    """Let dbuffer's threads in this process run where the process that spawned it may run."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and this process is about to
            _cores.update(os.sched_getaffinity(parent.pid))


def num_cores() -> int:
    """Return the number of cores that dbuffer's threads may run on: all of a host's, or fewer."""
    return len(_cores or os.sched_getaffinity(0))


def leave_core() -> None:
    """Let the calling thread, which must be dbuffer's own, run on all of these cores."""
    if _cores:
        with contextlib.suppress(OSError):  # none of them is this process's any more
            os.sched_setaffinity(0, _cores)
