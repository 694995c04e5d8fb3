"""A vLLM server as a canary, whose follower is killed in its probe, and started again.

The trainer, the server and its follower are three processes. The model reveals its version. Prompts
judge instead of a probe in an ``LLM``, a server that follows by itself, and one that another
process follows.
"""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_a_version_that_the_probe_refuses_is_left_and_skipped(tmp_path):
    observe("vllm_canary.py", tmp_path, env=environment(processes=True))


def test_prompts_in_the_configuration_judge_from_the_start(tmp_path):
    observe("vllm_canary.py", tmp_path, "prompts", env=environment(processes=True))
