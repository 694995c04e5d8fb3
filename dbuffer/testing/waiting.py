"""Waiting for a state, with a time-out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 120.0
"""Longest wait: a test that hangs must fail, and say where."""


def until(
    what: str, is_so: Callable[[], Any], timeout_s: float = TIMEOUT_S, every_s: float = 0.005
) -> Any:
    """Wait until ``is_so`` returns a true value; return that value."""
    deadline = time.monotonic() + timeout_s
    while not (value := is_so()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)
    return value
