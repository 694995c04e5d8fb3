"""Atropos' weight bridge over a store: a trainer on the CPU, and a stock vLLM server that follows.

    python examples/atropos_bridge.py

Trains a tiny random Qwen3 on the server's answers; the reward is the share of an answer's tokens
that are in a secret set. At the end the server and a fresh one on the final checkpoint must give
the same greedy answers. Needs httpx, transformers and vLLM; takes a minute on two cores.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge

VOCABULARY, ANSWER_TOKENS, NUM_STEPS = 512, 16, 4
TIMEOUT_S = 240.0

_generator = torch.Generator().manual_seed(0)
PROMPTS = torch.randint(VOCABULARY, (8, 12), generator=_generator)
QUESTIONS = PROMPTS.repeat(8, 1)
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0


def main(directory: Path) -> bool:
    """Train; return whether the server followed."""
    torch.set_num_threads(1)
    checkpoint = directory / "initial"
    make_model().save_pretrained(checkpoint)
    with serve(checkpoint, directory / "store") as server:
        config = BridgeConfig(
            model_name=str(checkpoint),
            device="cpu",
            vllm_api_url=str(server.base_url),
            timeout_seconds=TIMEOUT_S,
        )
        with VLLMWeightBridge(config, store=directory / "store") as bridge:
            model: Any = bridge.get_trainable_model()
            optimizer = torch.optim.Adam(model.parameters(), 3e-3)
            for step in range(1, NUM_STEPS + 1):
                answers = ask(server, QUESTIONS, temperature=1.0)
                reward = IS_REWARDED[answers].mean(dim=1)
                update(model, optimizer, answers, reward)
                started = time.perf_counter()
                bridge.notify_update()
                update_ms = 1e3 * (time.perf_counter() - started)
                print(f"step {step}: reward {reward.mean():.3f}, update {update_ms:.0f} ms")
            final = ask(server, PROMPTS, temperature=0.0)
    model.save_pretrained(directory / "final")
    with serve(directory / "final") as server:
        is_equal = torch.equal(final, ask(server, PROMPTS, temperature=0.0))
    print(f"greedy answers of the server and of a fresh one: {'equal' if is_equal else 'differ'}")
    return is_equal


def make_model() -> Any:
    """Return a Qwen3 with 0.2 million random parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


@contextlib.contextmanager
def serve(checkpoint: Path, store: Path | None = None) -> Iterator[httpx.Client]:
    """Run a stock vLLM server, which follows a store if there is one."""
    follows = [
        *("--weight-transfer-config", '{"backend": "dbuffer"}'),
        *("--additional-config", json.dumps({"dbuffer": {"store": str(store)}})),
        *("--middleware", "dbuffer.integrations.vllm.FollowStore"),
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint), "--served-model-name", "policy", "--port", str(port)),
        *([] if store is None else follows),
        *("--dtype", "bfloat16" if torch.cuda.is_available() else "float32"),
        *("--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--enforce-eager", "--skip-tokenizer-init"),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            deadline = time.monotonic() + TIMEOUT_S
            while not is_ready(client):
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


def is_ready(client: httpx.Client) -> bool:
    """Whether the server answers."""
    try:
        return client.get("/health").is_success
    except httpx.HTTPError:
        return False


def ask(client: httpx.Client, prompts: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the server's answers, one for each prompt."""
    question = {
        "model": "policy",
        "prompt": prompts.tolist(),
        "max_tokens": ANSWER_TOKENS,
        "temperature": temperature,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=question).raise_for_status()
    return torch.tensor([choice["token_ids"] for choice in response.json()["choices"]])


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, answers: torch.Tensor, reward: torch.Tensor
) -> None:
    """Take a step of REINFORCE, with the batch's mean as baseline."""
    advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
    logits = model(torch.cat([QUESTIONS, answers], dim=1)).logits
    chosen = logits[:, QUESTIONS.shape[1] - 1 : -1].log_softmax(-1).gather(-1, answers[:, :, None])
    optimizer.zero_grad()
    (-(advantages[:, None] * chosen[:, :, 0]).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        has_followed = main(Path(directory))
    sys.exit(None if has_followed else "the server did not follow its trainer")
