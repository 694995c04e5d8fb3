"""Engines that speculate with heads upon the target's own layers, against fresh ones.

A version is the target's. What a draft proposes shows whether it computes with layers that it
shares with the target, and which of them it then has: proposals are compared, beside all tokens.
Each case is a program of its own. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_drafts.py -k eagle`.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.programs.vllm_drafts import CASES
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, IN_SOAKS_ALONE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_engines_that_speculate_answer_as_fresh_ones(tmp_path, name, dtype, record_property):
    if importlib.util.find_spec(CASES[name].needs) is None:
        pytest.skip(f"needs {CASES[name].needs}")
    for figure in observe("vllm_drafts.py", tmp_path, name, dtype).items():
        record_property(*figure)
