"""Base classes of objects that a ``with`` block closes, or that belong to one process."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any, NoReturn, Self

from dbuffer.errors import ClosedError
from dbuffer.runtime.timing import TIMING


class Closing:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ProcessBound:
    """Base class of objects that belong to one process, and cannot be pickled for another."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a fork of the process that made the object."""
        return self._pid != os.getpid()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ClosedError(
            f"a {type(self).__name__} belongs to the process that made it: do not pass it to "
            "another process, but make a new one there"
        )


def join(thread: threading.Thread, timeout_s: float = math.inf) -> None:
    """Wait until a thread ends or ``timeout_s`` is over, and handle signals meanwhile."""
    end = time.monotonic() + timeout_s
    # Wait in short steps: if a signal comes just before a step, Python handles it after the step.
    while thread.is_alive() and time.monotonic() < end:
        thread.join(TIMING.stop_check_s)
