"""Waiting for a state, with a time-out; and the error of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 120.0

"""No child is waited for longer: a test that hangs must fail, and say where."""


def until(
    what: str, is_so: Callable[[], Any], timeout_s: float = 10.0, every_s: float = 0.005
) -> Any:
    """Wait until it is so; what it is then."""
    deadline = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)
    return found


def error_of(function: Callable[[], object]) -> str | None:
    """What it raises, if anything."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
