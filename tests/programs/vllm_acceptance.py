"""Program of `test_following_drafts.py`: the acceptance of a draft while a policy moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.tiny_models import save_model, weights_in
from tests.support.engines.vllm_engines import greedy, judge, start_llm

NUM_VERSIONS = 20
NUM_TOKENS = 32
NUM_SPECULATIVE = 3
NOISE = 0.003
"""How far the draft is from its policy: as the result of a training that goes on beside it."""


def run(directory: Path, tp: str = "1") -> dict[str, float]:
    """Two engines begin with one policy and its draft, and follow the policy's twenty versions.

    One engine's draft comes with each version. The other engine's draft stays as it is.
    """
    start, end = (weights_in(save_model("llama", seed, directory)) for seed in (0, 1))
    policies = [
        {name: torch.lerp(start[name], end[name], step / NUM_VERSIONS) for name in start}
        for step in range(NUM_VERSIONS + 1)
    ]
    draft = save_model("llama", 0, directory / "draft")
    save(draft, near(policies[0]))
    shares: dict[str, float] = {}
    for follows in (False, True):
        llm = start_llm(
            directory / "llama-0",
            tp=int(tp),
            disable_log_stats=False,
            speculative_config={
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": NUM_SPECULATIVE,
                "draft_tensor_parallel_size": int(tp),
            },
        )
        store = directory / f"store-{follows}"
        shares["at first"] = acceptance(llm)
        with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
            for policy in policies[1:]:
                sent = sender.send(policy, draft=near(policy) if follows else None)
                assert follower.sync().version == sent.version
        shares["at last, with drafts" if follows else "at last, without"] = acceptance(llm)
    return shares


def near(policy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor + NOISE * torch.randn_like(tensor) for name, tensor in policy.items()}


def save(path: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(weights, path / "model.safetensors", {"format": "pt"})


def acceptance(llm: Any) -> float:
    """The share of a draft's tokens that an engine accepts."""
    before = counts(llm)
    greedy(llm, NUM_TOKENS)
    proposed, accepted = (b - a for a, b in zip(before, counts(llm), strict=True))
    return accepted / proposed


def counts(llm: Any) -> tuple[float, float]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    kinds = "draft", "accepted"
    proposed, accepted = (values[f"vllm:spec_decode_num_{kind}_tokens"] for kind in kinds)
    return proposed, accepted


if __name__ == "__main__":
    judge(run)
