"""Atropos' weight bridge over a store: a trainer on the CPU, and a stock vLLM server that follows.

``python -m dbuffer.examples.atropos`` trains a tiny Qwen3 on a vLLM server's answers. Its
parameters live in the store, so that an update copies nothing before the server can have it. At the
end the server must answer as an engine does that was started from the final checkpoint. With
``--broken-sync`` it is never told of an update, and answers as at the start.
"""
# ruff: noqa: E402, T201 - what is imported reads the environment; a program prints

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The last engine is this process's own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import httpx
import torch
from transformers.utils import logging as transformers_logging

from dbuffer.demo.policy import COMPLETION_TOKENS, PolicyGradient, Task, make_model, save_checkpoint
from dbuffer.demo.records import Tokens
from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge

_SERVER_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}

NUM_STEPS = 4
START_TIMEOUT_S = 240.0
UPDATE_TIMEOUT_S = 120.0
MAX_NUM_SEQS = 16
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": MAX_NUM_SEQS,
    "block_size": 32,  # some prompts are longer: a stale prefix cache would show in those
    "kv_cache_memory_bytes": 64 << 20,
}


class Answer(NamedTuple):
    """What an engine answers a prompt with."""

    tokens: tuple[int, ...]
    log_prob: float


class Server:
    """A stock vLLM server in development mode, whose workers can load from a store."""

    def __init__(self, checkpoint: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {f"--{name.replace('_', '-')}": str(value) for name, value in _ENGINE.items()}
        extension = "dbuffer.integrations.vllm.WorkerExtension"
        options |= {"--model": str(checkpoint), "--served-model-name": "policy"}
        options |= {"--port": str(port), "--worker-extension-cls": extension}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += ["--no-use-tqdm-on-load", "--uvicorn-log-level", "error"]
        command += ["--skip-tokenizer-init", *(word for pair in options.items() for word in pair)]
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            env=os.environ | _SERVER_ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._client = httpx.Client(base_url=self.url, timeout=UPDATE_TIMEOUT_S)

    def wait_ready(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"the server was not ready within {START_TIMEOUT_S:g} s")

    def answer(self, prompts: Tokens, temperature: float) -> list[Answer]:
        """Its answers, one to each prompt."""
        with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
            return list(pool.map(lambda prompt: self._answer(prompt, temperature), prompts))

    def _answer(self, prompt: tuple[int, ...], temperature: float) -> Answer:
        question = {"model": "policy", "prompt": list(prompt), "max_tokens": COMPLETION_TOKENS}
        question |= {"temperature": temperature, "ignore_eos": True, "detokenize": False}
        question |= {"return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        response = self._client.post("/v1/completions", json=question)
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        return Answer(tuple(choice["token_ids"]), sum(choice["logprobs"]["token_logprobs"]))

    def close(self) -> None:
        """End it and all its processes."""
        self._client.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def started(checkpoint: Path) -> Iterator[Server]:
    """A server for a ``with`` block."""
    server = Server(checkpoint)
    try:
        import vllm  # noqa: F401 - needed at the end; it takes a while, and so does the server

        server.wait_ready()
        yield server
    finally:
        server.close()


def answer_afresh(checkpoint: Path, prompts: Tokens) -> list[Answer]:
    """What an engine that was started from a checkpoint answers greedily."""
    import vllm

    llm = vllm.LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        **_ENGINE,
    )
    parameters = vllm.SamplingParams(
        temperature=0.0, max_tokens=COMPLETION_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    questions = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = [one.outputs[0] for one in llm.generate(questions, parameters, use_tqdm=False)]
    return [Answer(tuple(output.token_ids), output.cumulative_logprob) for output in outputs]


def train(directory: Path, checkpoint: Path, server: Server, *, broken_sync: bool) -> list[Answer]:
    """Train on the server's answers; what it answers at the end."""
    task = Task(seed=0)
    config = BridgeConfig(
        model_name=str(checkpoint),
        device="cpu",
        vllm_api_url=server.url,
        timeout_seconds=UPDATE_TIMEOUT_S,
    )
    with VLLMWeightBridge(config, store=directory / "store") as bridge:
        model = bridge.get_trainable_model()
        learner = PolicyGradient(model)
        for step in range(1, NUM_STEPS + 1):
            answers = tuple(a.tokens for a in server.answer(task.training_prompts, 1.0))
            rewards = task.rewards(answers)
            learner.update(task.training_prompts, answers, rewards)
            before = time.perf_counter()
            if not broken_sync:
                bridge.notify_update()
            update_ms = 1e3 * (time.perf_counter() - before)
            print(f"step {step}: reward {rewards.mean():.3f}, update {update_ms:.0f} ms")
        final = server.answer(task.prompts, 0.0)
    # After the bridge has let it go: the model keeps its values, in ordinary memory.
    save_checkpoint(model, directory / "final")
    return final


def run(directory: Path, *, broken_sync: bool) -> bool:
    """Train, print how it goes, and return whether the server has followed."""
    checkpoint = save_checkpoint(make_model(seed=0), directory / "initial")
    print("starting a vLLM server")
    with started(checkpoint) as server:
        final = train(directory, checkpoint, server, broken_sync=broken_sync)
    print("asking a fresh engine, started from the final checkpoint")
    fresh = answer_afresh(directory / "final", Task(seed=0).prompts)
    is_equal = all(
        one.tokens == other.tokens and abs(one.log_prob - other.log_prob) < 1e-2
        for one, other in zip(final, fresh, strict=True)
    )
    outcome = "are equal" if is_equal else "differ"
    print(f"the server's greedy answers and the fresh engine's {outcome}")
    return is_equal


def main() -> int:
    """Run with the command line's options; whether it worked, as an exit status."""
    parser = argparse.ArgumentParser(prog="python -m dbuffer.examples.atropos", description=__doc__)
    parser.add_argument("--broken-sync", action="store_true", help="never tell of an update")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dbuffer-atropos-") as directory:
        has_worked = run(Path(directory), broken_sync=arguments.broken_sync)
    print(f"{'success' if has_worked else 'failed'} in {time.monotonic() - began:.0f} s")
    return 0 if has_worked else 1


if __name__ == "__main__":
    sys.exit(main())
