"""An engine of two ranks, of which one fails: both switch, or none does, and replies stay in order.

One program does everything, with two engines; the tests judge what it saw.
"""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest

from tests.programs.vllm_ranks import (
    FAILING,
    FILE_FAULTS,
    FOLLOWED_ANEW,
    LOAD_ERROR,
    MISFITS,
    RANKS,
    WAIT_S,
)
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe
from tests.support.stores import SHARED_MEMORY

TIMED_OUT_ACKNOWLEDGEMENT = "WaitTimeoutError"
ON_ONE_RANK = [f"{fault} on rank {rank}" for fault in (*FILE_FAULTS, "load") for rank in FAILING]
BY_EXTENSION = [f"load on rank {rank}, by extension" for rank in FAILING]
BAD_REQUESTS = [f"bad request for rank {rank}" for rank in FAILING]
FAILURES = [
    *ON_ONE_RANK,
    *BY_EXTENSION,
    FOLLOWED_ANEW,
    *BAD_REQUESTS,
    *MISFITS,
    "version never published",
    "version gone",
]
SWITCHES = ["backend", "backend, followed", "extension, followed"]

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = environment(processes=True)
    directory = tmp_path_factory.mktemp("ranks")
    # Removed by this process: the program may be killed.
    with tempfile.TemporaryDirectory(prefix="dbuffer-test-", dir=SHARED_MEMORY) as scratch:
        return observe("vllm_ranks.py", directory, scratch, env=env)


@pytest.mark.parametrize("way", SWITCHES)
def test_switched_engine_answers_as_a_fresh_one(observed, way):
    for old, new in zip(*observed["fresh"], strict=True):
        assert old != new, "the rest would hold with no weights moved at all"
    assert_serves(observed, observed["switches"][way], observed["switches"][way]["seed"])


@pytest.mark.parametrize("way", [way for way in SWITCHES if "followed" in way])
def test_followed_engine_reports_the_version(observed, way):
    seen = observed["switches"][way]
    assert seen["reported"] == str(seen["version"])


@pytest.mark.parametrize("failure", FAILURES)
def test_engine_serves_on_unchanged_at_once(observed, failure):
    seen = observed["failures"][failure]
    assert_serves(observed, seen["after"], seen["seed before"])


@pytest.mark.parametrize("failure", FAILURES)
def test_next_update_succeeds(observed, failure):
    seen = observed["failures"][failure]
    assert seen["next error"] is None
    assert seen["seed before"] != seen["seed next"]
    assert_serves(observed, seen["next"], seen["seed next"])


@pytest.mark.parametrize("failure", [*ON_ONE_RANK, *BY_EXTENSION, FOLLOWED_ANEW, *BAD_REQUESTS])
def test_error_names_the_rank_that_failed_and_no_other(observed, failure):
    error = observed["failures"][failure]["error"]
    rank = int(failure.partition("rank ")[2][0])
    assert f"rank {rank}: " in error
    assert f"rank {1 - rank}: " not in error


@pytest.mark.parametrize("fault", FILE_FAULTS)
@pytest.mark.parametrize("rank", FAILING)
def test_error_says_what_is_wrong_with_the_file(observed, fault, rank):
    error = observed["failures"][f"{fault} on rank {rank}"]["error"]
    assert_matches(FILE_FAULTS[fault], error)
    assert "no rank was touched" in error


@pytest.mark.parametrize("misfit", MISFITS)
def test_error_names_the_tensor_that_does_not_fit(observed, misfit):
    error = observed["failures"][misfit]["error"]
    for rank in RANKS:
        assert_matches(f"rank {rank}: WeightsMismatchError: .*{MISFITS[misfit]}", error)


def test_error_says_that_a_version_is_not_there(observed):
    never, gone = (observed["failures"][f"version {what}"] for what in ("never published", "gone"))
    assert "VersionError: version 99 was not published" in never["error"]
    assert "versions never go back" in gone["error"]


@pytest.mark.parametrize("failure", [name for name in FAILURES if "load" in name])
def test_error_says_why_a_load_failed_and_what_the_engine_has(observed, failure):
    seen = observed["failures"][failure]
    assert LOAD_ERROR in seen["error"]
    went_back = f"went back, and the engine serves on with version {seen['version before']}"
    assert went_back in seen["error"]


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_version_is_never_acknowledged(observed, failure):
    seen = observed["failures"][failure]
    assert seen["after"]["applied"] == seen["version before"]
    assert seen["waited"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)


@pytest.mark.parametrize("failure", FAILURES)
def test_next_version_is_acknowledged_once_for_both_ranks(observed, failure):
    seen = observed["failures"][failure]
    assert seen["next"]["applied"] == seen["version next"]
    assert seen["waited for one"] is None
    assert seen["waited for two"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)


def test_manifest_damaged_after_staging_fails_no_switch(observed):
    seen = observed["manifest"]
    assert seen["error"] is None
    assert_serves(observed, seen, seen["seed"])
    assert seen["applied"] == seen["version"]


def test_rank_that_has_staged_what_was_replaced_takes_what_the_others_take(observed):
    seen = observed["replaced"]
    assert seen["error"] is None
    assert_serves(observed, seen, 1)


def test_next_run_in_the_same_store_is_followed_whatever_its_numbers(observed):
    seen = observed["replaced"]["again"]
    assert seen["error"] is None
    assert_serves(observed, seen, 0)


def test_next_run_in_the_same_store_is_refused_if_it_is_to_be(observed):
    seen = observed["replaced"]["refused"]
    assert "VersionRegressedError: " in seen["error"]
    assert_serves(observed, seen, 0)


def test_ranks_read_a_version_on_a_network_once_between_them(observed):
    seen = observed["network"]
    for version in seen["versions"]:
        assert_serves(observed, version, version["seed"])
        assert seen["model bytes"] <= version["read"] < 1.15 * seen["model bytes"]


def test_broken_engine_that_is_followed_anew_is_made_whole_by_an_update(observed):
    seen = observed["broken, followed anew"]
    assert "half-loaded weights" in seen["error"]
    assert "half-loaded weights" in seen["prepare error"]
    assert_is_whole_again(observed, seen)


def test_nothing_is_acknowledged_while_a_rank_still_loads(observed):
    seen = observed["halted"]
    assert [record["staged_version"] for record in seen["ranks"]] == [seen["version"]] * 2
    assert [record["applied_version"] for record in seen["ranks"]] == [None] * 2
    assert seen["applied"] < seen["version"]
    assert seen["waited"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)


def test_buffer_that_is_taken_from_a_rank_in_its_load_stays_whole(observed):
    seen = observed["halted"]
    assert seen["error"] is None
    assert seen["publish_s"] < WAIT_S / 2
    assert_serves(observed, seen["after"], seen["seed"])
    assert seen["after"]["applied"] == seen["version"]
    assert all(record["stats"]["evictions"] > 0 for record in seen["ranks after"])
    assert_serves(observed, seen["next"], seen["seed next"])


def test_engine_that_cannot_go_back_says_so_and_acknowledges_nothing(observed):
    seen = observed["broken"]
    assert seen["error"].startswith("EngineBrokenError: ")
    assert "half-loaded weights" in seen["error"]
    assert f"could not go back to version {seen['version before']}: rank 0: " in seen["error"]
    assert "rank 1: " not in seen["error"]
    assert seen["applied"] == seen["version before"]
    assert_in_order(seen)


def test_update_before_any_request_makes_a_broken_engine_whole(observed):
    seen = observed["broken"]
    assert_is_whole_again(observed, seen)


def test_two_engines_of_one_name_each_serve_what_they_say(observed):
    seen = observed["namesake"]
    assert seen["tokens before"] == observed["fresh"][seen["seed before"]]
    assert seen["applied before"] is None, "what it has, it has from the other's record"
    assert seen["name"] == "stock", "each has a record of its own"
    for look in seen["looks"]:
        assert look["applied"] == look["version"]
        assert look["tokens"] == [observed["fresh"][look["seed"]]] * 2
        assert look["waited for two"] is None


def test_rank_that_is_stopped_is_named_and_the_engine_is_mended_by_an_update(observed):
    seen = observed["stopped"]
    late = rf"rank 1 \(process {seen['pid']} on .*\) did not answer within 2 s: it is stopped"
    assert_matches(late, seen["problem"])
    assert seen["error"].startswith("EngineBrokenError: ")
    assert_is_whole_again(observed, seen)


def test_broken_engine_answers_no_request_and_dies_of_it(observed):
    seen = observed["refused"]
    assert "half-loaded weights" in seen["error"]
    assert_dead(seen)


def test_killed_worker_ends_the_engine_and_nothing_hangs(observed):
    seen = observed["killed"]
    assert seen["error"] is not None
    assert seen["error_s"] < WAIT_S
    assert_dead(seen)


@pytest.mark.parametrize("end", ["refused", "killed"])
def test_store_serves_on_when_the_engine_is_dead(observed, end):
    seen = observed[end]
    assert seen["applied"] == seen["version before"]
    assert seen["waited"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)
    assert seen["publish_s"] < 10
    assert seen["read"] == seen["published"]


def assert_serves(observed: Any, seen: Any, seed: int) -> None:
    assert seen["tokens"] == observed["fresh"][seed]
    assert_in_order(seen)


def assert_is_whole_again(observed: Any, seen: Any) -> None:
    assert seen["next error"] is None
    assert_serves(observed, seen["next"], seen["seed next"])


def assert_in_order(seen: Any) -> None:
    """Replies of all ranks to the last call are replies to that call, and not to one before."""
    assert seen["replies"] == [[rank, seen["question"]] for rank in RANKS]


def assert_dead(seen: Any) -> None:
    for answer in seen["answers"]:
        assert answer is not None, "it answered"
        assert answer.startswith("EngineDeadError: ")


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text
