"""A following `AsyncLLM`, under load: whose tokens a response carries, and what it says of them.

A trainer in a process of its own publishes models whose every token reveals their version, at full
speed, while requests run. The engine core is a process too, and with two ranks each worker is one.
The program goes through what befalls such an engine, the last of it being its death.
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

pytestmark = [*NEEDS_VLLM, ANSWERS_TELL_VERSIONS]


def test_tokens_of_an_engine_are_of_the_versions_that_it_reports(directory, record_property):
    # Functions are sent to workers, to make them fail. The fresh engines, which an `LLM` is, run
    # in the program itself; an `AsyncLLM` has its processes in any case.
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    for figure in observe("vllm_async.py", directory, "one-rank", env=env).items():
        record_property(*figure)


@IN_SOAKS_ALONE
@pytest.mark.parametrize("role", ["two-ranks", "short-of-cache"])
def test_ranks_switch_as_one_and_preempted_requests_go_on(shm_path, role, record_property):
    """Two ranks have a model of 100 MB, and the extension's way.

    With pause="wait", vLLM holds preempted requests for ones that have not begun.
    """
    env = environment(processes=role == "two-ranks", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    for figure in observe("vllm_async.py", shm_path, role, env=env).items():
        record_property(*figure)
