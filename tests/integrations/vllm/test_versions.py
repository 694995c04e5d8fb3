"""Versions over HTTP: responses tell which weights they came from, requests which they need.

The model reveals its version: each token says from which weights it came, so what a response tells
is compared, span by span, with what really computed it. Last come twenty streams of requests of
all kinds, and a version every 0.3 s.
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
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, ANSWERS_TELL_VERSIONS, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_server_tells_versions_and_serves_those_that_requests_need(directory):
    observe("vllm_versions.py", directory, "1", env=environment(processes=True))


@IN_SOAKS_ALONE
def test_no_token_of_replicas_is_labeled_wrong(tmp_path):
    """Two replicas, each on its own version, behind two API servers of which the first follows."""
    observe("vllm_versions.py", tmp_path, "2", env=environment(processes=True))
