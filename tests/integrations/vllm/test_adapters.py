"""A vLLM server that follows two stores of adapters.

Twenty streams ask it while a trainer publishes a version of each adapter a second. The trainer is
killed, and another one goes on. All tokens equal those of an engine that loads the version as peft
saves it.
"""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)
from tests.support.peft_parts import NEEDS_PEFT
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, *NEEDS_PEFT, pytest.mark.timeout(2 * TIMEOUT_S)]


@ANSWERS_TELL_VERSIONS
def test_each_answer_is_of_one_version_of_its_adapter(directory):
    observe("vllm_adapters.py", directory, "follow", env=environment(processes=True))


@IN_SOAKS_ALONE
def test_server_without_a_slot_for_the_next_version_does_not_start(directory):
    observe("vllm_adapters.py", directory, "refused", env=environment(processes=True))
