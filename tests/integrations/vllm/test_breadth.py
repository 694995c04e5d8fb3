"""Quantised engines and features in real engines, and families under load and on two ranks.

Each token is as a fresh one answers; `test_modules.py` has all families on one rank. Each case is a
program of its own: a crash in a kernel ends no other. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_breadth.py -k gemma`.
"""

from __future__ import annotations

import pytest

from tests.programs.vllm_breadth import BFLOAT16, CASES, FAMILIES, HYBRID, TWO_RANKS
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, IN_SOAKS_ALONE]
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


@pytest.mark.parametrize(
    "arguments",
    [
        *([name] for name in sorted(CASES.keys() - (FAMILIES | BFLOAT16 | HYBRID))),
        *([name, "under load"] for name in UNDER_LOAD),
    ],
    ids=", ".join,
)
def test_switched_engine_answers_as_a_fresh_one(tmp_path, arguments, record_property):
    env = environment(processes="tensor_parallel_size" in CASES[arguments[0]].arguments)
    for figure in observe("vllm_breadth.py", tmp_path, *arguments, env=env).items():
        record_property(*figure)
