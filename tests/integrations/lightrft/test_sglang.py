"""LightRFT's BroadcastManager with a real SGLang engine, two ranks of FSDP2, LightRFT's names."""

from __future__ import annotations

import pytest

from tests.programs import lightrft_sglang
from tests.support.engines.sglang_engines import NEEDS_SGLANG, WAIT_S, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_SGLANG, IN_SOAKS_ALONE, pytest.mark.timeout(3 * WAIT_S)]


def test_engine_answers_as_a_fresh_one_when_all_ranks_return(tmp_path):
    observe(lightrft_sglang.__file__, tmp_path)
