"""What soaks alone do, and how much."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from tests.support.moments import MOMENTS, at_call
from tests.support.waiting import TIMEOUT_S

Record = Callable[[str, int], None]

"""pytest's ``record_property``: a figure that is added up over all tests, and told at the end."""


def is_soak() -> bool:
    """Whether to try everything, and not what every change has to pass (``dev.py soak``)."""
    return "DBUFFER_SOAK" in os.environ


IN_SOAKS_ALONE = [
    pytest.mark.soak,
    pytest.mark.skipif(not is_soak(), reason="in a soak alone"),
]

"""Of what takes long, and shows what others show in another way."""


def in_soaks_alone(test: Callable[..., None]) -> Callable[..., None]:
    """Mark one test so."""
    for mark in IN_SOAKS_ALONE:
        test = mark(test)
    return test


def at_moment(number: int, action: Callable[[], None]) -> None:
    """Call ``action`` before the ``number``-th kind of system call, or in a soak of any C call."""
    at_call(number, action, None if is_soak() else MOMENTS, repeats=is_soak())


def numbers(first: int = 1, every: int = 3) -> Iterator[int]:
    """Of the calls to stop before: each in a soak, and else every third, say, which is quicker."""
    return itertools.count(first, 1 if is_soak() else every)


def patience_s() -> float:
    """For how long to wait for a child that goes through all of them."""
    return 3600.0 if is_soak() else 2 * TIMEOUT_S
