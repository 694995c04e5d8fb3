"""Program of `test_lora.py`, which says what it shows."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import (
    PROMPTS,
    counted_reloads,
    following,
    greedy,
    greedy_answers,
    leave,
    start_llm,
)
from tests.support.waiting import error_of

STEPS = (1, 2)


def run(directory: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    base = save_model("tied-qwen2", 0, directory)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "gate_proj"])
    model = get_peft_model(make_model("tied-qwen2", 0), config)
    followed = start_llm(base)
    with_adapters = start_llm(base, how="none", enable_lora=True, max_lora_rank=8)
    seen: dict[str, Any] = {"base": greedy(with_adapters), "fresh": []}
    merged = [directory / f"merged-{step}" for step in STEPS]
    for step, path in zip(STEPS, merged, strict=True):
        train(model, step)
        copy.deepcopy(model).merge_and_unload().save_pretrained(path)
        seen["fresh"].append(greedy(start_llm(path, how="none")))
    observe_versions(directory, model, followed, with_adapters, seen)
    with following(with_adapters, directory / "base") as switch:
        switch(merged[-1])  # which verifies that copies will do
        with counted_reloads(with_adapters) as reloads:
            seen["base updates"] = [switch(path) for path in merged]
    return seen | {"reloads": reloads}


def train(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def observe_versions(
    directory: Path, model: Any, followed: Any, with_adapters: Any, seen: dict[str, Any]
) -> None:
    from dbuffer.integrations.peft import merged_weights, send_adapter
    from dbuffer.integrations.vllm import adapter_request

    models, adapters = directory / "models", directory / "adapters"
    requests: list[Any] = []
    seen |= {"followed": [], "by adapter": []}
    with (
        dbuffer.WeightSender(adapters) as adapter_sender,
        dbuffer.WeightReceiver(models) as model_receiver,
        dbuffer.WeightReceiver(adapters) as adapter_receiver,
    ):
        with following(followed, models) as switch:
            for step in STEPS:
                train(model, step)
                seen["followed"].append(switch(merged_weights(model)))
                send_adapter(adapter_sender, model)
                requests.append(adapter_request(adapter_receiver, directory / "saved"))
                seen["by adapter"].append(greedy_with(with_adapters, requests[-1]))
            seen["by the one before"] = greedy_with(with_adapters, requests[0])
            seen["without"] = greedy(with_adapters)
            seen["model as adapter"] = error_of(
                lambda: adapter_request(model_receiver, directory / "never")
            )
        with dbuffer.WeightSender(models) as sender, follow(followed, models) as follower:
            send_adapter(sender, model)
            seen["adapter as model"] = [error_of(follower.sync), greedy(followed)]


def greedy_with(llm: Any, request: Any) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return greedy_answers(llm, prompts, lora_request=request)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    target = Path(sys.argv[1])
    leave(target, run(target))
