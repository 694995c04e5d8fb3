"""Calls in a process before which tests kill, freeze or interrupt the process."""

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
    """Freeze this process until another one sends it SIGCONT."""
    # To this thread: if another thread had to take the signal, this one would run on meanwhile.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


CHANGING_CALLS = frozenset(
    {"flock", "fsync", "link", "mkdir", "open", "posix_fallocate", "pwrite", "replace", "unlink"}
)
"""System calls that change a store's files or locks."""

MOMENTS = CHANGING_CALLS | {"setprofile", "xxh3_64_intdigest"}
"""`CHANGING_CALLS`, and calls between them: hashing of a copied tensor, and
``sys.setprofile(None)``, which ends the watch."""

COPIES = MOMENTS | {"_foreach_copy_", "allgather", "copy_", "preadv"}
"""`MOMENTS`, copies of tensors, and exchanges between ranks."""

LOOKS = frozenset(
    {"close", "flock", "fstat", "link", "open", "pread", "preadv", "read", "replace", "unlink"}
)
"""Calls that a reader makes to read a store, or to record the version that it reads."""

STACK_DEPTH = 5
"""Number of callers that distinguish the files and steps of a publish."""

OPENS_TO_READ = frozenset({"open_regular", "refresh"})
"""Functions of dbuffer whose ``open`` calls change nothing."""


def at_call(
    number: int,
    action: Callable[[], None],
    names: frozenset[str] | None = MOMENTS,
    *,
    repeats: bool = True,
) -> None:
    """Call ``action`` before this thread's ``number``-th call of a function in ``names``.

    The functions are at such a low level that every state of the disk comes before one of the
    calls. So the names do not depend on how dbuffer's code is divided into functions.

    Args:
        number: number of the call, from 1.
        action: function to call.
        names: names of the functions to count, or None for all functions.
        repeats: whether repeated calls from the same place in the code, for the same file, count.
            If False, for instance, only the first hash of a tensor in a loop counts.
    """
    left = number
    places: set[Hashable] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        # Between the last line of a `with` block and its __exit__, Python handles no signal.
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
    """Return the path that a frame's function works on, and the innermost callers."""
    path = frame.f_locals.get("path", frame.f_locals.get("self"))
    stack: list[Hashable] = [path if isinstance(path, Path) else None]
    caller: FrameType | None = frame
    while caller is not None and len(stack) <= STACK_DEPTH:
        stack.append((caller.f_code, caller.f_lasti))
        caller = caller.f_back
    return tuple(stack)
