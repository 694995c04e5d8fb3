"""Requests and bytes of mirrors through a bucket, as `docs/object-storage.md` has them."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

import dbuffer
from dbuffer.mirror import bucket as buckets
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.download import newest_version
from dbuffer.mirror.mirror import Mirror
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.patterns import Sparse
from dbuffer.testing.waiting import until
from tests.support.object_store import FaultyProxy, Request

LONG = Sparse(num_tensors=9, numel=1 << 14)
RANGE_BYTES = 1 << 18
NUM_RANGES = 5  # LONG has 1.2 MB
POLL_S = 0.1
RECORD_BYTES = 4000
"""Bound of the size of a version's record, of a mirror's records, and of a footer."""
IDLE_S = 3.0

pytestmark = pytest.mark.timing(bucket_list_s=0.3)


class Way:
    """A sender, and the mirrors at the two ends of a bucket, through a proxy that counts."""

    def __init__(
        self, remote: Path, url: str, local: Path, proxy: FaultyProxy, *, delta: bool
    ) -> None:
        self._local = DoubleBuffer(local)
        self._proxy = proxy
        with ExitStack() as stack:
            sender = dbuffer.WeightSender(remote, checksum=True, delta=delta)
            self._sender = stack.enter_context(sender)
            for source, target in ((remote, url), (url, local)):
                stack.enter_context(Mirror(source, target, poll_interval_s=POLL_S)).start()
            self._opened = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def publish(self, count: int) -> list[Request]:
        """Carry a version over; return its requests."""
        before = len(self._proxy.requests)
        version = self._sender.send(LONG.weights(count)).id

        def has_arrived() -> bool:
            pointer = self._local.newest_pointer() if self._local.exists() else None
            kinds = count_kinds(self._proxy.requests[before:])
            return pointer is not None and pointer.id == version and kinds["put of records"] > 0

        until("it is there, and told", has_arrived)
        return self._proxy.requests[before:]


def count_kinds(requests: list[Request]) -> Counter[str]:
    return Counter(map(kind_of, requests))


def kind_of(request: Request) -> str:
    if "list-type" in request.query:
        return "list of records"
    if request.path.endswith("/CURRENT"):
        is_poll = request.method == "GET" and request.sent_bytes == 0
        return "poll" if is_poll else f"{request.method.lower()} of the version"
    what = "records" if "/receivers/" in request.path else "a file"
    return f"{request.method.lower()} of {what}"


IDLE = {"poll", "list of records", "get of records"}
"""Kinds of which intervals decide the number."""


def costs_of(requests: list[Request]) -> tuple[dict[str, int], int]:
    """Return the numbers of requests that a version causes, by kind, and their bytes."""
    caused = [request for request in requests if kind_of(request) not in IDLE]
    return dict(count_kinds(caused)), sum(each.received_bytes + each.sent_bytes for each in caused)


RECORDS_SOON = pytest.mark.timing(bucket_heartbeat_s=2.0)
"""A mirror puts a record of its own progress at this interval."""


@RECORDS_SOON
def test_an_anchor(remote, local, proxy, bucket_url, monkeypatch):
    monkeypatch.setattr(buckets, "RANGE_BYTES", RANGE_BYTES)
    with Way(remote, bucket_url, local, proxy, delta=False) as way:
        way.publish(1)
        kinds, num_bytes = costs_of(way.publish(2))
    assert kinds == {
        "put of a file": 1,
        "put of the version": 1,
        "get of the version": 1,
        "get of a file": NUM_RANGES + 1,  # and its checksums
        "put of records": 1,
    }
    with Bucket(bucket_url) as bucket:
        file_bytes = newest_version(bucket).manifest.file_bytes
    assert 2 * file_bytes < num_bytes < 2 * file_bytes + 4 * RECORD_BYTES


@RECORDS_SOON
def test_a_delta(remote, local, proxy, bucket_url, monkeypatch):
    monkeypatch.setattr(buckets, "RANGE_BYTES", RANGE_BYTES)
    with Way(remote, bucket_url, local, proxy, delta=True) as way:
        for count in (1, 2):  # into both buffers of the far store
            way.publish(count)
        kinds, num_bytes = costs_of(way.publish(3))
    assert kinds == {
        "put of a file": 1,
        "put of the version": 1,
        "get of the version": 1,
        "get of a file": 1,
        "put of records": 1,
    }
    with Bucket(bucket_url) as bucket:
        delta_bytes = newest_version(bucket).deltas[-1].num_bytes
    assert 2 * delta_bytes < num_bytes < 2 * delta_bytes + 3 * RECORD_BYTES


@pytest.mark.timing(bucket_records_s=0.1)
def test_idle_mirrors(remote, local, proxy, bucket_url):
    """A poll an interval at one end, a list at the other; each of a few hundred bytes at most."""
    with Way(remote, bucket_url, local, proxy, delta=False) as way:
        way.publish(1)
        time.sleep(1.0)  # until the records have been relayed
        before = len(proxy.requests)
        time.sleep(IDLE_S)
        requests = proxy.requests[before:]
    kinds = count_kinds(requests)
    assert kinds.keys() <= {"poll", "list of records"}
    assert kinds["poll"] <= IDLE_S / (0.75 * POLL_S) + 1
    assert kinds["list of records"] <= IDLE_S / 0.3 + 1
    assert min(kinds.values()) >= 3
    assert max(each.sent_bytes for each in requests) < RECORD_BYTES
