"""Data-parallel replicas of a real vLLM: dense ones switch each by itself, others as one engine.

`vllm_replicas.py` drives in two roles an `AsyncLLM` of two replicas; in a third, a server of two
replicas and two API servers; in a fourth, two such servers that have four replicas between them.
The dense model reveals its version: an answer's tokens say from which weights each of them came.
Replicas of a model with experts make each step together; their tokens are compared with those of
fresh engines of one replica.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.programs.vllm_replicas import ENGINE, HYBRID_NAMES, NAMES, REPLICAS
from tests.support.engines.tiny_models import token_of, wrong_tokens
from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    environment,
    observe,
)
from tests.support.engines.vllm_servers import ANSWER_TOKENS
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, IN_SOAKS_ALONE, ANSWERS_TELL_VERSIONS]
MIN_VERSIONS_SEEN = 5


@pytest.fixture(scope="module")
def dense(directory: Path) -> dict[str, Any]:
    return run("dense", directory)


@pytest.fixture(scope="module")
def lockstep(directory: Path) -> dict[str, Any]:
    return run("lockstep", directory)


@pytest.fixture(scope="module")
def served(directory: Path) -> dict[str, Any]:
    return run("served", directory)


@pytest.fixture(scope="module")
def hybrid(directory: Path) -> dict[str, Any]:
    return run("hybrid", directory)


def run(role: str, directory: Path) -> dict[str, Any]:
    # Functions are sent to workers; the fresh engines are in the program itself.
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    place = directory / role
    place.mkdir()
    seen: dict[str, Any] = observe("vllm_replicas.py", place, role, env=env)
    return seen


def versions_of(response: dict[str, Any]) -> list[int]:
    return [int(version) for version, _, _ in response["spans"]]


# Dense replicas.


def test_each_dense_replica_answers_from_the_version_that_it_reports(dense):
    for replica in REPLICAS:
        responses = [one for one in dense["responses"] if one["replica"] == replica]
        assert len({v for one in responses for v in versions_of(one)}) >= MIN_VERSIONS_SEEN
        for response in responses:
            assert wrong_tokens(response) == []
            assert versions_of(response) == sorted(versions_of(response))
            assert min(versions_of(response)) >= response["floor"]


def test_a_version_is_applied_when_all_replicas_have_it(dense):
    assert dense["reached"] == dense["last"]
    for response in dense["after"]:
        assert versions_of(response) == [dense["last"]]
        assert wrong_tokens(response) == []


def test_each_replica_acknowledges_by_itself(dense):
    assert dense["records"] == dict.fromkeys(NAMES, dense["last"])


def test_replica_that_cannot_switch_serves_on_and_says_so(dense):
    seen = dense["one fails"]
    assert seen["applied"] == seen["before"]
    assert seen["applied by replica"] == [seen["version"], seen["before"]]
    assert f"{NAMES[1]} " in seen["error"]
    assert "this prepare fails" in seen["error"]
    assert [versions_of(response) for response in seen["during"]] == [
        [seen["version"]],
        [seen["before"]],
    ]
    assert [wrong_tokens(response) for response in seen["during"]] == [[], []]
    assert NAMES[1] in seen["not in time"]
    assert NAMES[0] not in seen["not in time"].replace(NAMES[1], "")


def test_replica_that_could_not_switch_is_tried_again(dense):
    seen = dense["one fails"]
    assert seen["reached"] == seen["version"]
    assert [versions_of(response) for response in seen["after"]] == [[seen["version"]]] * 2


def test_one_replica_pauses_while_the_other_serves(dense):
    """While a load of one is held up, the other answers, from the new version already."""
    seen = dense["one is held"]
    assert versions_of(seen["other"]) == [seen["version"]]
    assert not seen["held one had answered"]
    assert versions_of(seen["held"]) == [seen["version"]]


# Replicas that step together.


def test_replicas_that_step_together_switch_as_one(lockstep):
    """No token is of a mix: with experts of one version and attention of another it would be.

    The last two switches are begun in a pause of another program, and while one replica refuses to
    be paused: neither may let a replica wait for a step that the other one does not make.
    """
    assert lockstep["reached"] == lockstep["last"]
    assert lockstep["tokens"] == lockstep["fresh engines"]
    for replica in REPLICAS:
        versions = {
            version
            for response in lockstep["responses"]
            if response["replica"] == replica
            for version, _, _ in response["spans"]
        }
        assert len(versions) >= 3
    assert any(len(response["spans"]) > 1 for response in lockstep["responses"])


def test_replicas_that_step_together_are_one_receiver(lockstep):
    assert lockstep["records"] == {ENGINE: lockstep["last"]}
    assert lockstep["ranks"] == [f"{ENGINE}.rank-{rank}" for rank in REPLICAS]


def test_models_differ_in_their_tokens(lockstep):
    first, second = lockstep["fresh starts"]
    assert all(one != other for one, other in zip(first, second, strict=True))


# A server, with as many API servers as replicas, as is vLLM's default.


def test_no_api_server_is_ready_before_there_is_a_version(served):
    assert served["ready with an empty store"] is False


def test_each_replica_behind_each_api_server_follows(served):
    for version, answers in served["answers"].items():
        assert answers == [[token_of(int(version))] * ANSWER_TOKENS] * len(answers)
    assert set(served["answers"]) == {"1", "2", "3"}


def test_one_api_server_follows_each_replica_and_the_others_stand_by(served):
    began = [line for line in served["log"] if "and serves weights from outside the store" in line]
    assert len(began) == len(REPLICAS)
    switched = [re.search(r"(\S+) serves version (\d+): ", line) for line in served["log"]]
    assert sorted(match.groups() for match in switched if match) == [
        (name, str(version)) for name in NAMES for version in (1, 2, 3)
    ]


def test_metrics_of_all_replicas_are_on_all_api_servers(served):
    for metrics in served["metrics"]:
        for name in NAMES:
            assert metrics[f"dbuffer_version_applied of {name}"] == 3
            assert metrics[f"dbuffer_following of {name}"] == 1
            assert metrics[f"dbuffer_pause_seconds_count of {name}"] == 3


def test_server_of_replicas_ends_cleanly(served):
    assert served["exit code"] == 0
    assert served["left over"] == []


def test_replicas_of_a_server_cannot_be_driven_from_outside(served):
    assert "replicas step each by itself" in served["driven from outside"]
    assert "--middleware dbuffer.integrations.vllm.FollowStore" in served["driven from outside"]


# Two front ends that balance their own replicas each (--data-parallel-hybrid-lb).


def test_each_front_end_follows_with_its_own_replicas(hybrid):
    for version, of_servers in hybrid["answers"].items():
        for answers in of_servers:
            assert answers == [[token_of(int(version))] * ANSWER_TOKENS] * len(answers)
    assert set(hybrid["answers"]) == {"1", "2", "3"}
    for names, log in zip((HYBRID_NAMES[:2], HYBRID_NAMES[2:]), hybrid["logs"], strict=True):
        switched = [re.search(r"(\S+) serves version (\d+): ", line) for line in log]
        # They start with version 1.
        assert sorted(match.groups() for match in switched if match) == [
            (name, str(version)) for name in names for version in (2, 3)
        ]


def test_front_ends_end_cleanly(hybrid):
    assert hybrid["ends"] == [[0, []], [0, []]]
