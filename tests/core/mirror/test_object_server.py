"""The S3 server of the tests and the proxy before it: conditions, ranges, and each fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PreconditionError,
)

from tests.support import ROOT
from tests.support.children import Child, is_running
from tests.support.object_store import (
    FAULTS,
    Exchange,
    FaultyProxy,
    Hold,
    Request,
    delay,
    drop,
    slow,
    status,
)
from tests.support.waiting import until

BODY = bytes(range(256)) * 4096
WITHOUT_RETRIES = {"max_retries": 0}


@pytest.fixture
def store(bucket_url: str):
    """The server, without a proxy."""
    return obstore.store.from_url(bucket_url)


def spoiled(bucket_url: str, **options: object):
    """The server behind the proxy, which the environment names by now."""
    return obstore.store.from_url(bucket_url, **options)


def test_an_object_is_created_once(store):
    store.put("pointer", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        store.put("pointer", b"2", mode="create")
    assert bytes(store.get("pointer").bytes()) == b"1"


def test_an_object_is_replaced_only_by_who_knows_it(store):
    first = store.put("pointer", b"1")["e_tag"]
    second = store.put("pointer", b"2", mode={"e_tag": first})["e_tag"]
    with pytest.raises(PreconditionError):
        store.put("pointer", b"3", mode={"e_tag": first})
    assert bytes(store.get("pointer").bytes()) == b"2"
    with pytest.raises(NotModifiedError):
        store.get("pointer", options={"if_none_match": second})
    assert bytes(store.get("pointer", options={"if_none_match": first}).bytes()) == b"2"


def test_ranges_and_names(store):
    store.put("some/weights", BODY)
    store.put("other/weights", b"")
    assert bytes(store.get_range("some/weights", start=1000, length=300)) == BODY[1000:1300]
    both = store.get_ranges("some/weights", starts=[0, 500_000], lengths=[10, 20])
    assert [bytes(each) for each in both] == [BODY[:10], BODY[500_000:500_020]]
    assert {entry["path"] for entry in store.list().collect()} == {"some/weights", "other/weights"}
    store.delete("some/weights")
    with pytest.raises(FileNotFoundError):
        store.get("some/weights")


def test_parts_become_one_object(store):
    body = os.urandom(5 << 20) * 3
    store.put("weights", body, use_multipart=True, chunk_size=5 << 20, max_concurrency=3)
    assert bytes(store.get("weights").bytes()) == body


def put_in_child(connection: Connection, url: str) -> None:
    obstore.store.from_url(url).put("of-child", b"1")


def test_a_child_finds_the_server_in_its_environment(store, bucket_url):
    with Child(put_in_child, bucket_url) as child:
        assert child.wait() == 0
    assert bytes(store.get("of-child").bytes()) == b"1"


def test_tests_do_not_see_the_objects_of_others(store, bucket_url):
    assert not store.list().collect()
    assert bucket_url.startswith("s3://weights/")


def test_the_proxy_records_requests(store, proxy, bucket_url):
    store.put("weights", BODY)
    through = spoiled(bucket_url)
    through.get_range("weights", start=0, length=500)
    through.put("weights", b"123", mode={"e_tag": through.head("weights")["e_tag"]})
    path = "/" + bucket_url.removeprefix("s3://") + "/weights"
    assert proxy.requests == [
        Request("GET", path, "", status=206, sent_bytes=500),
        Request("HEAD", path, "", status=200),
        Request("PUT", path, "", status=200, received_bytes=3),
    ]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_of_one_request(store, proxy, bucket_url, name):
    """The client does not retry. What it is told, and what the server has."""
    through = spoiled(bucket_url, retry_config=WITHOUT_RETRIES)
    store.put("old", BODY)
    is_put_done = name in ("lose_answer", "truncate_answer", "corrupt_answer", "repeat")
    proxy.inject(FAULTS[name], nth=2)

    assert bytes(through.get("old").bytes()) == BODY
    if name in ("corrupt_answer", "repeat"):
        read = bytes(through.get("old").bytes())
        assert (read == BODY) == (name == "repeat")
        assert len(read) == len(BODY)
    else:
        with pytest.raises(BaseError):
            through.get("old").bytes()
    assert bytes(through.get("old").bytes()) == BODY
    assert [request.is_faulty for request in proxy.requests] == [False, True, False]

    proxy.inject(FAULTS[name])
    if name == "repeat":
        with pytest.raises(AlreadyExistsError):
            through.put("new", BODY, mode="create")
    elif name == "corrupt_answer":
        through.put("new", BODY, mode="create")
    else:
        with pytest.raises(BaseError):
            through.put("new", BODY, mode="create")
    assert ("new" in {entry["path"] for entry in store.list().collect()}) == is_put_done
    if is_put_done:
        assert bytes(store.get("new").bytes()) == BODY


@pytest.mark.parametrize("name", ["drop", "503"])
def test_a_client_that_retries_succeeds(proxy, bucket_url, name):
    through = spoiled(bucket_url)
    through.put("weights", BODY)
    proxy.inject(FAULTS[name], times=2)
    assert bytes(through.get("weights").bytes()) == BODY
    assert [request.is_faulty for request in proxy.requests] == [False, True, True, False]


def test_a_request_that_a_client_gave_up_is_done_later(store, proxy, bucket_url):
    options = {"allow_http": True, "timeout": "200ms"}
    through = spoiled(bucket_url, client_options=options, retry_config=WITHOUT_RETRIES)
    proxy.inject(delay(0.5))
    with pytest.raises(BaseError):
        through.put("late", b"1")
    assert not store.list().collect()
    until("the server has it", lambda: store.list().collect())


def test_a_slow_line(store, proxy, bucket_url):
    store.put("weights", BODY)
    options = {"allow_http": True, "timeout": "300ms"}
    through = spoiled(bucket_url, client_options=options, retry_config=WITHOUT_RETRIES)
    proxy.inject(slow(bytes_per_s=len(BODY)))
    with pytest.raises(BaseError):
        through.get("weights").bytes()


def test_a_test_acts_while_a_request_is_held(store, proxy, bucket_url):
    store.put("pointer", b"1")
    through = spoiled(bucket_url)
    read = []
    hold = Hold()
    proxy.inject(hold, when=lambda request: request.method == "GET")
    reader = threading.Thread(target=lambda: read.append(bytes(through.get("pointer").bytes())))
    reader.start()
    hold.wait()
    store.put("pointer", b"2")
    hold.release()
    reader.join()
    assert read == [b"2"]


def put_until_killed(connection: Connection, url: str) -> None:
    obstore.store.from_url(url).put("weights", BODY)


def test_a_fault_may_be_of_the_test(store, proxy, bucket_url):
    """A client that is killed as its request comes to the server."""
    with Child(put_until_killed, bucket_url) as child:

        def kill(exchange: Exchange) -> None:
            child.signal(signal.SIGKILL)
            drop(exchange)

        proxy.inject(kill)
        assert child.wait() == -signal.SIGKILL
    assert not store.list().collect()


def test_a_fault_lasts_until_the_proxy_is_healed(proxy, bucket_url):
    through = spoiled(bucket_url, retry_config=WITHOUT_RETRIES)
    proxy.inject(status(503), times=10)
    for _ in range(2):
        with pytest.raises(BaseError):
            through.put("weights", b"")
    proxy.heal()
    through.put("weights", b"")


def test_a_failure_of_the_proxy_is_not_silent(object_server):
    def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup, match="the proxy failed"):
        with FaultyProxy(object_server) as proxy:
            proxy.inject(fail)
            through = obstore.store.from_url(
                "s3://weights",
                endpoint=proxy.url,
                client_options={"allow_http": True},
                retry_config=WITHOUT_RETRIES,
                skip_signature=True,
            )
            with pytest.raises(BaseError):
                through.get("any")


START = """
import os, sys
from tests.support.object_server import ObjectServer
server = ObjectServer()
print(server.directory, *server.pids(), flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_its_run():
    """The run is killed: no process and no file of the server stays."""
    with subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        directory, *pids = run.stdout.readline().split()
        assert len(pids) == 2
        assert all(is_running(int(pid)) for pid in pids)
        run.kill()
        until("both have ended", lambda: not any(is_running(int(pid)) for pid in pids))
    assert not Path(directory).exists()
