"""Data-parallel replicas of a real vLLM: dense ones switch each by itself, others as one engine.

`vllm_replicas.py` drives in two roles an `AsyncLLM` of two replicas; in a third, a server of two
replicas and two API servers; in a fourth, two such servers that have four replicas between them.
The dense model reveals its version: an answer's tokens say from which weights each of them came.
Replicas of a model with experts make each step together; their tokens are compared with those of
fresh engines of one replica.
"""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    environment,
    observe,
)
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, IN_SOAKS_ALONE, ANSWERS_TELL_VERSIONS]


@pytest.mark.parametrize("role", ["dense", "lockstep", "served", "hybrid"])
def test_replicas(role, tmp_path_factory):
    # Functions are sent to workers; the fresh engines are in the program itself.
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    observe("vllm_replicas.py", tmp_path_factory.mktemp(role), role, env=env)
