"""Layers that vLLM loads in its own ways, in real engines, against fresh ones on those weights.

int8 layers, which are kernels with scales on a CPU; scales of quantised caches, which a checkpoint
may lack; vLLM's Transformers backend, whose layers are half transformers' own; heads with a bias,
and one that is tied to an embedding which is not vLLM's. What vLLM's reload would not load right is
refused.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_engines_switch_layers_of_all_kinds_or_refuse_them(tmp_path):
    observe("vllm_layers.py", tmp_path)
