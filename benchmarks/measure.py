"""Timing, medians and percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

__all__ = ["median", "percentile", "timed"]


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that ``action`` takes."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
