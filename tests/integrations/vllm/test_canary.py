"""A canary that prompts in its configuration judge: an ``LLM``, and a server."""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_prompts_in_the_configuration_judge_from_the_start(tmp_path):
    observe("vllm_canary.py", tmp_path, env=environment(processes=True))
