"""Chooses the cores that dbuffer's threads run on.

On a CPU, vLLM binds each worker's main thread to one core. Threads that a main thread starts would
stay on its core.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os

_cores: set[int] = set()
"""Cores for new threads. If empty, a thread runs on the cores of the thread that starts it."""


def use_cores_of_parent() -> None:
    """Let the threads that dbuffer starts from now on run on all cores of the parent process."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # the parent has ended
            _cores.update(os.sched_getaffinity(parent.pid))


def num_cores() -> int:
    """Return the number of cores that dbuffer's threads may run on."""
    return len(_cores or os.sched_getaffinity(0))


def leave_core() -> None:
    """Let this thread run on the parent process's cores, if `use_cores_of_parent` was called."""
    if _cores:
        with contextlib.suppress(OSError):  # the process lost all these cores
            os.sched_setaffinity(0, _cores)
