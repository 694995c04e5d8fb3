"""Adapters in real vLLM engines: merged into what an engine follows, and loaded by the engine.

The base model of adapters is switched by copies alone. An adapter is no model, and no model is an
adapter.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe
from tests.support.peft_parts import NEEDS_PEFT

pytestmark = [*NEEDS_VLLM, *NEEDS_PEFT]


def test_engines_follow_merged_models_and_load_adapters(tmp_path):
    observe("vllm_lora.py", tmp_path)
