"""Atropos' weight bridge over a store: a trainer on the CPU, and a stock vLLM server that follows.

``python -m dbuffer.examples.atropos`` trains a tiny Qwen3 on a vLLM server's answers. Its
parameters live in the store, so that an update copies nothing before the server can have it. At the
end the server must answer as an engine does that was started from the final checkpoint. With
``--broken-sync`` it is never told of an update, and answers as at the start.
"""
# ruff: noqa: E402 - what is imported reads the environment

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dbuffer.examples.common import (
    ENGINE,
    Answer,
    answer_greedily,
    are_equal,
    run_example,
    say,
    set_environment,
    start_engine,
)

set_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")  # the last engine is this process's own

import httpx

from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge
from dbuffer.tools.demo.policy import (
    COMPLETION_TOKENS,
    PolicyGradient,
    Task,
    make_model,
    save_checkpoint,
)
from dbuffer.tools.demo.records import Tokens

NUM_STEPS = 4
START_TIMEOUT_S = 240.0
UPDATE_TIMEOUT_S = 120.0
MAX_NUM_SEQS = 16


@contextlib.contextmanager
def serve(checkpoint: Path) -> Iterator[httpx.Client]:
    """A stock vLLM server in development mode, whose workers can load from a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in ENGINE.items()} | {
        "--model": str(checkpoint),
        "--served-model-name": "policy",
        "--port": str(port),
        "--max-num-seqs": str(MAX_NUM_SEQS),
        "--uvicorn-log-level": "error",
        "--worker-extension-cls": "dbuffer.integrations.vllm.WorkerExtension",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--no-use-tqdm-on-load", "--skip-tokenizer-init"]
    command += [word for pair in options.items() for word in pair]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(  # noqa: S603 - our own command
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        import vllm  # noqa: F401 - needed at the end; it takes a while, and so does the server

        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=UPDATE_TIMEOUT_S) as client:
            wait_ready(process, client)
            yield client
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").is_success:
                return
        time.sleep(0.2)
    raise TimeoutError(f"the server was not ready within {START_TIMEOUT_S:g} s")


def ask(client: httpx.Client, prompts: Tokens, temperature: float) -> list[Answer]:
    """The server's answers, one to each prompt."""

    def ask_one(prompt: tuple[int, ...]) -> Answer:
        question = {
            "model": "policy",
            "prompt": list(prompt),
            "max_tokens": COMPLETION_TOKENS,
            "temperature": temperature,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,
        }
        response = client.post("/v1/completions", json=question)
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        return Answer(tuple(choice["token_ids"]), sum(choice["logprobs"]["token_logprobs"]))

    with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
        return list(pool.map(ask_one, prompts))


def train(
    directory: Path, checkpoint: Path, server: httpx.Client, *, broken_sync: bool
) -> list[Answer]:
    """Train on the server's answers; what it answers at the end."""
    task = Task(seed=0)
    config = BridgeConfig(
        model_name=str(checkpoint),
        device="cpu",
        vllm_api_url=str(server.base_url),
        timeout_seconds=UPDATE_TIMEOUT_S,
    )
    with VLLMWeightBridge(config, store=directory / "store") as bridge:
        model = bridge.get_trainable_model()
        learner = PolicyGradient(model)
        for step in range(1, NUM_STEPS + 1):
            answers = tuple(a.tokens for a in ask(server, task.training_prompts, 1.0))
            rewards = task.rewards(answers)
            learner.update(task.training_prompts, answers, rewards)
            before = time.perf_counter()
            if not broken_sync:
                bridge.notify_update()
            update_ms = 1e3 * (time.perf_counter() - before)
            say(f"step {step}: reward {rewards.mean():.3f}, update {update_ms:.0f} ms")
        final = ask(server, task.prompts, 0.0)
    # After the bridge has let it go: the model keeps its values, in ordinary memory.
    save_checkpoint(model, directory / "final")
    return final


def run(directory: Path, arguments: argparse.Namespace) -> bool:
    """Train; whether the server came along."""
    checkpoint = save_checkpoint(make_model(seed=0), directory / "initial")
    say("starting a vLLM server")
    with serve(checkpoint) as server:
        final = train(directory, checkpoint, server, broken_sync=arguments.broken_sync)
    say("asking a fresh engine, started from the final checkpoint")
    engine = start_engine(directory / "final", max_num_seqs=MAX_NUM_SEQS)
    fresh = answer_greedily(engine, Task(seed=0).prompts, COMPLETION_TOKENS)
    is_equal = are_equal(final, fresh, 1e-2)
    outcome = "are equal" if is_equal else "differ"
    say(f"the server's greedy answers and the fresh engine's {outcome}")
    return is_equal


if __name__ == "__main__":
    sys.exit(run_example("atropos", __doc__, run))
