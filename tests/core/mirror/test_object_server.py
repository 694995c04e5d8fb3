"""The S3 server of the tests and the proxy before it: conditions, and each fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
)

from tests.support import ROOT
from tests.support.children import is_running
from tests.support.object_store import FAULTS, Exchange, FaultyProxy
from tests.support.waiting import until

BODY = bytes(range(256)) * 4096
WITHOUT_RETRIES = {"max_retries": 0}


@pytest.fixture
def store(bucket_url: str):
    """The server, without a proxy."""
    return obstore.store.from_url(bucket_url)


def spoiled(bucket_url: str, **options: object):
    """The server behind the proxy, which the environment names by now."""
    return obstore.store.from_url(bucket_url, retry_config=WITHOUT_RETRIES, **options)


def names_in(store: obstore.store.ObjectStore) -> set[str]:
    return {entry["path"] for entry in store.list().collect()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_of_one_request(store, proxy, bucket_url, name):
    """The client does not retry. What it is told, and what the server has."""
    through = spoiled(bucket_url)
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
    if name == "corrupt_answer":
        through.put("new", BODY, mode="create")
    else:
        with pytest.raises(AlreadyExistsError if name == "repeat" else BaseError):
            through.put("new", BODY, mode="create")
    assert ("new" in names_in(store)) == is_put_done
    if is_put_done:
        assert bytes(store.get("new").bytes()) == BODY


def test_a_failure_of_the_proxy_is_not_silent(object_server):
    def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup, match="the proxy failed"):
        with FaultyProxy(object_server) as proxy:
            proxy.inject(fail)
            options = {"client_options": {"allow_http": True}, "skip_signature": True}
            through = spoiled("s3://weights", endpoint=proxy.url, **options)
            with pytest.raises(BaseError):
                through.get("any")


START = """
import os, sys
from tests.support.object_server import ObjectServer
server = ObjectServer()
print(server.directory, *server.pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("object_server")  # skips the test without the program
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
