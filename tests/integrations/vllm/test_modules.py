"""Every family as a checkpoint, a module and a sharded module: each token as a fresh engine's.

The engine's linear layers are packed, as on a CPU, or live, as on a GPU. Each form is published in
full and as deltas, by a sender of its own, into one store. By hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_modules.py -k gemma`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.programs.vllm_modules import CASES, FORMS, LAYERS, ORDER
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
    seen = observe("vllm_modules.py", tmp_path, name, layers)
    fresh = seen["fresh"]
    for one, other in ((0, 1), (1, 2)):
        assert all(a != b for a, b in zip(fresh[one], fresh[other], strict=True))
    if refused := CASES[name].refused:
        for _, error, answers in itertools.chain(*seen["published"].values()):
            assert refused in error
            assert answers == fresh[0]
        return
    for form, (kind, numbers) in itertools.product(FORMS, ORDER.items()):
        assert seen["published"][f"{form}, {kind}"] == [
            [kind == "delta" and place in (1, 2), None, fresh[number]]
            for place, number in enumerate(numbers)
        ]
    num_switches = sum(map(len, seen["published"].values()))
    record_property("switches to families in all forms", num_switches)
