"""An ``LLM`` with its engine in another process, which sleeps, loads by itself, and dies."""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_lost_weights_come_back_and_calls_end_with_the_engine(tmp_path):
    env = environment(processes=True, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    observe("vllm_dead_core.py", tmp_path, env=env)
