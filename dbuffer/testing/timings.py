"""Temporary replacement of dbuffer's timings, in this process and its child processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from dbuffer.runtime.timing import TIMING, Timing


def current_timings() -> dict[str, float]:
    """Return dbuffer's intervals and time-outs, in seconds, by name."""
    return dataclasses.asdict(TIMING)


def set_timings(values: Mapping[str, float]) -> None:
    """Replace timings of dbuffer, given by name. An unknown name raises an AttributeError."""
    for name, value in values.items():
        setattr(TIMING, name, value)


@contextlib.contextmanager
def timings(**values: float) -> Iterator[Timing]:
    """Replace timings of dbuffer, given by name. Restore all timings when the block ends."""
    before = current_timings()
    try:
        set_timings(values)
        yield TIMING
    finally:
        set_timings(before)
