"""The bridge with a real engine behind Atropos' routes: it answers with each update's weights."""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 60)]


def test_server_answers_with_each_update(tmp_path):
    observe("atropos_server.py", tmp_path, env=environment(processes=True))
