"""What soaks alone do, and how much."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dbuffer.testing.moments import MOMENTS, at_call
from dbuffer.testing.waiting import TIMEOUT_S

Record = Callable[[str, int], None]
"""pytest's ``record_property``: a figure that is added up over all tests, and told at the end."""


def is_soak() -> bool:
    """Whether to try everything, and not what every change has to pass (``dev.py soak``)."""
    return "DBUFFER_SOAK" in os.environ


ONLY_IN_SOAKS = "in a soak alone"
IN_SOAKS_ALONE = pytest.mark.skipif(not is_soak(), reason=ONLY_IN_SOAKS)
"""Of what takes long, and shows what others show in another way."""


def at_moment(number: int, action: Callable[[], None]) -> None:
    """Call ``action`` before the ``number``-th kind of system call, or in a soak of any C call."""
    at_call(number, action, None if is_soak() else MOMENTS, repeats=is_soak())


def in_turn(
    names: tuple[str, ...], first: Sequence[Any], second: Sequence[Any], **options: Any
) -> pytest.MarkDecorator:
    """Parametrize a test with one of the second for each of the first, in turn.

    In soaks each of the first has each of the second. One of the first is a value, or a
    ``pytest.param`` of several values, or with marks.
    """
    assert len(first) >= len(second)
    pairs = itertools.product(first, second) if is_soak() else zip(first, itertools.cycle(second))
    cases = []
    for one, other in pairs:
        case = one if isinstance(one, type(pytest.param())) else pytest.param(one)
        cases.append(pytest.param(*case.values, other, marks=case.marks))
    options = {"ids": lambda value: getattr(value, "__name__", None), **options}
    return pytest.mark.parametrize(names, cases, **options)


def numbers(first: int = 1, every: int = 3) -> Iterator[int]:
    """Of the calls to stop before: each in a soak, and else every third, say, which is quicker."""
    return itertools.count(first, 1 if is_soak() else every)


def patience_s() -> float:
    """For how long to wait for a child that goes through all of them."""
    return 3600.0 if is_soak() else 2 * TIMEOUT_S
