"""Threads that wait for a test, and the error of a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dbuffer.testing.waiting import TIMEOUT_S


@contextlib.contextmanager
def meanwhile(
    action: Callable[..., object], *arguments: Any, after_s: float = 0.1
) -> Iterator[None]:
    """Call a function in another thread, a moment after the block begins."""
    later = threading.Timer(after_s, action, arguments)
    later.start()
    try:
        yield
    finally:
        later.join()


class Gate:
    """Stop for a thread of the code under test, until the test lets it go on."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def hold_up(self, timeout_s: float = TIMEOUT_S) -> None:
        """Stop the calling thread here."""
        self.is_there.set()
        assert self.may_go_on.wait(timeout_s)


def error_of(function: Callable[[], object]) -> str | None:
    """Return the text of the error that a function raises, or None."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
