"""The bridge with real engines: a server with Atropos' routes, and a stock vLLM server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import atropos_servers
from tests.programs.atropos_servers import ANSWER_TOKENS, VERSIONS, WAIT_S
from tests.support.engines.tiny_models import token_of
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 60)]


def tokens_of(version: int) -> list[int]:
    return [token_of(version)] * ANSWER_TOKENS


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("atropos")
    env = environment(processes=True)
    found: dict[str, Any] = observe(atropos_servers.__file__, directory, "observe", env=env)
    return found


def test_server_with_the_routes_answers_with_each_update(seen):
    assert seen["routes"]["answers"] == {str(v): tokens_of(v) for v in VERSIONS}
    assert seen["routes"]["updates"] == list(VERSIONS)


def test_stock_server_answers_with_each_update_of_a_model_that_lives_in_the_store(seen):
    assert seen["stock"]["publisher"] == "ResidentModel"
    assert seen["stock"]["answers"] == {str(v): tokens_of(v) for v in VERSIONS}
    assert seen["stock"]["versions"] == [str(v) for v in VERSIONS]


def test_misfit_is_raised_at_once_and_the_server_serves_on(seen):
    kind, message = seen["stock"]["misfit"]
    assert kind == "EngineUpdateError"
    assert "lm_head.weight" in message
    assert seen["stock"]["misfit took s"] < WAIT_S / 4
    assert seen["stock"]["answer with a misfit"] == tokens_of(VERSIONS[-1])
    assert seen["stock"]["answer after a misfit"] == tokens_of(5)


def test_pause_of_a_trainer_that_was_killed_ends_before_the_next_ones_first_update(seen):
    assert not seen["stock"]["paused for the next trainer"]
    assert seen["stock"]["answer to the next trainer"] == tokens_of(VERSIONS[-1])
