"""``dbuffer demo``."""

from __future__ import annotations

import os
import warnings

from dbuffer.errors import DBufferError
from dbuffer.runtime.extras import needed_for
from dbuffer.tools.terminal import print_line

_ENVIRONMENT = {
    # With two threads, the median pause was 62 ms instead of 18 ms: the model is small. On 2 cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # No logs between the demo's lines.
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Settings that torch and vLLM read when they are imported, here and in the engine's process."""


def demo() -> None:
    """Train a tiny model by reinforcement learning with a real vLLM engine.

    It takes one to three minutes. The engine follows the trainer through a store: the reward only
    climbs if the weights reach it. Exit code 1 if at the end its greedy answers differ from those
    of a fresh engine on the final checkpoint.
    """
    os.environ |= _ENVIRONMENT | os.environ
    warnings.simplefilter("ignore")
    with needed_for("`dbuffer demo`"):
        from dbuffer.tools.demo import run_demo

        is_success = run_demo()
    if not is_success:
        raise DBufferError("the engine did not follow its trainer")
    print_line("success: the engine followed its trainer")
