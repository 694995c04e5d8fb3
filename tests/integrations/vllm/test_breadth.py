"""Families, quantised engines and features in real engines: each token as a fresh one answers.

Each case is a program of its own: a crash in a kernel of one is nobody else's. They run in soaks;
by hand, `DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_breadth.py -k gemma`.
"""

from __future__ import annotations

import pytest

from tests.programs.vllm_breadth import (
    BFLOAT16,
    CASES,
    FAMILIES,
    NUM_STREAMS,
    ORDER,
    STREAM_TOKENS,
    TWO_RANKS,
)
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM
UNDER_LOAD = [
    name
    for number, name in enumerate(sorted(FAMILIES | BFLOAT16))
    if not (CASES[name].is_embedding or CASES[name].refused)
    and number % 2
    # Its latent attention answers by who else is asked on this CPU, in fresh engines, too: four
    # prompts at once and one by one differed from the first tokens on.
    and not name.startswith("deepseek_v2")
] + list(TWO_RANKS)
"""Every second one: of most families, either of the two dtypes."""


@IN_SOAKS_ALONE
@pytest.mark.parametrize("name", CASES)
def test_switched_engine_answers_as_a_fresh_one(tmp_path, name, record_property):
    env = environment(processes="tensor_parallel_size" in CASES[name].arguments)
    seen = observe("vllm_breadth.py", tmp_path, name, env=env)
    first, second = seen["fresh"]
    assert all(one != other for one, other in zip(first, second, strict=True))
    if CASES[name].media:  # what was seen or heard has a part in the answers
        assert len(set(map(tuple, first))) > 1
        assert len(set(map(tuple, second))) > 1
    if refused := CASES[name].refused:
        assert all(refused in error for error, _ in seen["switched"])
        assert all(answers == first for _, answers in seen["switched"])
    else:
        assert seen["switched"] == [[None, seen["fresh"][number]] for number in ORDER]
        record_property("switches of engines of many families", len(ORDER))


@IN_SOAKS_ALONE
@pytest.mark.parametrize("name", UNDER_LOAD)
def test_switched_under_load_answers_as_a_fresh_one(tmp_path, name, record_property):
    """By copies alone and by vLLM's reload, while it answers others."""
    seen = observe(
        "vllm_breadth.py",
        tmp_path,
        name,
        "under load",
        env=environment(processes=name in TWO_RANKS),
    )
    first, second = seen["fresh"]
    assert all(one != other for one, other in zip(first, second, strict=True))
    for plan in ("with a plan", "by reloads"):
        assert seen[plan]["switched"] == [seen["fresh"][number] for number in ORDER]
        assert seen[plan]["tokens meanwhile"] >= len(ORDER) * NUM_STREAMS * STREAM_TOKENS
    record_property("switches of engines of many families, under load", 2 * len(ORDER))
