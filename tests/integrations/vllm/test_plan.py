"""Switches by copies alone, in real engines that are not what a plan takes for granted.

Weights that something writes to while they serve, or replaces; a layer that derives something; a
reranker that computes its head from its embedding; and a model that keeps published tensors beside
its parameters.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_copies_leave_what_a_reload_does(tmp_path):
    observe("vllm_plan.py", tmp_path)
