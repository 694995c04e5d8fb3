"""Every family as a checkpoint and a module: each token as a fresh engine's.

The engine's linear layers are packed, as on a CPU, or live, as on a GPU. Features, quantized
engines and engines of two ranks switch to checkpoints. Each case is a program of its own: a crash
in a kernel ends no other. By hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_families.py -k gemma`.
"""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from tests.programs.vllm_families import CASES
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM
IN_EVERY_RUN = [("mixtral", "live")]
"""Its experts are fused in the module."""


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(*one, marks=[] if one in IN_EVERY_RUN else IN_SOAKS_ALONE)
        for one in itertools.product(CASES, ("packed", "live"))
        if CASES[one[0]].module or one[1] == "packed"
    ],
)
def test_engine_answers_as_a_fresh_one(tmp_path, name, layers):
    if name.startswith("suffix") and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("needs arctic_inference")
    env = environment(processes="tensor_parallel_size" in CASES[name].arguments)
    observe("vllm_families.py", tmp_path, name, layers, env=env)
