"""Answers of a pooling model whose requests meet a switch: each is of one version, or an error.

An `AsyncLLM` computes long prompts in chunks, and a switch comes between two of them.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    environment,
    observe,
)

pytestmark = [*NEEDS_VLLM, ANSWERS_TELL_VERSIONS]


def test_no_answer_has_rows_of_two_versions(tmp_path):
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    observe("vllm_pooling.py", tmp_path, env=env)
