"""Faults of object storage: each request of a mirror in turn fails, or is its last."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import dbuffer
from dbuffer.errors import DBufferError
from dbuffer.mirror import bucket
from dbuffer.mirror.mirror import Mirror
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child, is_running
from tests.support.object_store import (
    FAULTS,
    Exchange,
    Fault,
    FaultyProxy,
    Hold,
    drop,
    lose_answer,
    set_environment,
)
from tests.support.patterns import SMALL, SPARSE, Pattern, received
from tests.support.soak import IN_SOAKS_ALONE, numbers

pytestmark = pytest.mark.timing(request_retry_s=0.005, retry_min_s=0.02)

POLL_S = 0.02
RANGE_BYTES = 5000
"""So small that a version is got in several ranges."""
MAX_STARTS = 25
MIN_REQUESTS = 5
"""Far fewer than a copy makes: with fewer, a test has watched something else."""

KINDS = {"full": (SMALL, False), "deltas": (SPARSE, True)}

TIMES = [1, *(pytest.param(times, marks=IN_SOAKS_ALONE) for times in (2, 20))]
"""Requests that fail in a row. A request is made six times at most, so 20 end mirrors."""


def quick(remote: object, local: object) -> Mirror:
    return Mirror(remote, local, poll_interval_s=POLL_S, num_threads=2)  # type: ignore[arg-type]


def copy_newest(remote: object, local: object) -> None:
    with quick(remote, local).start() as mirror:
        mirror.wait_until_current(TIMEOUT_S)


def copy_at_last(remote: object, local: object) -> None:
    """Copy the newest version; a fault may end a start, with an error of dbuffer."""
    for _ in range(MAX_STARTS - 1):
        with contextlib.suppress(DBufferError):
            copy_newest(remote, local)
            return
    copy_newest(remote, local)


@dataclasses.dataclass
class Route:
    """Way of versions: a store, the bucket that it is copied into, and a copy of the bucket.

    Mirrors of a test go through a proxy that spoils their requests; mirrors of methods do not.
    """

    sender: dbuffer.WeightSender
    pattern: Pattern
    bucket: str
    local: Path
    proxy: FaultyProxy

    @property
    def store(self) -> Path:
        return self.sender.store

    def publish(self, version: int) -> None:
        self.sender.send(self.pattern.weights(version), version=version)

    def upload(self) -> None:
        self._copy_directly(self.store, self.bucket)

    def download(self) -> None:
        self._copy_directly(self.bucket, self.local)

    def _copy_directly(self, remote: object, local: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            set_environment(self.proxy.server.url, patch)
            copy_newest(remote, local)

    def local_version(self) -> int | None:
        """Return the version in the local store, or None if that is not whole."""
        return self.pattern.version_of(received(self.local))

    def bucket_version(self) -> int | None:
        """Return the version that a mirror on a new node would serve, or None likewise."""
        self.download()
        version = self.local_version()
        shutil.rmtree(self.local)
        return version

    def requests_to_spoil(self, first: int = 1, every: int = 4) -> Iterator[tuple[int, int]]:
        """Publish version after version; yield each, and the number of the request to spoil.

        End after the first version that is copied in fewer requests.
        """
        for version, nth in enumerate(numbers(first, every), 2):
            self.publish(version)
            before = len(self.proxy.requests)
            yield version, nth
            self.proxy.heal()
            if not any(request.is_faulty for request in self.proxy.requests[before:]):
                break
        assert nth > MIN_REQUESTS


@pytest.fixture(params=["deltas", pytest.param("full", marks=IN_SOAKS_ALONE)])
def route(request, store, local, proxy, bucket_url, monkeypatch) -> Iterator[Route]:
    """A route of which store and bucket hold version 1."""
    monkeypatch.setattr(bucket, "RANGE_BYTES", RANGE_BYTES)
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    pattern, delta = KINDS[request.param]
    with dbuffer.WeightSender(store, checksum=True, delta=delta) as sender:
        route = Route(sender, pattern, bucket_url, local, proxy)
        route.publish(1)
        route.upload()
        yield route


all_faults = pytest.mark.parametrize(
    ("fault", "first"), [(name, 1 + index % 4) for index, name in enumerate(FAULTS)]
)


@pytest.mark.parametrize("times", TIMES)
@all_faults
def test_each_request_of_an_upload_fails(route, fault, first, times):
    """The bucket has the version that was published, whole."""
    for version, nth in route.requests_to_spoil(first):
        route.proxy.inject(FAULTS[fault], nth=nth, times=times)
        copy_at_last(route.store, route.bucket)
        assert route.bucket_version() == version


@pytest.mark.parametrize("times", TIMES)
@all_faults
def test_each_request_of_a_download_fails(route, fault, first, times):
    """The local store has the version that was published, whole."""
    for version, nth in route.requests_to_spoil(first):
        route.upload()
        route.proxy.inject(FAULTS[fault], nth=nth, times=times)
        copy_at_last(route.bucket, route.local)
        assert route.local_version() == version


def mirror_until_killed(connection: Connection, remote: object, local: object) -> None:
    bucket.RANGE_BYTES = RANGE_BYTES
    copy_newest(remote, local)


def kill_at(route: Route, nth: int, last: Fault, remote: object, local: object) -> None:
    """Mirror in a child that is killed as its nth request comes, if there are so many."""
    has_started = threading.Event()

    def kill(exchange: Exchange) -> None:
        assert has_started.wait(TIMEOUT_S)
        child.signal(signal.SIGKILL)
        last(exchange)

    route.proxy.inject(kill, nth=nth)
    with Child(mirror_until_killed, remote, local) as child:
        has_started.set()
        assert child.wait() in (-signal.SIGKILL, 0)


@pytest.mark.parametrize("last", [drop, lose_answer])
def test_an_upload_is_killed_at_each_request(route, last):
    """A reader finds the version before or the new one, whole; the next mirror goes on.

    The bucket does without the request in one way, and has just got its answer in the other.
    """
    for version, nth in route.requests_to_spoil(first=1 if last is drop else 2):
        kill_at(route, nth, last, route.store, route.bucket)
        assert route.bucket_version() in (version - 1, version)
        route.upload()
        assert route.bucket_version() == version


def test_a_download_is_killed_at_each_request(route):
    """The local store has the version before or the new one, whole; the next mirror goes on."""
    route.download()
    for version, nth in route.requests_to_spoil():
        route.upload()
        kill_at(route, nth, drop, route.bucket, route.local)
        assert route.local_version() in (version - 1, version)
        route.download()
        assert route.local_version() == version


def test_a_writer_is_overtaken_at_each_request(route):
    """A request of the first is held while a second mirror publishes: the bucket is the second's.

    Later puts of the first do not change the version that readers find.
    """
    for version, nth in route.requests_to_spoil():
        hold = Hold()
        route.proxy.inject(hold, nth=nth)
        with Child(mirror_until_killed, route.store, route.bucket) as first:
            until(
                "it is held, or done",
                lambda hold=hold, first=first: hold.is_there.is_set() or not is_running(first.pid),
                TIMEOUT_S,
            )
            route.upload()
            assert route.bucket_version() == version
            hold.may_go_on.set()
            first.wait()
        assert route.bucket_version() == version
