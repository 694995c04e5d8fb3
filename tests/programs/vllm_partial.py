"""Program of `test_partial.py`, which says what it shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.tiny_models import save_mixed, save_model, weights_in
from tests.support.engines.vllm_engines import (
    following,
    greedy,
    leave,
    model_of,
    set_packing,
    start_llm,
)

LAYER = "model.layers.{}."
ATTENTION = [f"{LAYER.format(1)}self_attn.{name}_proj.weight" for name in "qkv"]
BIASES = [f"{LAYER.format(1)}self_attn.{name}_proj.bias" for name in "qkv"]
MLP = [f"{LAYER.format(0)}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
EXPERTS = [
    f"{LAYER.format(0)}mlp.experts.{number}.{name}_proj.weight"
    for number in range(4)
    for name in ("gate", "up", "down")
]
EMBEDDING = "model.embed_tokens.weight"
PARTS = {
    # vLLM makes what experts need when its first engine has some, so that one comes first.
    "qwen3-moe": ([*ATTENTION, "model.norm.weight"], EXPERTS),
    "qwen3": ([*ATTENTION, "model.norm.weight"], [*MLP, EMBEDDING]),
    "tied-qwen2": (MLP, [EMBEDDING, *ATTENTION, *BIASES]),
}
"""What the first version brings, and what the second one brings in addition."""
CASES = [*(f"{family} packed" for family in PARTS), "qwen3 live"]
REFUSED = {
    "one part of a fused parameter": ("qwen3", [ATTENTION[0]], "elements of model.layers.1"),
    "some experts": ("qwen3-moe", EXPERTS[:3], "elements of model.layers.0.mlp.experts"),
    "weight without bias": ("tied-qwen2", ATTENTION, "weight of model.layers.1.self_attn.qkv_proj"),
    # Models skip these.
    "head of a tied embedding": ("tied-qwen2", ["lm_head.weight"], "lm_head.weight"),
    "nothing of the model": (
        "qwen3",
        ["model.rotary_emb.inv_freq"],
        "nothing of the engine's model",
    ),
    "unknown": ("qwen3", [*MLP, "model.layers.7.norm"], "no place for model.layers.7.norm"),
}


def run(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"refused": {}}
    for case in CASES:
        seen[case] = observe_case(directory, case, seen)
    return seen


def observe_case(directory: Path, case: str, seen: dict[str, Any]) -> dict[str, Any]:
    family, layers = case.split()
    place = directory / case
    set_packing(layers == "packed")
    base = save_model(family, 0, directory)
    llm = start_llm(base)
    found: dict[str, Any] = {"base": greedy(llm), "fresh": []}
    weights = weights_in(save_model(family, 1, directory))
    if layers == "packed":
        observe_refusals(place / "refused", family, weights, llm, seen)
    found["switched"] = [[None, greedy(llm)]]
    first, more = PARTS[family]
    with following(llm, place / "store", partial=True) as switch:
        for number, names in enumerate([first, first + more][layers == "live" :]):
            part = select(weights, names)
            found["switched"].append(switch(part))
            mixed = save_mixed(base, part, place / f"mixed-{number}")
            found["fresh"].append(greedy(start_llm(mixed)))
        found["less"] = switch(select(weights, first))
    if case == "qwen3 packed":
        seen["recovery"] = observe_recovery(place / "recovery", start_llm(base), weights)
    return found


def select(weights: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    return {name: weights[name] for name in names}


def observe_refusals(
    store: Path, family: str, weights: dict[str, torch.Tensor], llm: Any, seen: dict[str, Any]
) -> None:
    with following(llm, store, partial=True) as switch:
        for name, (whose, names, _) in REFUSED.items():
            if whose == family:
                part = {name: weights.get(name, torch.ones(500, 64)) for name in names}
                seen["refused"][name] = switch(part)
    if family == "qwen3":
        with following(llm, store) as switch:
            seen["not told"] = switch(select(weights, ATTENTION))


def observe_recovery(store: Path, llm: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    from tests.support.engines.faulty_worker import watch_loads

    first, more = PARTS["qwen3"]

    def fail(handed_over: int) -> None:
        if handed_over == len(more):
            del model_of(llm).load_weights
            raise RuntimeError("on purpose")

    with following(llm, store, partial=True) as switch:
        switch(select(weights, first))
        watch_loads(model_of(llm), fail)
        found = {"failed": switch(select(weights, [*more, *first]))}
        # What the failed one had brought is gone again, so this is no mix.
        found["less again"] = switch(select(weights, first))
        found["then"] = switch(select(weights, [*first, *more]))
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
