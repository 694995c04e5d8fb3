"""Adapters in real vLLM engines: merged into what an engine follows, and loaded by the engine."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.integrations.vllm.test_vllm import counted_reloads, error_of
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    PROMPTS,
    engine_arguments,
    greedy,
    greedy_parameters,
    kept,
    leave,
    observe,
)

pytest.importorskip("peft")

pytestmark = NEEDS_VLLM

STEPS = (1, 2)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe(__file__, tmp_path_factory.mktemp("lora")))


def test_an_engine_follows_the_merged_model(observed: dict[str, Any]) -> None:
    assert observed["followed"] == observed["fresh"]
    for one, other in zip(*observed["fresh"], strict=True):
        assert one != other


def test_an_engine_loads_the_adapter(observed: dict[str, Any]) -> None:
    """At each version, with prompts that its caches of adapters and prefixes know from before."""
    assert observed["by adapter"] == observed["fresh"]
    assert observed["without"] == observed["base"]
    assert observed["base"] not in observed["fresh"]


def test_the_base_model_of_adapters_is_switched_by_copies(observed: dict[str, Any]) -> None:
    seen = observed["base updates"]
    assert seen["answers"] == observed["fresh"]
    assert seen["reloads"] == []


def test_the_last_adapter_can_still_be_asked_for(observed: dict[str, Any]) -> None:
    assert observed["by the one before"] == observed["fresh"][0]


def test_an_adapter_is_no_model(observed: dict[str, Any]) -> None:
    error, tokens = observed["adapter as model"]
    assert error.startswith("EngineUpdateError: ")
    assert "the store holds an adapter, not a model" in error
    assert tokens == observed["fresh"][-1]


def test_a_model_is_no_adapter(observed: dict[str, Any]) -> None:
    assert "the store holds a model, not an adapter" in observed["model as adapter"]


# From here on, the program that runs in the subprocess.


def run(directory: Path) -> dict[str, Any]:
    import vllm
    from peft import LoraConfig, get_peft_model

    from tests.support.engines.tiny_models import make_model, save_model

    base = save_model("tied-qwen2", 0, directory)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "gate_proj"])
    model = get_peft_model(make_model("tied-qwen2", 0), config)
    engines: dict[str, Any] = {
        "following": vllm.LLM(**engine_arguments(base)),
        "with adapters": vllm.LLM(
            **engine_arguments(base, how="none"), enable_lora=True, max_lora_rank=8
        ),
    }
    seen: dict[str, Any] = {"base": greedy(engines["with adapters"])}
    seen |= {name: [] for name in ("followed", "by adapter", "fresh")}
    for step in STEPS:
        train(model, step)
        merged = directory / f"merged-{step}"
        copy.deepcopy(model).merge_and_unload().save_pretrained(merged)
        engines[merged.name] = vllm.LLM(**engine_arguments(merged, how="none"))
        seen["fresh"].append(greedy(engines[merged.name]))
    kept.extend(engines.values())
    observe_versions(directory, model, engines, seen)
    merged = [directory / f"merged-{step}" for step in STEPS]
    seen["base updates"] = observe_base_updates(directory, merged, engines["with adapters"])
    return seen


def observe_base_updates(directory: Path, models: list[Path], llm: Any) -> dict[str, Any]:
    from dbuffer.integrations.vllm import follow

    store = directory / "base"
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:

        def switch(model: Path) -> list[list[int]]:
            sender.send(model)
            follower.sync()
            return greedy_with(llm, None)

        for model in (*models, *models):  # until it is proven that copies will do
            switch(model)
        with counted_reloads(llm) as reloads:
            answers = [switch(model) for model in models]
    return {"answers": answers, "reloads": reloads}


def train(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def observe_versions(
    directory: Path, model: Any, engines: dict[str, Any], seen: dict[str, Any]
) -> None:
    from dbuffer.integrations.peft import merged_weights, send_adapter
    from dbuffer.integrations.vllm import adapter_request, follow

    following, with_adapters = engines["following"], engines["with adapters"]
    models, adapters = directory / "models", directory / "adapters"
    with (
        dbuffer.WeightSender(models) as model_sender,
        dbuffer.WeightSender(adapters) as adapter_sender,
        dbuffer.WeightReceiver(models) as model_receiver,
        dbuffer.WeightReceiver(adapters) as adapter_receiver,
        follow(following, models) as follower,
    ):
        requests = []
        for step in STEPS:
            train(model, step)
            model_sender.send(merged_weights(model))
            follower.sync()
            seen["followed"].append(greedy(following))
            send_adapter(adapter_sender, model)
            requests.append(adapter_request(adapter_receiver, directory / "saved"))
            seen["by adapter"].append(greedy_with(with_adapters, requests[-1]))
        seen["by the one before"] = greedy_with(with_adapters, requests[0])
        seen["without"] = greedy_with(with_adapters, None)
        seen["model as adapter"] = error_of(
            lambda: adapter_request(model_receiver, directory / "never")
        )
        send_adapter(model_sender, model)
        seen["adapter as model"] = [error_of(follower.sync), greedy(following)]


def greedy_with(llm: Any, request: Any) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, greedy_parameters(), use_tqdm=False, lora_request=request)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    target = Path(sys.argv[1])
    leave(target, run(target))
