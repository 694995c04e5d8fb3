"""Publishes that end at a moment of theirs: the situations, and what a reader finds after each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dbuffer
from tests.support.patterns import SMALL, SPARSE, Pattern

DELTA_SITUATIONS = ("a delta", "an anchor after deltas")
"""On a local mount, the two are the same."""

SITUATIONS = (
    "in place",
    "first ever",
    "new layout",
    "a delta",
)

DURABLE_SITUATIONS = ("in place, durable", "first ever, durable")
"""For soaks: outside of them `test_power_cut.py` looks at the disk before each flush."""

MIN_MOMENTS = 8
"""Far fewer than a publish has: with fewer, a test has watched something else."""


def last_before(situation: str) -> int | None:
    """Return the version before the one that a process dies of."""
    return None if situation.startswith("first") else 3


def has_deltas(situation: str) -> bool:
    return situation in DELTA_SITUATIONS


def max_chain(situation: str) -> int:
    """Return the limit with which versions 2 and 3 are deltas, and 4 is one or an anchor."""
    return 2 if situation.startswith("an anchor") else 3


def pattern_of(situation: str) -> Pattern:
    """Return the pattern of the versions before the last."""
    return SPARSE if has_deltas(situation) else SMALL


def make_sender(store: Path, situation: str) -> dbuffer.WeightSender:
    return dbuffer.WeightSender(
        store,
        durable=situation.endswith("durable"),
        checksum=True,
        delta=has_deltas(situation),
        num_threads=1,
    )


class Flip:
    """The moment from which on the new version is visible: it comes once, and never goes."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.new = (last or 0) + 1
        self.has_come = False
        self.moments = 0

    def check(self, found: int | None) -> int | None:
        self.moments += 1
        if not self.has_come:
            self.has_come = found == self.new
        expected = self.new if self.has_come else self.last
        assert found == expected, f"moment {self.moments}: {found} is there, and not {expected}"
        return found

    def check_all(self) -> None:
        assert self.has_come, "no moment was after the pointer"
        assert self.moments > MIN_MOMENTS


@contextlib.contextmanager
def noting(number: int) -> Iterator[None]:
    """Add the moment to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at moment {number}")
        raise
