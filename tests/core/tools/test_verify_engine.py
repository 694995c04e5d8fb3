"""`dbuffer verify --engine`, with a server that answers as vLLM's middleware does.

`tests/programs/vllm_server.py` asks a real one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.store.buffer import DoubleBuffer
from tests.support.answers import answering, ready, weights_of
from tests.support.children import call
from tests.support.patterns import publish


@pytest.fixture
def two_versions(store: Path) -> Lineage:
    """Lineage of the newest of two versions."""
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2)
    pointer = DoubleBuffer(store).newest_pointer()
    assert pointer is not None
    return pointer.lineage


def replica(lineage: Lineage, number: int = 2, *, is_attested: bool = True) -> dict[str, Any]:
    return weights_of(VersionId(lineage.id.run, number), is_attested=is_attested)


def test_a_server_that_serves_the_newest_version_verified(capsys, store, two_versions):
    one = replica(two_versions)
    with answering(ready(one, one)) as url:
        code, out, _ = call(capsys, "verify", store, "--engine", url, "--json")
        assert call(capsys, "verify", store, "--engine", url)[0] == 0
    answer = json.loads(out)
    assert (code, answer["is_verified"], answer["version"]) == (0, True, 2)
    assert answer["run"] == two_versions.id.run
    assert [it["problem"] for it in answer["replicas"]] == [None, None]


@pytest.mark.parametrize(
    ("number", "is_attested", "options", "problem"),
    [
        (2, False, (), "has not compared"),
        (1, True, (), "does not serve version 2"),
        (2, True, ("--version", 1), "does not serve version 1"),
    ],
)
def test_a_server_that_is_not_there_yet(
    capsys, store, two_versions, number, is_attested, options, problem
):
    """Exit code 3. One replica of two is enough."""
    late = replica(two_versions, number, is_attested=is_attested)
    with answering(ready(replica(two_versions), late)) as url:
        code, out, _ = call(capsys, "verify", store, "--engine", url, *options)
    assert code == 3
    assert problem in out
    assert " does not serve verified weights of version " in out


def test_a_server_that_stays_on_a_version(capsys, store, two_versions):
    for version in (1, VersionId(two_versions.id.run, 1)):
        with answering(ready(replica(two_versions, 1))) as url:
            assert call(capsys, "verify", store, "--engine", url, "--version", version)[0] == 0


@pytest.mark.parametrize(
    "label",
    [
        {"version": "unknown"},
        {"version": "default"},
        {"version": "2", "run": None, "attested": True},
        {"version": "2", "run": "0" * 16, "attested": True},
        {"version": "3", "attested": True},
        {},
    ],
)
def test_weights_that_are_not_the_stores(capsys, store, two_versions, label):
    with answering(ready({"run": two_versions.id.run, "version": "3", **label})) as url:
        code, out, _ = call(capsys, "verify", store, "--engine", url, "--json")
    assert code == 1
    assert json.loads(out)["replicas"][0]["is_of_store"] is False


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (ready(reason="the engine has ended"), 503, "has no weights: the engine has ended"),
        (b'{"detail": "Not Found"}', 404, "of a vLLM server with FollowStore"),
        (b"", 200, "does not say which weights it serves (GET /ready: 200)"),
        (b"[]", 200, "does not say which weights it serves"),
        (b'{"replicas": ["2"], "reason": null}', 200, "does not say which weights it serves"),
    ],
)
def test_what_is_no_answer_is_an_error(capsys, store, two_versions, answer, status, said):
    with answering(answer, status) as url:
        code, out, err = call(capsys, "verify", store, "--engine", url)
    assert (code, out) == (1, "")
    assert said in err
    code, out, err = call(capsys, "verify", store, "--engine", url)  # which has ended
    assert (code, out) == (1, "")
    assert "does not answer: ConnectError" in err


def test_what_cannot_be_asked_is_refused(capsys, store, two_versions):
    assert call(capsys, "verify", store, "--engine", "localhost:8000")[0] == 2
    assert call(capsys, "verify", store, "--version", 1)[0] == 2
    with answering(ready(replica(two_versions))) as url:
        assert call(capsys, "verify", store, "--engine", url, "--version", 9)[0] == 1


@pytest.mark.parametrize("number", [2, 3])
def test_a_version_that_is_published_while_the_server_is_asked(capsys, store, two_versions, number):
    """The server serves the newest version of that moment, or already the next."""

    def answer() -> bytes:
        with dbuffer.WeightSender(store) as sender:
            publish(sender, 3)
        pointer = DoubleBuffer(store).newest_pointer()
        assert pointer is not None
        version = pointer.lineage.at(number)
        assert version is not None
        return ready({"version": str(number), "run": version.run, "attested": True})

    with answering(answer) as url:
        assert call(capsys, "verify", store, "--engine", url)[0] == 0
