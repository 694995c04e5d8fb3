"""Atropos' weight bridge over a store: a trainer on the CPU, and a stock vLLM server that follows.

``python -m dbuffer.examples.atropos`` trains a tiny Qwen3 on a vLLM server's answers. Its
parameters live in the store, so that an update copies nothing before the server can have it. At the
end the server must answer as an engine does that was started from the final checkpoint. With
``--broken-sync`` it is never told of an update, and answers as at the start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from dbuffer.examples.common import are_equal, run_example, say
from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge
from dbuffer.tools.demo import policy
from dbuffer.tools.demo.engines import VLLMEngine, engine_dtype
from dbuffer.tools.demo.process import START_TIMEOUT_S

NUM_STEPS = 4
UPDATE_TIMEOUT_S = 120.0


def run(directory: Path, *, broken_sync: bool) -> bool:
    """Train on a server's answers; whether it came along."""
    task = policy.Task(seed=0)
    checkpoint = policy.save_checkpoint(policy.make_model(seed=0), directory / "initial")
    say("starting a vLLM server")
    with serve(checkpoint) as server:
        config = BridgeConfig(
            model_name=str(checkpoint),
            device="cpu",
            vllm_api_url=str(server.base_url),
            timeout_seconds=UPDATE_TIMEOUT_S,
        )
        with VLLMWeightBridge(config, store=directory / "store") as bridge:
            model = bridge.get_trainable_model()
            learner = policy.PolicyGradient(model)
            for step in range(1, NUM_STEPS + 1):
                answers = ask(server, task.training_prompts, temperature=1.0)
                rewards = task.rewards(answers)
                learner.update(task.training_prompts, answers, rewards)
                before = time.perf_counter()
                if not broken_sync:
                    bridge.notify_update()
                update_ms = 1e3 * (time.perf_counter() - before)
                say(f"step {step}: reward {rewards.mean():.3f}, update {update_ms:.0f} ms")
            final = ask(server, task.prompts, temperature=0.0)
    say("asking a fresh engine, started from the final checkpoint")
    # The bridge has let it go by now: the model keeps its values, in ordinary memory.
    fresh = VLLMEngine(policy.save_checkpoint(model, directory / "final"), seed=0)
    expected = fresh.sample(task.prompts, greedy=True)
    return are_equal(final, expected, "the server's greedy answers and the fresh engine's")


@contextlib.contextmanager
def serve(checkpoint: Path) -> Iterator[httpx.Client]:
    """A stock vLLM server in development mode, whose workers can load from a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint), "--served-model-name", "policy", "--port", str(port)),
        *("--worker-extension-cls", "dbuffer.integrations.vllm.WorkerExtension"),
        *("--dtype", engine_dtype(), "--max-model-len", "256", "--block-size", "32"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--skip-tokenizer-init"),
        *("--uvicorn-log-level", "error", "--no-use-tqdm-on-load"),
    ]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(  # noqa: S603 - our own command
        command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=UPDATE_TIMEOUT_S) as client:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not answers_at_all(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start (exit code {process.poll()})")
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers_at_all(client: httpx.Client) -> bool:
    """Whether the server is ready."""
    try:
        return client.get("/health").is_success
    except httpx.HTTPError:
        return False


def ask(client: httpx.Client, prompts: policy.Tokens, temperature: float) -> policy.Tokens:
    """The server's answers, one to each prompt."""
    question = {
        "model": "policy",
        "prompt": prompts,
        "max_tokens": policy.COMPLETION_TOKENS,
        "temperature": temperature,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=question)
    choices = response.raise_for_status().json()["choices"]
    return tuple(tuple(choice["token_ids"]) for choice in choices)


if __name__ == "__main__":
    run_example(__doc__, run)
