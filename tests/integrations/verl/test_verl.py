"""verl over a store: its actor under FSDP2 on two ranks, its rollout workers, a real vLLM server.

One program configures verl with the lines of ``docs/integrations/more.md``, and syncs: with
dbuffer's manager, with verl's own, with publishes that fail, with an actor that is killed and
started again.
The tests judge what the program saw. (Which version a worker takes is in ``test_sync``.)
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.programs import verl_syncs
from tests.programs.verl_syncs import STEPS
from tests.support import ROOT
from tests.support.engines.tiny_models import token_of
from tests.support.engines.vllm_engines import (
    PROMPTS,
    TIMEOUT_S,
    environment,
    observe,
)

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="needs verl: python3 dev.py verl"
    ),
    pytest.mark.timeout(TIMEOUT_S + 60),
]

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_platform_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # FSDP's engine is registered for that, and asks the platform
    "VLLM_TARGET_DEVICE": "cpu",  # else vLLM looks at its package's name
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module")
def observed(directory: Path) -> Any:
    env = environment(processes=True, PYTHONPATH=str(ROOT), **ENVIRONMENT)
    # Sockets of Ray's have a path of their own: theirs may not be long.
    with tempfile.TemporaryDirectory(prefix="dbuffer-ray-", ignore_cleanup_errors=True) as session:
        return observe(verl_syncs.__file__, directory, session, env=env, imports_anew=True)


def test_verl_knows_the_backend_by_configuration_alone(observed):
    assert observed["backend"] == "dbuffer.integrations.verl.checkpoint_engine"
    assert observed["manager"] == "dbuffer.integrations.verl.checkpoint_engine"
    assert observed["bases"] == "verl.checkpoint_engine.base"


def test_each_sync_is_a_version_that_the_engine_serves(observed):
    assert observed["before"] == [token_of(0)]
    for version, (step, seen) in enumerate(zip(STEPS, observed["syncs"], strict=True), 1):
        metrics = seen["metrics"]
        assert metrics["dbuffer/version"] == version
        assert metrics["dbuffer/bytes"] > 100_000
        assert metrics["dbuffer/publish_s"] > 0
        # Until its worker has the version, the engine serves the one before.
        at_pause = {"newest": version, "held": [version], "answer": [token_of(version - 1)]}
        assert seen == {
            "metrics": metrics,
            "answer": [token_of(version)],
            "told step": 1,
            "version": version,
            "global_steps": step,
            "applied": [version],
            "at pause": at_pause,
        }


def test_the_engine_answers_as_a_fresh_one_on_the_same_weights(observed):
    seen = observed["random"]
    assert seen["answers"] == seen["expected"]
    assert len({tuple(tokens) for tokens in seen["answers"]}) == len(PROMPTS)


def test_verls_own_manager_brings_them_too_and_pauses_first(observed):
    seen = observed["verl's manager"]
    assert (seen["version"], seen["answer"], seen["applied"]) == (4, [token_of(4)], [4])
    assert seen["at pause"] == {"newest": 3, "held": [None], "answer": [token_of(3)]}


@pytest.mark.parametrize(
    ("how", "error"),
    [("gathering", "ZeroDivisionError"), ("publishing", "InvalidWeightsError")],
)
def test_a_publish_that_fails_leaves_the_engine_and_the_next_sync_works(observed, how, error):
    seen = observed[how]
    assert error in seen["error"]
    assert not seen["was paused"]
    assert seen["answer"] == seen["answer before"]
    assert seen["newest"] == seen["newest before"]
    assert seen["next"]["answer"] == [token_of(seen["next"]["version"])]


def test_engines_go_on_with_what_an_actor_published_that_died_while_they_load(observed):
    seen = observed["actor lost"]
    assert (seen["version"], seen["answer"], seen["applied"]) == (7, [token_of(7)], [7])


def test_an_actor_that_is_started_again_goes_on(observed):
    seen = observed["restarted"]
    assert (seen["version"], seen["answer"], seen["applied"]) == (8, [token_of(8)], [8])
