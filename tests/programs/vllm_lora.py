"""Adapters in real vLLM engines: merged into what an engine follows, and loaded by the engine.

The base model of adapters is switched by copies alone. An adapter is no model, and no model is an
adapter.
"""

from __future__ import annotations

import copy
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
    judge,
    start_llm,
)
from tests.support.waiting import error_of

STEPS = (1, 2)


def run(directory: Path) -> None:
    from peft import LoraConfig, get_peft_model

    warnings.simplefilter("ignore")
    base = save_model("tied-qwen2", 0, directory)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "gate_proj"])
    model = get_peft_model(make_model("tied-qwen2", 0), config)
    followed = start_llm(base)
    with_adapters = start_llm(base, how="none", enable_lora=True, max_lora_rank=8)
    merged = [directory / f"merged-{step}" for step in STEPS]
    fresh = []
    for step, path in zip(STEPS, merged, strict=True):
        train(model, step)
        copy.deepcopy(model).merge_and_unload().save_pretrained(path)
        fresh.append(greedy(start_llm(path, how="none")))
    assert all(one != other for one, other in zip(*fresh, strict=True))
    bring_each_version(directory, model, followed, with_adapters, fresh)
    with following(with_adapters, directory / "base") as switch:
        switch(merged[-1])  # which verifies that copies will do
        with counted_reloads(with_adapters) as reloads:
            assert [switch(path) for path in merged] == [[None, tokens] for tokens in fresh]
    assert reloads == []


def train(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def bring_each_version(
    directory: Path, model: Any, followed: Any, with_adapters: Any, fresh: list[Any]
) -> None:
    """Compare what an engine follows, merged, and what another one loads as an adapter."""
    from dbuffer.integrations.peft import merged_weights, send_adapter
    from dbuffer.integrations.vllm import adapter_request

    models, adapters = directory / "models", directory / "adapters"
    base = greedy(with_adapters)
    assert base not in fresh
    requests: list[Any] = []
    with (
        dbuffer.WeightSender(adapters) as adapter_sender,
        dbuffer.WeightReceiver(models) as model_receiver,
        dbuffer.WeightReceiver(adapters) as adapter_receiver,
    ):
        with following(followed, models) as switch:
            for step, tokens in zip(STEPS, fresh, strict=True):
                train(model, step)
                assert switch(merged_weights(model)) == [None, tokens]
                send_adapter(adapter_sender, model)
                requests.append(adapter_request(adapter_receiver, directory / "saved"))
                # Its caches of adapters and prefixes know the prompts from before.
                assert greedy_with(with_adapters, requests[-1]) == tokens
            for _ in range(2):  # of which the engine has one slot, and reads the first again
                send_adapter(adapter_sender, model)
                requests.append(adapter_request(adapter_receiver, directory / "saved"))
                greedy_with(with_adapters, requests[-1])
            assert greedy_with(with_adapters, requests[0]) == fresh[0]
            assert greedy(with_adapters) == base
            error = error_of(lambda: adapter_request(model_receiver, directory / "never"))
            assert "the store holds a model, not an adapter" in str(error)
        with dbuffer.WeightSender(models) as sender, follow(followed, models) as follower:
            send_adapter(sender, model)
            error = str(error_of(follower.sync))
            assert error.startswith("EngineUpdateError: ")
            assert "the store holds an adapter, not a model" in error
            assert greedy(followed) == fresh[-1]


def greedy_with(llm: Any, request: Any) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return greedy_answers(llm, prompts, lora_request=request)


if __name__ == "__main__":
    judge(run)
