"""Requests of idle mirrors, and their price, as `docs/object-storage.md` has them."""

from __future__ import annotations

import math
import random
import re
import time
from collections import Counter

import pytest

import dbuffer
from benchmarks.request_costs import Ends
from dbuffer.mirror.bucket import NUM_REQUESTS, Bucket, num_puts, part_bytes, range_starts
from dbuffer.runtime.timing import TIMING
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support import ROOT
from tests.support.patterns import SMALL

DAY_S, MINUTE_S = 86_400, 60
NUM_NODES = 1000
PAGE = (ROOT / "docs" / "object-storage.md").read_text(encoding="utf-8")


@pytest.mark.timing(bucket_list_s=60.0, bucket_records_s=0.05, bucket_heartbeat_s=1.0)
def test_requests_of_a_heartbeat(remote, local, bucket_url):
    """The trainer's mirror gets the version, and lists twice; the node's puts its record."""
    with (
        dbuffer.WeightSender(remote, checksum=True) as sender,
        dbuffer.Mirror(remote, bucket_url) as up,
        dbuffer.Mirror(bucket_url, local, poll_interval_s=60.0) as down,
    ):
        sender.send(SMALL.weights(1))
        for mirror in (up, down):
            mirror.start().wait_until_current(TIMEOUT_S)
        time.sleep(1.0)
        started, before = time.monotonic(), [Counter(each.requests) for each in (up, down)]
        time.sleep(4.0)
        at_trainer, at_node = (
            Counter(each.requests) - then for each, then in zip((up, down), before, strict=True)
        )
        beats = (time.monotonic() - started) / TIMING.bucket_heartbeat_s
    assert at_trainer.keys() == {"get", "list"}
    assert 1 <= at_trainer["get"] <= beats + 1
    assert at_trainer["list"] == pytest.approx(2 * at_trainer["get"], abs=1)
    assert at_node.keys() <= {"get", "put"}
    assert 1 <= at_node["put"] <= beats + 1
    assert at_node["get"] <= 2 * (beats + 1), "it looks as a heartbeat ends, and as one begins"


def test_prices_of_idle_mirrors():
    rows = re.findall(
        r"^\| ([\d.]+)(?: \(default\))? \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \|$", PAGE, re.M
    )
    beats = DAY_S / MINUTE_S
    assert TIMING.bucket_heartbeat_s == MINUTE_S
    trainer = {"get": beats + beats / NUM_NODES, "list": DAY_S / TIMING.bucket_list_s + 2 * beats}
    assert [float(interval_s) for interval_s, *_ in rows] == [0.5, 5, 30]
    for interval_s, delay_s, gets, dollars in rows:
        polls = DAY_S / float(interval_s) + beats
        ends = Ends(trainer, {"get": polls, "put": beats})
        assert float(delay_s) == float(interval_s) / 2
        assert gets == f"{polls:,.0f}"
        assert math.isclose(float(dollars), ends.dollars(NUM_NODES), abs_tol=0.01)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("mebibytes", "num_parts", "num_ranges"),
    [(1, 1, 1), (5, 1, 1), (6, 2, 2), (40, 8, 8), (100, 8, 8), (256, 16, 8), (1024, 64, 32)],
)
def test_requests_of_a_file(mebibytes, num_parts, num_ranges):
    """As many as a mirror has at a time, unless each would move less than S3's smallest part."""
    num_bytes = mebibytes * MIB
    assert num_puts(num_bytes) == (num_parts + 2 if num_parts > 1 else 1)
    assert len(range_starts(num_bytes)) == num_ranges
    assert part_bytes(num_bytes) >= 5 * MIB
    is_shared = 40 <= mebibytes <= 128
    assert (num_parts == NUM_REQUESTS) == is_shared


def test_a_file_moves_in_requests_of_its_size(proxy, bucket_url):
    """No request moves less than S3's smallest part, which the server accepts."""
    data, copy = random.Random(1).randbytes(12 * MIB), bytearray(12 * MIB)

    def place(offset: int, piece: memoryview) -> None:
        copy[offset : offset + len(piece)] = piece

    with Bucket(bucket_url) as bucket:
        bucket.download(bucket.upload("one", memoryview(data)), place)
        assert copy == data
        assert bucket.requests == {"put": 3 + 2, "get": 3}
        assert len(proxy.requests) == 3 + 2 + 3


def test_puts_of_an_upload_that_begins_again():
    assert f"(for 140 GB, {num_puts(140 * 10**9):,} puts, or $0.04" in PAGE
    assert round(Ends({"put": num_puts(140 * 10**9)}, {}).dollars(0), 2) == 0.04
