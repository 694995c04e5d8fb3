"""Engines that speculate with heads upon the target's own layers, against fresh ones.

A version is the target's. What a draft proposes shows whether it computes with layers that it
shares with the target, and which of them it then has: proposals are compared, beside all tokens.
Each case is a program of its own. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_drafts.py -k eagle`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.programs.vllm_drafts import CASES, ORDER
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM
SHARES = {
    "eagle": [True, True],
    "eagle3": [True, True],
    "eagle3 with a head": [True, False],
    "draft model": [False, False],
}
"""Whether a draft has the target's embedding, and its head."""


@IN_SOAKS_ALONE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_engines_that_speculate_answer_as_fresh_ones(tmp_path, name, dtype, record_property):
    if importlib.util.find_spec(CASES[name].needs) is None:
        pytest.skip(f"needs {CASES[name].needs}")
    env = environment(processes=False)
    seen = observe("vllm_drafts.py", tmp_path, name, dtype, env=env)
    first, second = seen["fresh"]
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert [tokens for tokens, _ in seen["speculating"]] == seen["fresh"]
    assert [[error, tokens] for error, (tokens, _) in seen["switched"]] == [
        [None, seen["fresh"][number]] for number in ORDER
    ]
    assert seen["late reloads"] == 0
    judge_proposals(name, seen)
    record_property("switches of engines that speculate", len(ORDER))


def judge_proposals(name: str, seen: dict[str, Any]) -> None:
    fresh = [proposals for _, proposals in seen["speculating"]]
    switched = [proposals for _, (_, proposals) in seen["switched"]]
    assert fresh[0] != fresh[1]
    if name == "suffix":  # several tokens in a step: it proposes what a version before has answered
        assert all(len(proposals) < 12 for proposals in switched[2:])
        return
    if name == "mtp":  # the draft is as the engine began with it, whatever a version brings
        assert all(
            (proposals == fresh[number]) == (number == 0)
            for number, proposals in zip(ORDER, switched, strict=True)
        )
        return
    assert switched == [fresh[number] for number in ORDER]
    assert seen["shares"] == SHARES.get(name)
    if name == "eagle":  # several tokens in a step: what it proposes is often right
        assert all(len(proposals) < 12 for proposals in (*fresh, *switched))
