"""Engines that follow deltas for long, against fresh ones on what the trainer has by then.

Each case is a program of its own. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_deltas.py`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.programs.vllm_deltas import NUM_SWITCHES
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM

MOUNTS = ["local", "network"]
MODELS = ["qwen3 float32 live", "qwen3 bfloat16 packed", "tied-qwen2 float32 live"]


@IN_SOAKS_ALONE
@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize("model", MODELS)
def test_after_many_deltas_an_engine_answers_as_a_fresh_one(
    tmp_path, model, mount, record_property
):
    env = environment(processes=False, DBUFFER_MOUNT=mount)
    seen = observe("vllm_deltas.py", tmp_path, model, env=env)
    assert seen["switched"] == seen["fresh"]
    answers = [seen["at first"], *seen["fresh"]]
    assert all(one != other for one, other in itertools.pairwise(answers))
    # The first version is whole, and so is one in 64 on a network.
    assert seen["deltas"] >= NUM_SWITCHES - 1 - NUM_SWITCHES // 64
    assert seen["patched"] > NUM_SWITCHES // 2
    record_property("switches of engines to deltas", NUM_SWITCHES)
