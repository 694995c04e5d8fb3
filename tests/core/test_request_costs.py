"""Costs of requests to a bucket, as the benchmark of buckets computes them."""

from __future__ import annotations

import pytest

from benchmarks.request_costs import Ends
from dbuffer.format.objects import PART_BYTES

ANCHOR = Ends({"put": 12, "list": 1, "get": 2}, {"get": 11, "put": 2}, num_parts=10)


def test_more_bytes_are_more_parts():
    larger = ANCHOR.of_size(99.5 * PART_BYTES)
    assert larger.trainer == {"put": 102, "list": 1, "get": 2}
    assert larger.reader == {"get": 101, "put": 2}


@pytest.mark.parametrize(
    ("readers", "pages"), [(1, 1), (1000, 1), (1001, 2)], ids=["one", "a page", "more"]
)
def test_each_mirror_that_reads_is_paid_for(readers, pages):
    """Its own requests, and those with which the trainer's mirror reads its records."""
    puts_and_lists = 12 + pages + 2 * readers
    gets = (11 + 2) * readers
    dollars = (0.005 * puts_and_lists + 0.0004 * gets) / 1000
    assert ANCHOR.dollars(readers) == pytest.approx(dollars)
