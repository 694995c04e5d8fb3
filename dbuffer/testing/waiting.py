"""`until`: waits for a condition, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 120.0
"""Default maximum wait, so that a hanging test fails with a message."""


def until(
    what: str, is_so: Callable[[], Any], timeout_s: float = TIMEOUT_S, every_s: float = 0.005
) -> Any:
    """Wait until the function ``is_so`` returns a true value, and return the value.

    ``what`` describes the condition in the message of a timeout.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := is_so()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)
    return value
