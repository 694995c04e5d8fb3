"""Every family as a checkpoint, a module and a sharded module: each token as a fresh engine's.

The engine's linear layers are packed, as on a CPU, or live, as on a GPU. Each form is published in
full and as deltas, by a sender of its own, into one store. By hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_modules.py -k gemma`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.programs.vllm_modules import CASES, LAYERS
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM
IN_EVERY_RUN = [("mixtral", "live")]
"""Its experts are fused in the module."""


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(*one, marks=[] if one in IN_EVERY_RUN else IN_SOAKS_ALONE)
        for one in itertools.product(CASES, LAYERS)
    ],
)
def test_engine_answers_as_a_fresh_one(tmp_path, name, layers, record_property):
    for figure in observe("vllm_modules.py", tmp_path, name, layers).items():
        record_property(*figure)
