"""A store's weights in real vLLM engines in one process, against fresh engines on those weights.

Two ways in (the backend, and no option at all), four kinds of models, two dtypes, with linear
layers packed as vLLM does on a CPU and with live parameters as on a GPU: each of these, and in a
soak every combination. Then come what vLLM's own trainers call, patches, versions that do not
fit, a busy engine, and engines that start from a store or from a local copy of one.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_switched_engines_answer_as_fresh_ones(tmp_path):
    observe("vllm_offline.py", tmp_path)
