"""Weights through the store into a real vLLM engine, against a fresh engine on those weights.

vLLM changes environment, warnings and threads of its process, so one subprocess (this file, run
as a program) does everything and leaves its observations as JSON; the tests judge them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

TIMEOUT_S = 240
PROMPTS = [
    list(range(1, 6)),
    list(range(40, 71)),
    # Longer than a cache block of 32 tokens: these meet the prefix cache.
    list(range(100, 140)),
    list(range(200, 300)),
]
# How the weights leave the trainer, and how they enter the engine.
SWAPS = {
    "qwen3-float32": ("checkpoint", "open"),
    "qwen3-bfloat16": ("module", "load_into"),
    "llama-float32": ("module", "open"),
    "llama-bfloat16": ("checkpoint", "load_into"),
    "tied-qwen2-float32": ("module", "load_into"),
    "tied-qwen2-bfloat16": ("checkpoint", "open"),
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
MISFITS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "one part of a fused parameter missing": lambda weights: weights.pop(K_PROJ),
    "head missing": lambda weights: weights.pop("lm_head.weight"),
    "embedding missing": lambda weights: weights.pop("model.embed_tokens.weight"),
    "everything missing": lambda weights: weights.clear(),
    "unknown name": lambda weights: weights.update({"model.layers.0.bogus": torch.ones(2)}),
    "layer too many": lambda weights: weights.update(
        {K_PROJ.replace("layers.1", "layers.2"): weights[K_PROJ]}
    ),
    "too many rows": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].repeat(2, 1)}),
    "too few columns": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ][:, :-1]}),
    "wrong length": lambda weights: weights.update({NORM: weights[NORM][:-1]}),
    "integers": lambda weights: weights.update({NORM: weights[NORM].long()}),
}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("vllm")
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    completed = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert completed.returncode == 0, completed.stdout[-6000:]
    return json.loads((directory / "observed.json").read_text())


@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_engine_answers_as_a_fresh_one(observed: dict[str, Any], swap: str) -> None:
    seen = observed[swap]
    # Else the rest would hold with no weights moved at all.
    for old, new in zip(seen["before"], seen["fresh"], strict=True):
        assert old != new
    assert seen["swapped"] == seen["fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_swapping_back_restores_every_token(observed: dict[str, Any], swap: str) -> None:
    assert observed[swap]["swapped back"] == observed[swap]["before"]


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit_is_refused_by_name(observed: dict[str, Any], misfit: str) -> None:
    assert observed["refusals"][misfit].startswith("WeightsMismatchError: ")


def test_refusals_leave_the_engine_as_it_was(observed: dict[str, Any]) -> None:
    assert observed["after refusals"] == observed["qwen3-float32"]["before"]


def test_message_names_the_tensor(observed: dict[str, Any]) -> None:
    assert Q_PROJ in observed["refusals"]["too many rows"]
    assert (
        "layers.1.self_attn.qkv_proj"
        in (observed["refusals"]["one part of a fused parameter missing"])
    )


def test_busy_engine_is_refused_and_finishes_its_request(observed: dict[str, Any]) -> None:
    assert observed["busy"].startswith("EngineBusyError: ")
    assert observed["finished when busy"] == observed["qwen3-float32"]["before"][0]


def test_engine_in_another_process_is_refused(observed: dict[str, Any]) -> None:
    assert observed["other process"].startswith("EngineUnsupportedError: ")


# From here on, the program that runs in the subprocess.


def observe(directory: Path) -> dict[str, Any]:
    from tiny_models import FAMILIES, save_model

    checkpoints = {
        (family, seed): save_model(family, seed, directory)
        for family in FAMILIES
        for seed in (0, 1)
    }
    seen: dict[str, Any] = {}
    engines = []  # an engine that is collected takes its process's parallel state along
    for swap, (source, entry) in SWAPS.items():
        family, dtype = swap.rsplit("-", 1)
        llm = start_engine(checkpoints[family, 0], dtype)
        fresh = start_engine(checkpoints[family, 1], dtype)
        engines += [llm, fresh]
        seen[swap] = observe_swap(llm, directory / swap, family, source, entry, dtype)
        seen[swap]["fresh"] = greedy(fresh)
    observe_refusals(engines[0], seen)
    seen["other process"] = observe_other_process()
    return seen


def start_engine(checkpoint: Path, dtype: str) -> Any:
    import vllm

    return vllm.LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=4,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
    )


def greedy_parameters() -> Any:
    import vllm

    return vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def greedy(llm: Any) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, greedy_parameters(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def observe_swap(
    llm: Any, directory: Path, family: str, source: str, entry: str, dtype: str
) -> dict[str, Any]:
    from tiny_models import make_model, save_model

    def weights(seed: int) -> Any:
        if source == "checkpoint":
            return save_model(family, seed, directory / "published")
        return make_model(family, seed).to(getattr(torch, dtype))

    store = directory / "store"
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        before = greedy(llm)
        version = sender.send(weights(1)).version
        take_newest(llm, receiver, entry)
        sender.wait_applied(version, receivers=1, timeout_s=10)
        swapped = greedy(llm)
        sender.send(weights(0))
        take_newest(llm, receiver, entry)
        back = greedy(llm)
    return {"before": before, "swapped": swapped, "swapped back": back}


def take_newest(llm: Any, receiver: dbuffer.WeightReceiver, entry: str) -> None:
    from dbuffer.integrations.vllm import update_weights

    if entry == "load_into":
        assert receiver.load_into(functools.partial(update_weights, llm)) is not None
    else:
        with receiver.open(timeout_s=10) as snapshot:
            update_weights(llm, snapshot.tensors)


def observe_refusals(llm: Any, seen: dict[str, Any]) -> None:
    from tiny_models import make_model

    from dbuffer.integrations.vllm import apply_weights, update_weights

    good = {name: tensor.detach() for name, tensor in make_model("qwen3", 1).named_parameters()}
    seen["refusals"] = {}
    for misfit, spoil in MISFITS.items():
        weights = dict(good)
        spoil(weights)
        seen["refusals"][misfit] = error_of(lambda weights=weights: update_weights(llm, weights))
    seen["after refusals"] = greedy(llm)

    engine = llm.llm_engine
    engine.add_request("busy", {"prompt_token_ids": PROMPTS[0]}, greedy_parameters())
    engine.step()
    seen["busy"] = error_of(lambda: apply_weights(llm, good))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    seen["finished when busy"] = list(outputs[0].outputs[0].token_ids)


def observe_other_process() -> str:
    from dbuffer.integrations.vllm import check_weights

    # What matters of an LLM whose engine core is elsewhere: its llm_engine has no model_executor.
    llm = types.SimpleNamespace(llm_engine=types.SimpleNamespace())
    return error_of(lambda: check_weights(llm, {}))


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except dbuffer.DBufferError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "observed.json").write_text(json.dumps(observe(target)))
