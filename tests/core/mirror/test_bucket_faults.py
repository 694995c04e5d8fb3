"""Faults of object storage: each request of a mirror in turn fails, or is its last."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import obstore
import pytest

import dbuffer
from dbuffer.errors import DBufferError
from dbuffer.mirror import upload
from dbuffer.mirror.mirror import Mirror
from tests.support.children import Child, is_running
from tests.support.object_server import ObjectServer
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
from tests.support.soak import IN_SOAKS_ALONE, in_soaks_alone, numbers
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.timing(request_retry_s=0.005, retry_min_s=0.02, retry_short_max_s=0.1)

POLL_S = 0.02
PART_BYTES = 5000
"""So small that a version has several parts."""
OTHER_PART_BYTES = 7000
MAX_STARTS = 25
MIN_REQUESTS = 5
"""Far fewer than a copy makes: with fewer, a test has watched something else."""

KINDS = {"full": (SMALL, False), "deltas": (SPARSE, True)}

TIMES = [1, *(pytest.param(times, marks=IN_SOAKS_ALONE) for times in (2, 20))]
"""Requests that fail in a row. A request is made six times at most, so 20 end mirrors."""


@pytest.fixture(params=["deltas", pytest.param("full", marks=IN_SOAKS_ALONE)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", PART_BYTES)


@pytest.fixture
def direct(object_server: ObjectServer, proxy: FaultyProxy) -> Callable[[], Any]:
    """A block in which clients are made that the proxy does not spoil."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            set_environment(object_server.url, patch)
            yield

    return block


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


def version_in(bucket_url: str, scratch: Path, pattern: Pattern) -> int | None:
    """The version that a mirror on a new node would serve; it must be whole."""
    copy_newest(bucket_url, scratch)
    version = pattern.version_of(received(scratch))
    assert version is not None, "the version is a mix"
    shutil.rmtree(scratch)
    return version


def objects_in(bucket_url: str) -> dict[str, bytes]:
    store = obstore.store.from_url(bucket_url)
    names = [entry["path"] for page in store.list() for entry in page]
    return {name: bytes(store.get(name).bytes()) for name in sorted(names)}


@pytest.fixture
def send(store: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Publishes a version in the store."""
    pattern, delta = KINDS[kind]
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with dbuffer.WeightSender(store, checksum=True, delta=delta) as sender:
        yield lambda version: sender.send(pattern.weights(version), version=version)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_of_an_upload_fails(
    send, store, local, proxy, bucket_url, direct, kind, fault, times
):
    """The bucket has the version that was published, whole."""
    pattern, _ = KINDS[kind]
    send(1)
    with direct():
        copy_newest(store, bucket_url)
    for nth in numbers(first=1 + list(FAULTS).index(fault) % 3):
        send(nth + 1)
        before = len(proxy.requests)
        proxy.inject(FAULTS[fault], nth=nth, times=times)
        copy_at_last(store, bucket_url)
        proxy.heal()
        with direct():
            assert version_in(bucket_url, local, pattern) == nth + 1
        if not any(request.is_faulty for request in proxy.requests[before:]):
            break
    assert nth > MIN_REQUESTS


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_of_a_download_fails(
    send, store, local, proxy, bucket_url, direct, kind, fault, times
):
    """The local store has the version that was published, whole."""
    pattern, _ = KINDS[kind]
    for nth in numbers(first=1 + list(FAULTS).index(fault) % 3):
        send(nth)
        with direct():
            copy_newest(store, bucket_url)
        before = len(proxy.requests)
        proxy.inject(FAULTS[fault], nth=nth, times=times)
        copy_at_last(bucket_url, local)
        proxy.heal()
        assert pattern.version_of(received(local)) == nth
        if not any(request.is_faulty for request in proxy.requests[before:]):
            break
    assert nth > MIN_REQUESTS


@in_soaks_alone
@pytest.mark.timing(request_s=0.4)
def test_each_request_of_an_upload_is_done_after_the_mirror_gave_it_up(
    send, store, local, proxy, bucket_url, direct, kind
):
    """Some come after the pointer was put: readers find the newest version still."""
    pattern, _ = KINDS[kind]
    send(1)
    with direct():
        copy_newest(store, bucket_url)
    for nth in itertools.count(1):
        send(nth + 1)
        before = len(proxy.requests)
        hold = Hold()
        proxy.inject(hold, nth=nth)
        copy_at_last(store, bucket_url)
        with direct():
            assert version_in(bucket_url, local, pattern) == nth + 1
        hold.release()
        spoiled = [request for request in proxy.requests[before:] if request.is_faulty]
        until("it is done", lambda spoiled=spoiled: all(each.status for each in spoiled))
        with direct():
            assert version_in(bucket_url, local, pattern) == nth + 1
        proxy.heal()
        if not spoiled:
            break
    assert nth > MIN_REQUESTS


def mirror_until_killed(
    connection: Connection, remote: object, local: object, part_bytes: int = PART_BYTES
) -> None:
    upload.PART_BYTES = part_bytes
    with quick(remote, local).start() as mirror:
        mirror.wait_until_current(TIMEOUT_S)
    connection.send("current")


def kill_at(proxy: FaultyProxy, nth: int, last: Fault, remote: object, local: object) -> bool:
    """Mirror in a child that is killed as its nth request comes; whether it came."""
    with Child(mirror_until_killed, remote, local) as child:

        def kill(exchange: Exchange) -> None:
            child.signal(signal.SIGKILL)
            last(exchange)

        proxy.inject(kill, nth=nth)
        was_killed = child.wait() == -signal.SIGKILL
    proxy.heal()
    return was_killed


@pytest.mark.parametrize("last", [drop, lose_answer])
def test_an_upload_is_killed_at_each_request(
    send, store, local, proxy, bucket_url, direct, kind, last
):
    """A reader finds the version before or the new one, whole; the next mirror goes on.

    Every second request outside of soaks: the bucket does without one request in one way, and has
    just got its answer in the other, so that both together are killed in between any two.
    """
    pattern, _ = KINDS[kind]
    send(1)
    with direct():
        copy_newest(store, bucket_url)
    for version, nth in enumerate(numbers(every=2), 2):
        send(version)
        was_killed = kill_at(proxy, nth, last, store, bucket_url)
        with direct():
            assert version_in(bucket_url, local, pattern) in (version - 1, version)
            copy_newest(store, bucket_url)
            assert version_in(bucket_url, local, pattern) == version
        if not was_killed:
            break
    assert nth > MIN_REQUESTS


def test_a_download_is_killed_at_each_request(send, store, local, proxy, bucket_url, direct, kind):
    """The local store has the version before or the new one, whole; the next mirror goes on."""
    pattern, _ = KINDS[kind]
    send(1)
    with direct():
        copy_newest(store, bucket_url)
        copy_newest(bucket_url, local)
    for version, nth in enumerate(numbers(), 2):
        send(version)
        with direct():
            copy_newest(store, bucket_url)
        was_killed = kill_at(proxy, nth, drop, bucket_url, local)
        assert pattern.version_of(received(local)) in (version - 1, version)
        with direct():
            copy_newest(bucket_url, local)
        assert pattern.version_of(received(local)) == version
        if not was_killed:
            break
    assert nth > MIN_REQUESTS


@pytest.mark.parametrize(
    "part_bytes", [OTHER_PART_BYTES, pytest.param(PART_BYTES, marks=IN_SOAKS_ALONE)]
)
def test_a_writer_is_overtaken_at_each_request(
    send, store, local, proxy, bucket_url, direct, kind, part_bytes
):
    """A request of the first is held while a second mirror publishes: the bucket is the second's.

    What the first still puts does not change what readers find, even if it cuts parts as another
    release of dbuffer does.
    """
    pattern, _ = KINDS[kind]
    send(1)
    with direct():
        copy_newest(store, bucket_url)
    for nth in itertools.count(1):
        send(nth + 1)
        hold = Hold()
        before = len(proxy.requests)
        proxy.inject(hold, nth=nth)
        with Child(mirror_until_killed, store, bucket_url, part_bytes) as first:

            def has_come(child: Child = first, before: int = before) -> bool:
                return any(request.is_faulty for request in proxy.requests[before:])

            until("it is held, or done", lambda: has_come() or not is_running(first.pid), TIMEOUT_S)
            was_held = has_come()
            with direct():
                copy_newest(store, bucket_url)
                assert version_in(bucket_url, local, pattern) == nth + 1
            hold.release()
            first.wait()
        proxy.heal()
        with direct():
            assert version_in(bucket_url, local, pattern) == nth + 1
        if not was_held:
            break
    assert nth > MIN_REQUESTS


@pytest.mark.timing(bucket_grace_s=0.0)
def test_objects_of_others_stay(send, store, local, bucket_url, kind):
    """Beside the prefix, and below it: what old versions have left is deleted, and nothing else."""
    parent, _, name = bucket_url.rpartition("/")
    objects = obstore.store.from_url(parent)
    names = [f"{name}-2/CURRENT", f"{name}.txt", f"{name}/notes", f"{name}/receivers/notes"]
    for each in names:
        objects.put(each, each.encode())
    pattern, _ = KINDS[kind]
    num_versions = 20
    with quick(store, bucket_url) as mirror:
        for version in range(1, num_versions + 1):
            send(version)
            if version == 1:
                mirror.start()
            mirror.wait_until_current(TIMEOUT_S)
            [history] = {path.split("/")[1] for path in objects_in(parent) if "/weights/" in path}
            if version == 1:
                names.append(f"{name}/{history}/notes")
                objects.put(names[-1], names[-1].encode())
    assert version_in(bucket_url, local, pattern) == num_versions
    there = objects_in(parent)
    assert {each: there.get(each) for each in names} == {each: each.encode() for each in names}
    assert len([path for path in there if "/versions/" in path]) < num_versions
