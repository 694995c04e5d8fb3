"""Quantised engines and features in real engines, and families on two ranks.

Each token is as a fresh one answers; `test_modules.py` has all families on one rank. Each case is a
program of its own: a crash in a kernel ends no other. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_breadth.py -k gemma`.
"""

from __future__ import annotations

import pytest

from tests.programs.vllm_breadth import BFLOAT16, CASES, FAMILIES, HYBRID
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, IN_SOAKS_ALONE]


@pytest.mark.parametrize("name", sorted(CASES.keys() - (FAMILIES | BFLOAT16 | HYBRID)))
def test_switched_engine_answers_as_a_fresh_one(tmp_path, name, record_property):
    env = environment(processes="tensor_parallel_size" in CASES[name].arguments)
    for figure in observe("vllm_breadth.py", tmp_path, name, env=env).items():
        record_property(*figure)
