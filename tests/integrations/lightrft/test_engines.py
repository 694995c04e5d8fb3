"""LightRFT's BroadcastManager with a server, and with an engine of one rank of the trainer only.

Of the two ranks the first has an engine in a process of its own, and knows a server by its URL.
"""

from __future__ import annotations

import pytest

from tests.programs import lightrft_engines
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, IN_SOAKS_ALONE, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_all_engines_have_the_version_when_the_call_returns(tmp_path):
    observe(lightrft_engines.__file__, tmp_path, env=environment(processes=True))
