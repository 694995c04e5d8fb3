"""Pipeline stages and spread experts, whose steps vLLM's CPU build cannot run: what each rank gets.

Two ranks of our own over gloo, each with vLLM's own configuration, groups, loader and model of its
stage (or of its half of the experts), follow a store as an engine's workers do. What they have
after each switch is compared with what vLLM makes of the checkpoint, to the byte. What one rank
cannot take, no rank takes.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_each_rank_has_after_switches_what_vllm_gives_it(tmp_path):
    observe("vllm_stages.py", tmp_path)
