"""Function calls before which a test kills, freezes or interrupts a process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from types import FrameType
from typing import Any


def die() -> None:
    """Kill this process with SIGKILL, so that no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Freeze this process until another process sends SIGCONT."""
    # Signal this thread: if another thread took the signal, this thread would run on meanwhile.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


CHANGING_CALLS = frozenset(
    {"flock", "fsync", "link", "mkdir", "open", "posix_fallocate", "pwrite", "replace", "unlink"}
)
"""Names of system calls that change a store's files or locks."""

MOMENTS = CHANGING_CALLS | {"setprofile", "xxh3_64_intdigest"}
"""Calls that :func:`at_call` can count: `CHANGING_CALLS`, the hash of a copied tensor, and
``sys.setprofile(None)``, which ends the counting."""

COPIES = MOMENTS | {"_foreach_copy_", "allgather", "copy_", "preadv"}
"""`MOMENTS`, and names of calls that copy tensors or exchange data between ranks."""

LOOKS = frozenset(
    {"close", "flock", "fstat", "link", "open", "pread", "preadv", "read", "replace", "unlink"}
)
"""Names of calls that a reader makes to read a store or to write the reader's record."""

STACK_DEPTH = 5
"""Number of callers that `at_call` compares to recognize a repeated call."""

OPENS_TO_READ = frozenset({"open_regular", "refresh"})
"""Names of dbuffer's functions that call ``open`` only to read."""


def at_call(
    number: int,
    action: Callable[[], None],
    names: frozenset[str] | None = MOMENTS,
    *,
    repeats: bool = True,
) -> None:
    """Call ``action`` before this thread's ``number``-th call of a function in ``names``.

    The functions in `MOMENTS` include all system calls that change a store. So a test that kills a
    process at each of them meets every state of the disk.

    Args:
        number: number of the call, counted from 1.
        action: function to call.
        names: names of the functions whose calls are counted, or None for all functions.
        repeats: whether to count each call. If False, calls for the same file from the same place
            in the code, such as the calls in a loop, count as one call.
    """
    left = number
    places: set[Hashable] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        # Don't count __exit__: Python handles no signal just before it, so no test may stop there.
        if event != "c_call" or argument.__name__ == "__exit__":
            return
        changes_nothing = names is not LOOKS and frame.f_code.co_name in OPENS_TO_READ
        if names is not None and (argument.__name__ not in names or changes_nothing):
            return
        if not repeats:
            place = _place(frame)
            if place in places:
                return
            places.add(place)
        left -= 1
        if left == 0:
            sys.setprofile(None)
            action()

    sys.setprofile(watch)


def _place(frame: FrameType) -> Hashable:
    """Return the file path that a call uses, and the lines of code that led to the call."""
    path = frame.f_locals.get("path", frame.f_locals.get("self"))
    stack: list[Hashable] = [path if isinstance(path, Path) else None]
    caller: FrameType | None = frame
    while caller is not None and len(stack) <= STACK_DEPTH:
        stack.append((caller.f_code, caller.f_lasti))
        caller = caller.f_back
    return tuple(stack)
