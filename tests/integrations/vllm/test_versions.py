"""Versions over HTTP: responses tell which weights they came from, requests say which they take.

The model reveals its version: each token says from which weights it came, so what a response tells
is compared, span by span, with what really computed it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dbuffer.integrations.vllm import VersionSpan, versions_of
from tests.programs.vllm_versions import LONG_TOKENS, REQUESTS, STEPS_PER_VERSION, choices_of
from tests.support.engines.tiny_models import token_of
from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
    vllm_release,
)
from tests.support.soak import in_soaks_alone

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(2 * TIMEOUT_S)]

ROUTES = ("completion", "several", "chat", *(["generate"] if vllm_release() >= (0, 32) else []))
OK, BAD_REQUEST, NOT_FOUND, CONFLICT, UNAVAILABLE = 200, 400, 404, 409, 503


@pytest.fixture(scope="module")
def seen(directory: Path) -> Any:
    return observe("vllm_versions.py", directory, "1", env=environment(processes=True))


@pytest.fixture(scope="module")
def told(seen: Any) -> Any:
    return seen["told"]


def headers_of(version: int, history: str) -> dict[str, str]:
    metadata = {"step": STEPS_PER_VERSION * version, "run": "test"}
    return {"version": str(version), "history": history, "metadata": json.dumps(metadata)}


# Responses


@pytest.mark.parametrize("kind", ["plain", "asked", "stream", "asked stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_each_response_has_the_version_its_history_and_its_metadata(told, route, kind):
    response = told[route][kind]
    expected = headers_of(1, told["history"])
    assert {name: response[name] for name in expected} == expected


@ANSWERS_TELL_VERSIONS
@pytest.mark.parametrize("kind", ["asked", "asked stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_spans_of_each_choice_are_told_when_they_are_asked_for(told, route, kind):
    choices = choices_of(told[route][kind])
    assert [choice["index"] for choice in choices] == list(range(4 if route == "several" else 1))
    metadata = {"step": STEPS_PER_VERSION, "run": "test"}
    for choice in choices:
        assert versions_of(choice) == [VersionSpan(1, 0, 8, told["history"], metadata)]


@pytest.mark.skipif(vllm_release() >= (0, 32), reason="vLLM tells spans")
@pytest.mark.parametrize("kind", ["asked", "asked stream"])
def test_versions_at_both_ends_are_told_where_vllm_has_no_spans(told, kind):
    for choice in choices_of(told["several"][kind]):
        assert versions_of(choice) == [VersionSpan(1, 0, 8, is_exact=False)]


@pytest.mark.parametrize("kind", ["plain", "stream"])
@pytest.mark.parametrize("route", ["completion", "several", "chat"])
def test_no_client_meets_a_field_that_it_did_not_ask_for(told, route, kind):
    assert not [
        key for choice in choices_of(told[route][kind]) for key in choice if "weight" in key
    ]


def test_spans_that_vllm_does_not_tell_are_told_as_unknown(told):
    """Of a beam search, whose outputs are no prompt's."""
    assert [choice["weight_versions"] for choice in told["beams"]["body"]["choices"]] == [None] * 2


def test_response_without_tokens_names_no_version(told):
    assert told["not found"]["status"] == NOT_FOUND
    assert told["models"]["status"] == OK
    assert told["not found"]["version"] is told["models"]["version"] is None


# Requests


@pytest.mark.parametrize("requirement", ["min", "exact", "step", "history"])
def test_request_whose_requirement_is_met_is_served(seen, requirement):
    assert seen["admission"]["met"][requirement]["status"] == OK


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("min", ["version 1", "2"]),
        ("exact", ["version 1", "2"]),
        ("step", ["step 10", "10.5"]),
        ("history", ["0000000000000000"]),
    ],
)
def test_request_whose_requirement_is_not_met_is_refused(seen, requirement, words):
    response = seen["admission"]["unmet"][requirement]
    assert (response["status"], response["retry after"]) == (CONFLICT, "1")
    assert response["version"] == response["body"]["weights"]["version"] == "1"
    assert all(word in response["body"]["error"]["message"] for word in words)


def test_stream_is_refused_as_any_other_request(seen):
    assert seen["admission"]["unmet stream"]["status"] == CONFLICT


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("min", "X-Weight-Min-Version 'two'"),
        ("exact", "X-Weight-Exact-Version 0"),
        ("step", "X-Weight-Min-Step 'nan'"),
        ("history", "X-Weight-History 'x'"),
        ("wait", "X-Weight-Wait-S '-1'"),
        ("wait alone", "X-Weight-Wait-S"),
        ("name", "x-weight-min-verson"),
        ("flag", "X-Weight-Versions 'yes'"),
    ],
)
def test_wrong_value_is_a_bad_request_by_name(seen, case, named):
    response = seen["admission"]["wrong"][case]
    assert response["status"] == BAD_REQUEST
    assert named.lower() in response["body"]["error"]["message"].lower()


def test_load_balancer_learns_whether_a_version_is_served(seen):
    ready = seen["admission"]["ready"]
    statuses = {name: answer["status"] for name, answer in ready.items()}
    assert statuses == {
        "now": OK,
        "met": OK,
        "unmet": UNAVAILABLE,
        "wrong": BAD_REQUEST,
        "unknown": BAD_REQUEST,
    }
    [replica] = ready["unmet"]["body"]["replicas"]
    assert replica["version"] == "1"


def test_request_waits_for_a_version_as_long_as_it_allows(seen):
    waiting = seen["waiting"]
    assert waiting["in vain"]["status"] == CONFLICT
    assert (waiting["admitted"]["status"], waiting["admitted"]["version"]) == (OK, "2")
    assert waiting["ready"]["status"] == OK


def test_request_for_a_version_that_is_past_is_refused_at_once(seen):
    past = seen["waiting"]["past"]
    assert (past["status"], past["retry after"]) == (CONFLICT, None)


@pytest.mark.parametrize("kind", ["exact", "exact stream"])
def test_request_for_one_version_is_ended_by_the_switch(seen, kind):
    """It is told why, and has no token of another version."""
    [choice] = choices_of(seen["exact"][kind])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "weight_version")
    assert set(choice["token_ids"]) == {token_of(2)}
    assert len(choice["token_ids"]) < LONG_TOKENS


def test_request_whose_minimum_is_met_runs_on_through_a_switch(seen):
    [choice] = choices_of(seen["exact"]["minimum"])
    assert choice["finish_reason"] == "length"
    assert set(choice["token_ids"]) == {token_of(2), token_of(3)}
    assert {span.version for span in versions_of(choice)} == {2, 3}


# Load: twenty streams, a version every 0.3 s, requests of all kinds


def assert_load_is_labeled_right(load: Any) -> None:
    assert load["wrong"] == []
    assert set(load["statuses"]) <= {str(OK), str(CONFLICT)}
    assert sum(load["statuses"].values()) == REQUESTS
    # Else there was nothing that could be labeled wrong.
    assert load["switched in"] > REQUESTS / 50
    assert load["versions"] >= 3


@pytest.mark.soak
def test_no_token_under_load_is_labeled_wrong(seen):
    assert_load_is_labeled_right(seen["load"])
    assert seen["exit"] == [0, []]


@in_soaks_alone
def test_no_token_of_replicas_is_labeled_wrong(tmp_path):
    """Two replicas, each on its own version, behind two API servers of which one follows."""
    seen = observe("vllm_versions.py", tmp_path, "2", env=environment(processes=True))
    assert_load_is_labeled_right(seen["load"])
