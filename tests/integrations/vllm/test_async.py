"""A following `AsyncLLM`, under load: whose tokens a response carries, and what it says of them.

A trainer in a process of its own publishes models whose every token reveals their version, at full
speed, while requests run. The engine core is a process too, and with two ranks each worker is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.programs.vllm_async import (
    MIN_SWITCHES,
    MIN_SWITCHES_OF_TWO,
    NUM_STREAMS,
    PUBLISHES,
    versions_seen,
)
from tests.support.engines.tiny_models import version_of, wrong_tokens
from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    environment,
    observe,
)
from tests.support.soak import Record, in_soaks_alone

pytestmark = [*NEEDS_VLLM, ANSWERS_TELL_VERSIONS]


@pytest.fixture(scope="module")
def observed(directory: Path) -> dict[str, Any]:
    """Observations of an engine of one rank, which takes the backend's way."""
    # Functions are sent to workers, to make them fail. The fresh engines, which an `LLM` is, run
    # in the program itself; an `AsyncLLM` has its processes in any case.
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    place = directory / "one"
    place.mkdir()
    seen: dict[str, Any] = observe("vllm_async.py", place, "one-rank", env=env)
    return seen


@pytest.fixture(scope="module")
def observed_two(directory: Path) -> dict[str, Any]:
    """Observations of two ranks with a model of 100 MB, which take the extension's way."""
    env = environment(processes=True, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    place = directory / "two"
    place.mkdir()
    seen: dict[str, Any] = observe("vllm_async.py", place, "two-ranks", env=env)
    return seen


def check_attribution(responses: list[dict[str, Any]]) -> None:
    """Every token is of the version reported for it, and versions never go back.

    Between responses only this is sure: what is sent after another response came, or after the
    follower said that the engine has a version, is not answered by older weights. Two responses
    that run side by side may reach their readers in any order.
    """
    for response in responses:
        spans = response["spans"]
        assert wrong_tokens(response) == []
        # All tokens have a version, and those of a mix are 0, which no version's are.
        ends = [0] + [end for _, _, end in spans]
        assert [start for _, start, _ in spans] == ends[:-1]
        assert ends[-1] == len(response["tokens"])
        versions = [version_of(version) for version, _, _ in spans]
        assert versions == sorted(set(versions))
        assert all(version >= response["floor"] for version in versions)


def check_end(seen: dict[str, Any]) -> None:
    """After the last publish, everyone says that the engine is on it, and its tokens are."""
    assert seen["reached"] == seen["last"]
    assert seen["label"] == str(seen["last"])
    assert [version for version, _, _ in seen["after"]["spans"]] == [str(seen["last"])]
    assert wrong_tokens(seen["after"]) == []
    assert seen["error"] is None


def check_run(seen: dict[str, Any], record: Record) -> None:
    """Much was published and much of it used, no response says what is not so, and the end."""
    record(
        "versions in answers that an engine under load gave", len(versions_seen(seen["responses"]))
    )
    assert seen["published"] >= PUBLISHES
    assert len(versions_seen(seen["responses"])) >= MIN_SWITCHES
    check_attribution(seen["responses"])
    check_end(seen)


def test_an_engine_that_follows_nothing_reports_its_starting_weights(observed):
    (span,) = observed["start"]["spans"]
    assert span[0] == "default"
    assert wrong_tokens(observed["start"]) == []


def test_with_pauses_that_wait_each_response_is_of_the_one_version_it_reports(
    observed, record_property
):
    seen = observed["wait"]
    check_run(seen, record_property)
    for response in seen["responses"]:
        assert response["reason"] == "length"
        assert len(response["spans"]) == 1


@pytest.mark.soak
def test_with_pauses_that_keep_tokens_change_version_only_where_it_is_said(
    observed, record_property
):
    seen = observed["keep"]
    check_run(seen, record_property)
    switched_on_the_way = [r for r in seen["responses"] if len(r["spans"]) > 1]
    assert len(switched_on_the_way) >= NUM_STREAMS
    assert {response["reason"] for response in seen["responses"]} == {"length"}


@pytest.mark.soak
def test_with_pauses_that_abort_requests_say_so_and_no_token_is_wrong(observed, record_property):
    seen = observed["abort"]
    check_run(seen, record_property)
    for response in seen["responses"]:
        is_whole = len(response["tokens"]) == response["wanted"]
        assert response["reason"] == ("length" if is_whole else "abort")
        assert len(response["spans"]) <= 1
    assert {response["reason"] for response in seen["responses"]} == {"length", "abort"}


def test_nothing_computed_with_old_weights_is_used_for_new_ones(observed):
    seen = observed["caches"]
    # Each request was switched on its way: what came before is the prompt of what comes after.
    assert min(seen["spans a response"]) >= 2
    assert seen["tokens"] == seen["fresh engines"]


def test_prompts_longer_than_a_cache_block_are_right_at_once_after_a_switch(observed):
    seen = observed["repeated prompts"]
    first, second = observed["caches"]["fresh starts"]
    assert seen["before"] == seen["again"] == first
    assert seen["after"] == second != first


def test_weights_that_do_not_fit_pause_nothing(observed):
    seen = observed["misfit"]
    assert seen["pauses"] == []
    assert "lm_head.weight" in seen["error"]
    assert seen["label"] == str(seen["label_before"])
    assert wrong_tokens(seen["during"]) == wrong_tokens(seen["after"]) == []
    assert seen["after"]["spans"][0][0] == str(seen["next"])


@pytest.mark.parametrize("what", ["load", "prepare"])
def test_an_update_that_fails_in_the_pause_is_followed_by_the_next_one(observed, what):
    seen = observed[f"failing {what}"]
    assert set(seen["pauses"]) == {"keep"}
    assert f"this {what} fails" in seen["error"]
    # The engine goes on, on the version before, and says so.
    assert seen["label"] == str(seen["label_before"])
    assert [span[0] for span in seen["during"]["spans"]] == [seen["label"]]
    assert seen["during"]["reason"] == "length"
    check_attribution([seen["during"]])
    # Once nothing fails any more, it is switched without anyone's help.
    assert seen["reached"] == seen["version"]
    assert [span[0] for span in seen["after"]["spans"]] == [str(seen["version"])]
    check_attribution([seen["after"]])


def test_a_follower_closed_in_the_middle_of_a_switch_ends_it_first(observed):
    seen = observed["closed"]
    assert not seen["closed_before_the_switch"]
    assert not seen["is_paused"]
    assert seen["label"] == str(seen["version"])
    check_attribution([seen["after"]])


def test_a_pause_that_somebody_else_began_is_theirs_to_end(observed):
    seen = observed["paused by the user"]
    assert seen["is_paused"]
    assert seen["tokens_in_pause"] == seen["tokens_before"]
    check_attribution([seen["response"]])
    assert [span[0] for span in seen["response"]["spans"]] == [
        str(seen["label_before"]),
        str(seen["version"]),
    ]


def test_a_switch_waits_for_the_end_of_one_step_only(observed):
    calls = observed["calls of a switch"]
    # The core answers between two steps: asked one after the other, each would wait for a step.
    names = ("is_scheduler_paused asked", "pause_scheduler asked", "is_scheduler_paused answered")
    assert [call for call in calls if call in names] == list(names)


def test_engine_stays_on_the_version_that_it_was_told(observed):
    seen = observed["stays"]
    check_attribution(seen["responses"])
    versions = [[span[0] for span in response["spans"]] for response in seen["responses"]]
    assert versions == [[str(seen["version"])]] * 3 + [[str(seen["last"])]]
    assert version_of(seen["before"]) < seen["version"]


def test_sleeping_engine_is_left_asleep_and_gets_its_version_when_it_wakes(observed):
    seen = observed["lost weights"]
    assert seen["label"] == "unknown"
    assert seen["error"].startswith("EngineBusyError: the engine's weights are asleep")
    assert seen["paused"]
    check_attribution([seen["woken"]])


def test_weights_that_vllm_loaded_are_unknown_until_the_version_is_there_again(observed):
    seen = observed["lost weights"]
    for response in seen["reloaded"]:
        known = [span for span in response["spans"] if span[0] != "unknown"]
        assert wrong_tokens(response | {"spans": known}) == []
    check_attribution([seen["again"]])


def test_engine_that_dies_ends_following_which_is_told_once(observed):
    assert observed["dead"]["error"].startswith("EngineEndedError")
    [line] = observed["dead"]["log"]
    assert "is followed no longer: " in line


def test_engine_that_can_never_be_followed_is_refused_at_once(observed):
    assert observed["no store"].startswith("OptionError: no store given")


@in_soaks_alone
@pytest.mark.soak
def test_two_ranks_switch_as_one(observed_two, record_property):
    seen = observed_two["keep"]
    versions = versions_seen(seen["responses"])
    record_property("versions in answers that an engine of two ranks gave", len(versions))
    assert len(versions) >= MIN_SWITCHES_OF_TWO
    assert any(len(response["spans"]) > 1 for response in seen["responses"])
    check_attribution(seen["responses"])
    check_end(seen)


@in_soaks_alone
def test_staging_by_mapping_costs_a_worker_no_memory(observed_two):
    seen = observed_two["memory"]
    assert seen["staged"]["map"] == [seen["version"]["map"]] * 2
    for before, *later in zip(*seen["map"], strict=True):
        assert all(after - before < seen["num_bytes"] / 10 for after in later)


@in_soaks_alone
def test_staging_by_copying_costs_a_worker_one_version(observed_two):
    seen = observed_two["memory"]
    assert seen["staged"]["copy"] == [seen["version"]["copy"]] * 2
    for before, *later in zip(*seen["copy"], strict=True):
        versions = [(after - before) / seen["num_bytes"] for after in later]
        assert all(0.9 < number < 1.1 for number in versions)


@in_soaks_alone
def test_images_are_of_the_newest_version_alone(observed_two):
    """A version is less than a megabyte here, so that kernels show beside the weights in them."""
    seen = observed_two["memory"]
    assert seen["staged"]["images"] == [seen["version"]["images"]] * 2
    for before, first, *later in zip(*seen["images"], strict=True):
        assert first - before < 2 * seen["num_bytes"]
        assert all(after - first < 0.5 * seen["num_bytes"] for after in later)
