"""Temporary replacement of dbuffer's timings, in this process and its children."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from dbuffer.runtime.timing import TIMING, Timing


def current_timings() -> dict[str, float]:
    """Return all timings by name."""
    return dataclasses.asdict(TIMING)


def set_timings(values: Mapping[str, float]) -> None:
    """Replace the named timings. An unknown name raises an AttributeError."""
    for name, value in values.items():
        setattr(TIMING, name, value)


@contextlib.contextmanager
def timings(**values: float) -> Iterator[Timing]:
    """Replace the named timings, and restore all timings at the end of the block."""
    before = current_timings()
    try:
        set_timings(values)
        yield TIMING
    finally:
        set_timings(before)
