"""The bridge with real engines: a server with Atropos' routes, and a stock vLLM server.

Each answers with the weights of every update.
"""

from __future__ import annotations

import pytest

from tests.programs import atropos_servers
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 60)]


def test_servers_answer_with_each_update(tmp_path):
    observe(atropos_servers.__file__, tmp_path, env=environment(processes=True))
