"""Pipeline stages and spread experts, whose steps vLLM's CPU build cannot run: what each rank gets.

Two ranks of our own over gloo, each with vLLM's own configuration, groups, loader and model of its
stage (or of its half of the experts), follow a store as an engine's workers do. What they have
after each switch is compared with what vLLM makes of the checkpoint, to the byte.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.vllm_stages import CASES, EMBEDDING, HEAD, ORDER, REFUSED, TIED
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM

DONE = ["", ""]
"""What both ranks say."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return observe("vllm_stages.py", tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_after_switches_what_vllm_gives_it(observed, case):
    seen = observed[case]
    first, second = seen["fresh"]
    for rank in (0, 1):
        assert first[rank].keys() == second[rank].keys()
        for name in first[rank]:
            if name.endswith("weight") and ("proj" in name or "experts" in name):
                assert first[rank][name] != second[rank][name]
    assert first[0] != first[1]
    assert seen["begun"] == DONE
    assert seen["switched"] == [[DONE, seen["fresh"][number]] for number in ORDER]
    assert observed["ends"] == [0, 0]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_cannot_take_no_rank_takes(observed, case, name):
    """A stage skips names of the other one; what no rank has taken is refused anyway."""
    answers, digests = observed[case]["refused"][name]
    for answer in answers:
        assert name in answer
        assert "no rank was touched" in answer
    assert digests == observed[case]["fresh"][ORDER[-1]]


def test_a_head_that_no_stage_reads_is_redundant_if_it_is_equal(observed):
    seen = observed[TIED]
    assert seen["equal head"] == [DONE, seen["fresh"][0]]
    for answers, digests in seen["other heads"]:
        for answer in answers:
            assert f"{HEAD} (it differs from {EMBEDDING}" in answer
            assert "no rank was touched" in answer
        assert digests == seen["fresh"][0]


@pytest.mark.parametrize("case", CASES)
def test_experts_that_move_are_refused(observed, case):
    for answer in observed[case]["balancing"]:
        assert "enable_eplb" in answer
