"""What the examples share: an environment, a vLLM engine, how they begin and how they end."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import vllm

    from dbuffer.tools.demo.records import Tokens

SEED: dict[str, Any] = {"type": int, "default": 0, "help": "default: 0"}

MIN_CLIMB = 0.1
"""What a reward must gain: ten times what two averages of 4 steps differ by without learning."""

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "block_size": 32,  # some prompts are longer: a stale prefix cache would show in those
    "kv_cache_memory_bytes": 64 << 20,
}
"""Options of a vLLM engine for the tiny model."""


def set_environment(**more: str) -> None:
    """Keep vLLM and torch quiet and on one core. Call it before they are imported."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # a core for the engine, and one for the trainer
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_LOGS": "-torch._library",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in (environment | more).items():
        os.environ.setdefault(name, value)


def say(text: str) -> None:
    """Print a line at once and in one piece: ranks share the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_example(
    name: str,
    about: str | None,
    run: Callable[[Path, argparse.Namespace], bool],
    **options: dict[str, Any],
) -> int:
    """Run an example in a temporary directory; its exit code.

    Args:
        name: of its module.
        about: its docstring.
        run: takes the directory and the command line's options; whether it worked.
        **options: of the command line besides ``--broken-sync``; each as ``add_argument`` takes it.
    """
    import torch

    parser = argparse.ArgumentParser(prog=f"python -m dbuffer.examples.{name}", description=about)
    parser.add_argument("--broken-sync", action="store_true", help="hold new weights back")
    for option, details in options.items():
        parser.add_argument(f"--{option}", **details)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"dbuffer-{name}-") as directory:
        is_success = run(Path(directory), arguments)
    say(f"{'success' if is_success else 'failed'} in {time.monotonic() - started:.0f} s")
    return 0 if is_success else 1


def has_worked(rewards: Sequence[float], num_averaged: int, what: str, is_equal: bool) -> bool:
    """Print whether the reward climbed, and whether ``what`` are equal; whether both is so."""
    first = statistics.fmean(rewards[:num_averaged])
    last = statistics.fmean(rewards[-num_averaged:])
    has_climbed = last - first >= MIN_CLIMB
    say(
        f"reward {first:.3f} to {last:.3f}: {'climbed' if has_climbed else 'did not climb'}; "
        f"{what} {'are equal' if is_equal else 'differ'}"
    )
    return has_climbed and is_equal


def start_engine(checkpoint: Path, **options: Any) -> vllm.LLM:
    """A vLLM engine in this program."""
    import vllm

    return vllm.LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        **{**ENGINE, **options},
    )


class Answer(NamedTuple):
    """What an engine answers a prompt with."""

    tokens: tuple[int, ...]
    log_prob: float


def answer_greedily(engine: vllm.LLM, prompts: Tokens, num_tokens: int) -> list[Answer]:
    """What the engine's weights say, without chance."""
    import vllm

    parameters = vllm.SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0
    )
    questions = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = [one.outputs[0] for one in engine.generate(questions, parameters, use_tqdm=False)]
    return [Answer(tuple(output.token_ids), output.cumulative_logprob) for output in outputs]


def are_equal(some: Sequence[Answer], others: Sequence[Answer], tolerance: float) -> bool:
    """Whether the answers come from the same weights.

    Weights of one step before may give the same tokens, with other probabilities.
    """
    return all(
        one.tokens == other.tokens and abs(one.log_prob - other.log_prob) < tolerance
        for one, other in zip(some, others, strict=True)
    )
