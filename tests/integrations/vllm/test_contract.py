"""vLLM 0.23 and 0.24: the contract that their documents give for a weight transfer's engine."""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_contract(tmp_path):
    observe("vllm_contract.py", tmp_path)
