"""Versions that hold a part of a model, in real vLLM engines, against fresh ones on the whole.

With linear layers packed as vLLM does on a CPU and live as on a GPU, tied embeddings and experts.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_engines_take_whole_layers_and_refuse_parts_of_one(tmp_path):
    observe("vllm_partial.py", tmp_path)
