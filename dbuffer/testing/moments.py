"""System calls of a process before which tests kill, freeze or interrupt it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from types import FrameType
from typing import Any


def die() -> None:
    """End this process by SIGKILL: no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Freeze this process until another one sends it SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


CHANGING_CALLS = frozenset(
    {"flock", "fsync", "link", "mkdir", "open", "posix_fallocate", "pwrite", "replace", "unlink"}
)
"""System calls that change a store on its disk, or its locks."""

MOMENTS = CHANGING_CALLS | {"setprofile", "xxh3_64_intdigest"}
"""`CHANGING_CALLS`, and moments between them: a tensor is in its place and hashed, or the watch is
ended by ``sys.setprofile(None)``."""

COPIES = MOMENTS | {"_foreach_copy_", "allgather", "copy_", "preadv"}
"""`MOMENTS`, each copy of tensors, and each exchange between ranks."""

LOOKS = frozenset(
    {"close", "flock", "fstat", "link", "open", "pread", "preadv", "read", "replace", "unlink"}
)
"""Calls with which a reader looks at a store, or records a version that it reads."""

STACK_DEPTH = 5
"""Callers that tell a file and a step of a publish from others."""

OPENS_TO_READ = frozenset({"open_regular", "refresh"})
"""Functions of the product whose ``open`` changes nothing."""


def at_call(
    number: int,
    action: Callable[[], None],
    names: frozenset[str] | None = MOMENTS,
    *,
    repeats: bool = True,
) -> None:
    """Call ``action`` in this thread before its ``number``-th call of one of these (None: of any).

    No function that publishes is named for this: each state of the disk lies before one of the
    calls. Without ``repeats``, a call counts once for each place in the code and file: the eighth
    tensor hashed in a loop is no other kind of moment than the first.
    """
    left = number
    places: set[Hashable] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        # Python handles no signal between the last line of a `with` block and the lock's release.
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
    """Return the innermost callers of a call, and the path that its function works on."""
    path = frame.f_locals.get("path", frame.f_locals.get("self"))
    stack: list[Hashable] = [path if isinstance(path, Path) else None]
    caller: FrameType | None = frame
    while caller is not None and len(stack) <= STACK_DEPTH:
        stack.append((caller.f_code, caller.f_lasti))
        caller = caller.f_back
    return tuple(stack)
