"""TRL's trainers over a store: real ones, on a real vLLM server that follows by itself.

One program trains a whole model; in soaks also with the weights held back, an adapter, in whose
training the server is killed and started again, and a sharded model, on two ranks of torchrun.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.programs import trl_server
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe


@pytest.mark.parametrize("role", [pytest.param("server", marks=NEEDS_VLLM)])
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_rollouts_are_of_the_weights_that_are_trained(tmp_path, role):
    more = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    # Only the server has processes of its own.
    env = environment(processes=False, **more)
    observe(trl_server.__file__, tmp_path, role, env=env)
