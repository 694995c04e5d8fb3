"""A vLLM server that follows a store: by itself, by `dbuffer follow-server`, by vLLM's own trainer.

`vllm_server.py` starts a server, kills it and starts it again, in each of two roles; in a third
role, a server that must not come up. The model reveals its version: an answer's tokens say from
which weights each of them came, and an answer with weights of two versions is token 0.
"""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.programs.vllm_server import ENGINE_TIMEOUT_S, FULL_SPEED, LONG_TIMEOUT_S
from tests.support.engines.tiny_models import revealing_weights, token_of
from tests.support.engines.vllm_engines import (
    EXTENSION,
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)
from tests.support.engines.vllm_servers import ANSWER_TOKENS, WAIT_S
from tests.support.soak import in_soaks_alone, is_soak

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(2 * TIMEOUT_S + 60)]

EXIT_FAILED = 1
EXIT_TIMEOUT = 3


@pytest.fixture(scope="module")
def programs(directory: Path) -> dict[str, Any]:
    """Observations of the programs, two of them side by side; the last one in soaks alone.

    In memory: what is written at full speed to a disk holds up all who write there, logs too.
    """

    def run(role: str) -> Any:
        place = directory / role
        place.mkdir()
        return observe("vllm_server.py", place, role, env=environment(processes=True))

    with ThreadPoolExecutor(2) as pool:
        roles = ("inside", "outside", "refused")[: None if is_soak() else 2]
        runs = {role: pool.submit(run, role) for role in roles}
        return {role: future.result() for role, future in runs.items()}


@pytest.fixture(scope="module")
def inside(programs: dict[str, Any]) -> dict[str, Any]:
    return programs["inside"]


@pytest.fixture(scope="module")
def refused(programs: dict[str, Any]) -> dict[str, Any]:
    return programs["refused"]


@pytest.fixture(scope="module")
def outside(programs: dict[str, Any]) -> dict[str, Any]:
    return programs["outside"]


def tokens_of(version: int) -> list[int]:
    return [token_of(version)] * ANSWER_TOKENS


def serving(version: int) -> dict[str, Any]:
    """The state of a server on this version."""
    return {"paused": False, "version": str(version), "tokens": tokens_of(version)}


# The server that follows by itself. Its own weights are a dummy's: what it serves is the store's.


def test_server_with_a_dummys_weights_is_not_ready_before_there_is_a_version(inside):
    assert inside["ready with an empty store"] is False
    [line] = [line for line in inside["log"] if "waiting" in line and "for a version" in line]
    assert f"waiting {ENGINE_TIMEOUT_S} s (timeout_s)" in line


def test_log_has_vllms_format_and_tells_each_switch(inside):
    files = r"\[(follower|reporting)\.py:"
    ours = [line for line in inside["log"] if re.search(files, line)]
    format_of_vllm = re.compile(rf"INFO \d\d-\d\d \d\d:\d\d:\d\d {files}\d+\] ")
    assert all(format_of_vllm.search(line) for line in ours)
    began, *switches = ours
    outside = "and serves weights from outside the store (its checkpoint, or another load)"
    assert f"{outside} until a version is there and loaded" in began
    told = [
        re.search(r"serves version (\d+): .*staged in [\d.]+ ms.*paused for", s) for s in switches
    ]
    assert [match and match[1] for match in told] == ["1", "2", "3", "4", "5"]


def test_server_follows_with_no_route_of_development_mode(inside):
    assert set(inside["routes"].values()) == {404}


def test_follower_names_what_such_a_server_lacks(inside):
    code, errors = inside["driven from outside"]
    assert code == EXIT_FAILED
    assert "VLLM_SERVER_DEV_MODE=1" in errors
    assert "--middleware dbuffer.integrations.vllm.FollowStore" in errors


def test_server_follows_each_publish(inside):
    assert inside["answers"] == {str(version): tokens_of(version) for version in range(1, 6)}


def test_metrics_are_on_the_server_and_right(inside):
    metrics = inside["metrics"]
    num_bytes = sum(weight.nbytes for weight in revealing_weights(0).values())
    expected = {
        "following": 1,
        "version_applied": 5,
        "version_available": 5,
        "lag_versions": 0,
        "lag_seconds": 0,
        "bytes_total": 5 * num_bytes,
        "stage_seconds_count": 5,
        "pause_seconds_count": 5,
        "retries_total": 0,
        "evictions_total": 0,
        "failures_total": 0,
    }
    assert {name: metrics.pop(f"dbuffer_{name}") for name in expected} == expected
    assert set(metrics) == {"dbuffer_stage_seconds_sum", "dbuffer_pause_seconds_sum"}
    assert all(0 < seconds < 5 * WAIT_S for seconds in metrics.values())


def test_misfit_is_counted_and_the_server_answers_on(inside):
    assert inside["answer with a misfit"] == tokens_of(5)
    metrics = inside["metrics with a misfit"]
    assert metrics["dbuffer_failures_total"] == 1
    assert metrics["dbuffer_following"] == 0
    assert metrics["dbuffer_version_applied"] == 5
    assert metrics["dbuffer_version_available"] == 6
    assert metrics["dbuffer_lag_versions"] == 1
    assert metrics["dbuffer_lag_seconds"] > 0
    assert metrics["dbuffer_pause_seconds_count"] == 5


def test_version_after_a_misfit_is_followed(inside):
    assert inside["answer after a misfit"] == tokens_of(7)
    metrics = inside["metrics after a misfit"]
    assert metrics["dbuffer_version_applied"] == metrics["dbuffer_version_available"] == 7
    assert metrics["dbuffer_lag_seconds"] == 0
    assert metrics["dbuffer_failures_total"] == metrics["dbuffer_following"] == 1


def test_restarted_server_answers_first_from_the_newest_version(inside):
    assert inside["first answer of the second start"] == tokens_of(8)
    assert inside["second start follows"] == tokens_of(9)


def test_server_ends_cleanly_while_versions_come(inside):
    assert inside["exit code"] == 0
    assert inside["left over"] == []
    assert not any("appears unsupported" in line for line in inside["last log"])


def test_server_ends_soon_while_versions_come(inside):
    """The switch in flight ends, and no other begins."""
    assert inside["end took s"] < LONG_TIMEOUT_S / 2
    log = inside["last log"]
    [end] = [n for n, line in enumerate(log) if "Waiting for application shutdown" in line]
    assert sum("serves version" in line for line in log[end:]) <= 1
    assert sum("serves version" in line for line in log[:end]) >= 1


# Servers that cannot follow.


@in_soaks_alone
def test_server_that_cannot_follow_does_not_start_and_says_why(refused):
    assert refused["exit code"] > 0
    assert not refused["was ready"]
    assert refused["left over"] == []
    [line, *same] = [line for line in refused["log"] if "this server does not start" in line]
    assert re.search("no place for|lm_head.weight", line)
    assert not same
    assert not [line for line in refused["log"] if "Application startup complete" in line]


# The server that is driven from outside.


def test_answers_at_full_speed_are_of_one_version_and_never_go_back(outside):
    versions = {token_of(version): version for version in range(outside["published"] + 1)}
    assert len(versions) == outside["published"] + 1
    assert outside["published"] >= FULL_SPEED[-1]
    for answers in outside["answers"]:
        assert all(len(set(tokens)) == 1 for tokens in answers)
        seen = [versions[tokens[0]] for tokens in answers]
        assert seen == sorted(seen)
        # Else there were no switches to go wrong at.
        assert len(set(seen)) >= 3


def test_follower_prints_each_switch(outside):
    lines = outside["lines"]
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    assert versions[-1] == outside["published"]
    for line in lines:
        assert line["num_bytes"] > 0
        assert 0 < line["load_s"] < line["pause_s"]


def test_server_is_on_the_newest_version_after_full_speed(outside):
    assert outside["before"] == tokens_of(0)
    assert outside["full speed"] == serving(outside["published"])


def test_restarted_server_is_followed_again(outside):
    assert_serves_newest(outside["restarted"])


# While ranks load, before they are asked to, and when they have loaded.
@pytest.mark.parametrize("call", ["extension: update", "backend: no update", "backend: no resume"])
def test_pause_of_a_killed_follower_is_ended_by_the_next(outside, call):
    assert_recovered(outside["killed"][call])


def test_session_that_a_killed_trainer_left_open_hinders_no_follower(outside):
    assert outside["session"] == {"begun": 200, "ended": 200}
    assert_recovered(outside["killed"]["in a session: update"])


def assert_recovered(seen: dict[str, Any]) -> None:
    assert seen["was paused"] is True
    assert_serves_newest(seen["after"])


def assert_serves_newest(seen: dict[str, Any]) -> None:
    assert seen["state"] == serving(seen["newest"])


def test_follower_that_is_told_to_end_ends_its_switch_first(outside):
    assert outside["ended"]["exit code"] == -signal.SIGTERM
    assert_serves_newest(outside["ended"])


def test_pause_is_ended_although_the_first_attempt_failed(outside):
    assert_serves_newest(outside["begun in a pause, with an error"])


def test_server_that_would_not_resume_is_told_again(outside):
    assert_serves_newest(outside["an error for resume"])


def test_server_stays_on_the_version_that_it_was_told(outside):
    seen = outside["only version"]
    assert_serves_newest(seen["stayed"])
    assert seen["lines"] == [seen["stayed"]["newest"]]


def test_version_that_is_gone_is_refused_by_name(outside):
    code, errors = outside["gone"]
    assert code == EXIT_FAILED
    assert "version 1 is not in" in errors


def test_nobody_there_is_a_timeout(outside):
    code, errors = outside["no server"]
    assert code == EXIT_TIMEOUT
    assert "does not answer" in errors


def test_follower_names_what_an_engine_must_be_started_with(outside):
    _, errors = outside["no flags"]
    assert "not started for dbuffer" in errors
    assert "weight_transfer_config" in errors
    assert f"worker_extension_cls='{EXTENSION}'" in errors


def test_trainer_written_for_vllm_publishes_and_switches(outside):
    """Twice all weights, then patches."""
    assert outside["trained"]["sent"] == [
        {"tokens": tokens_of(101), "version": "1"},
        {"tokens": tokens_of(102), "version": "2"},
        {"tokens": tokens_of(103), "version": "3"},
    ]


def test_trainer_needs_nothing_but_the_init_info(outside):
    assert outside["trained"]["backend is known"]


def test_driven_server_ends_cleanly(outside):
    assert outside["exit code"] == 0
    assert outside["left over"] == []
