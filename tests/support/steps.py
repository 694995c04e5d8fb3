"""Moments of a process by the names of functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A moment in the life of a sender, as Python's profiler sees it."""

    event: str
    """``call`` and ``return`` of a Python function, ``c_call`` and ``c_return`` of others."""
    function: str
    """Qualified name, without the module."""
    file: str = ""
    """Name of the file that the function works on: its local variable ``path``."""
    nth: int = 1


def at_step(step: Step, action: Callable[[], None]) -> None:
    """Call ``action`` in this thread when it comes to ``step``."""
    left = step.nth

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event != step.event:
            return
        name = argument.__name__ if event.startswith("c_") else frame.f_code.co_qualname
        if name != step.function:
            return
        if step.file and getattr(frame.f_locals.get("path"), "name", None) != step.file:
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            action()

    sys.setprofile(watch)
