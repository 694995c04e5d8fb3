"""Waiting for a state, with a time-out; and the error of a call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TIMEOUT_S = 120.0
"""Nothing is waited for longer: a test that hangs must fail, and say where."""


def until(
    what: str, is_so: Callable[[], Any], timeout_s: float = TIMEOUT_S, every_s: float = 0.005
) -> Any:
    """Wait until it is so; what it is then."""
    deadline = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)
    return found


@contextlib.contextmanager
def meanwhile(
    action: Callable[..., object], *arguments: Any, after_s: float = 0.1
) -> Iterator[None]:
    """Do something in another thread, a moment later than what the block begins with."""
    later = threading.Timer(after_s, action, arguments)
    later.start()
    try:
        yield
    finally:
        later.join()


class Gate:
    """Holds up a thread that comes to it, until it may go on."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def hold_up(self, timeout_s: float = TIMEOUT_S) -> None:
        """Stop here; called by the thread."""
        self.is_there.set()
        assert self.may_go_on.wait(timeout_s)


def error_of(function: Callable[[], object]) -> str | None:
    """What it raises, if anything."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
