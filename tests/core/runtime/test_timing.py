"""Timings that a test replaces: in its process and in its children, and for itself only."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

from dbuffer.runtime.timing import TIMING, Timing
from tests.support.children import Child

pytestmark = pytest.mark.timing(settle_s=7.0, last_word_s=8.0)


def send_timing(connection: Connection) -> None:
    connection.send(TIMING)


@pytest.mark.timing(settle_s=0.25)
def test_the_mark_nearest_to_a_test_counts_in_its_children_too(timing):
    timing.look_s = 9.0
    expected = Timing(settle_s=0.25, last_word_s=8.0, look_s=9.0)
    with Child(send_timing) as child:
        assert child.receive() == expected == TIMING


def test_the_next_test_has_its_own():
    assert Timing(settle_s=7.0, last_word_s=8.0) == TIMING


def test_a_name_that_is_no_timing_is_an_error(timing):
    with pytest.raises(AttributeError):
        timing.setle_s = 1.0
    with pytest.raises(AttributeError):
        timing.presumed_dead_after_s = 1.0  # it follows from another one
