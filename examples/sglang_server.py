"""Trainer whose rollouts come from an SGLang server that follows through a store.

Start the server on any host that sees the store, then this program::

    python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init \
        --custom-weight-loader dbuffer.integrations.sglang.load_from_store
    python examples/sglang_server.py MODEL http://localhost:30000 /dev/shm/policy

A step of training is only a small random change of the weights. Each batch of rollouts must be
sampled with the weights of the previous step, and have their version as its label. Needs
transformers and httpx.
"""

import sys
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

import dbuffer
from dbuffer.integrations.sglang import follow

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
NUM_STEPS = 3
TIMEOUT_S = 600.0


def main(checkpoint: str, url: str, store: str) -> None:
    """Publish, wait until the server has switched, and sample."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with dbuffer.WeightSender(store) as sender, follow(url, store) as follower:
        for step in range(NUM_STEPS):
            version = sender.send(model, metadata={"step": step}).version
            follower.wait_applied(version, TIMEOUT_S)
            versions = {rollout["meta_info"]["weight_version"] for rollout in sample(url)}
            print(f"step {step}: rollouts of version {', '.join(sorted(versions))}", flush=True)
            if versions != {str(version)}:
                sys.exit(f"expected version {version}, the last one published")
            train(model)


def sample(url: str) -> list[dict[str, Any]]:
    """Return a rollout for each prompt: ``output_ids``, and the version in ``meta_info``."""
    parameters = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": parameters}
    response = httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    return list(response.raise_for_status().json())


@torch.no_grad()
def train(model: torch.nn.Module) -> None:
    """Change the weights a little, in place of a step of training on the rollouts."""
    for parameter in model.parameters():
        parameter.add_(1e-3 * torch.randn_like(parameter))


if __name__ == "__main__":
    main(*sys.argv[1:])
