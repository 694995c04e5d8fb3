"""LightRFT's BroadcastManager: real trainers of two ranks, and a real vLLM engine of two ranks.

One program, started by torchrun, has the engine in the trainer's processes as LightRFT has it.
"""

from __future__ import annotations

import shutil

import pytest

from tests.programs import lightrft_ranks
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe
from tests.support.stores import SHARED_MEMORY

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_engine_of_all_ranks_is_updated(tmp_path):
    try:
        default_store = observe(lightrft_ranks.__file__, tmp_path, env=environment(processes=False))
        shutil.rmtree(default_store)
    finally:
        for path in SHARED_MEMORY.glob(f"{lightrft_ranks.shared_memory_name(tmp_path)}*"):
            path.unlink()  # of ranks that were killed
