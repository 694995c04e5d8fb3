"""Requests of idle mirrors, and their price, as `docs/object-storage.md` has them."""

from __future__ import annotations

import math
import re
import time
from collections import Counter

import pytest

import dbuffer
from benchmarks.request_costs import Ends
from dbuffer.mirror.bucket import num_puts
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


def test_puts_of_an_upload_that_begins_again():
    assert f"(for 140 GB, {num_puts(140 * 10**9):,} puts, or $0.04" in PAGE
    assert round(Ends({"put": num_puts(140 * 10**9)}, {}).dollars(0), 2) == 0.04
