r"""A trainer whose rollouts come from an SGLang server, with every new policy through a store.

Start the server anywhere that sees the store, and then this::

    python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init \
        --custom-weight-loader dbuffer.integrations.sglang.load_from_store
    python -m dbuffer.examples.sglang_rollouts MODEL http://localhost:30000 /dev/shm/policy

Training is left out: a step here moves the weights a little, at random. What is shown is that each
batch of rollouts is sampled with the weights of the step before it, and says so. Needs transformers
and httpx; SGLang only where the server is.
"""
# ruff: noqa: T201 - a program prints

from __future__ import annotations

import argparse
import sys
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

import dbuffer
from dbuffer.integrations.sglang import BackgroundFollower, follow

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
ROLLOUT_TOKENS = 16
TIMEOUT_S = 600.0


def sample(url: str) -> list[dict[str, Any]]:
    """One rollout for each prompt: ``output_ids``, and in ``meta_info`` the weights' version."""
    parameters = {"temperature": 1.0, "max_new_tokens": ROLLOUT_TOKENS, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": parameters}
    response = httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    return list(response.json())


@torch.no_grad()
def train(model: torch.nn.Module) -> None:
    """Stands for a step of training on the rollouts."""
    for parameter in model.parameters():
        parameter.add_(1e-3 * torch.randn_like(parameter))


def main() -> int:
    """Publish, wait until the server has switched, sample; the exit code."""
    parser = argparse.ArgumentParser(description="Rollouts from an SGLang server.")
    parser.add_argument("model", help="the checkpoint that the server was started with")
    parser.add_argument("url", help="the server's address")
    parser.add_argument("store", help="the store's directory")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    with dbuffer.WeightSender(options.store) as sender:
        follower = follow(options.url, options.store)
        assert isinstance(follower, BackgroundFollower)  # noqa: S101 - a URL's always is
        with follower:
            for step in range(options.steps):
                version = sender.send(model, metadata={"step": step}).version
                follower.wait_applied(version, TIMEOUT_S)
                versions = {answer["meta_info"]["weight_version"] for answer in sample(options.url)}
                print(f"step {step}: rollouts of version {', '.join(sorted(versions))}", flush=True)
                if versions != {str(version)}:
                    print(f"and not of version {version}, which was published last")
                    return 1
                train(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
