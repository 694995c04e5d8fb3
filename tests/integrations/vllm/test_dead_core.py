"""An ``LLM`` with its engine in another process, which sleeps, loads by itself, and dies.

vLLM lets calls wait that are under way when the process dies.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.vllm_dead_core import LEVELS, SOON_S
from tests.support.engines.tiny_models import token_of
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = environment(processes=True, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    return observe("vllm_dead_core.py", tmp_path_factory.mktemp("core"), env=env)


def test_sleeping_engine_is_busy(seen):
    for level in LEVELS:
        assert seen[f"asleep {level}"].startswith("EngineBusyError: the engine's weights are asle")


def test_weights_come_back_from_light_sleep_with_their_version(seen):
    assert seen["label in sleep 1"] == "1"
    assert seen["woken 1"] == {"switched": None, "label": "1", "tokens": [token_of(1)]}


@pytest.mark.parametrize("loss", ["woken 2", "reload_weights", "load_weights"])
def test_lost_weights_are_brought_again(seen, loss):
    assert seen[loss] == {"switched": 1, "label": "1", "tokens": [token_of(1)]}


def test_lost_weights_have_no_version(seen):
    assert seen["label in sleep 2"] == "unknown"
    assert seen["label after reload_weights"] == "unknown"
    assert seen["tokens after reload_weights"] == [token_of(0)]


def test_calls_under_way_when_the_engine_dies_end_with_it(seen):
    assert seen["errors"] == dict.fromkeys(seen["calls"], "EngineEndedError")
    assert seen["ended_s"] < SOON_S
    assert seen["sync"] == "EngineEndedError: the engine is dead: its process has ended"
    # An exception on one rank would shift the answers of the others.
    [answer] = seen["bad request"]
    assert answer["error"] == "OptionError"
    assert "no request of this version of dbuffer" in answer["problem"]
