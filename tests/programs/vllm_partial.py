"""Versions that hold a part of a model, in real vLLM engines, against fresh ones on the whole.

With linear layers packed as vLLM does on a CPU and live as on a GPU, tied embeddings and experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.engines.media_models import media_prompts, save_media_model
from tests.support.engines.tiny_models import save_mixed, save_model, weights_in
from tests.support.engines.vllm_engines import (
    following,
    greedy,
    greedy_answers,
    judge,
    model_of,
    set_packing,
    start_llm,
)

HEARS, TEXT = "qwen2_audio", "language_model."
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
REFUSED = [
    ("qwen3", [ATTENTION[0]], "elements of model.layers.1"),  # a part of a fused parameter
    ("qwen3-moe", EXPERTS[:3], "elements of model.layers.0.mlp.experts"),
    ("tied-qwen2", ATTENTION, "weight of model.layers.1.self_attn.qkv_proj"),  # without its bias
    # Models skip these.
    ("tied-qwen2", ["lm_head.weight"], "lm_head.weight"),
    ("qwen3", ["model.rotary_emb.inv_freq"], "nothing of the engine's model"),
    ("qwen3", [*MLP, "model.layers.7.norm"], "no place for model.layers.7.norm"),
]
"""Families, names of tensors of a part, and what an engine says of it."""


def run(directory: Path) -> None:
    # vLLM needs transformers' classes as they were before its first engine.
    hears = [save_media_model(HEARS, directory, seed) for seed in (0, 1)]
    for case in CASES:
        switch_to_parts(directory, case)
    train_the_text_alone(directory / HEARS, *hears)


def switch_to_parts(directory: Path, case: str) -> None:
    """Compare an engine with fresh ones on the base with the part."""
    family, layers = case.split()
    place = directory / case
    set_packing(layers == "packed")
    base = save_model(family, 0, directory)
    llm = start_llm(base)
    answers = [greedy(llm)]
    weights = weights_in(save_model(family, 1, directory))
    if layers == "packed":
        refuse_parts_of_layers(place / "refused", family, weights, llm)
    first, more = PARTS[family]
    with following(llm, place / "store", partial=True) as switch:
        for number, names in enumerate([first, first + more][layers == "live" :]):
            part = select(weights, names)
            mixed = save_mixed(base, part, place / f"mixed-{number}")
            answers.append(greedy(start_llm(mixed)))
            assert switch(part) == [None, answers[-1]]
            assert all(one != other for one, other in zip(*answers[-2:], strict=True))
        error, tokens = switch(select(weights, first))
        last = len(answers) - 1
        assert error.startswith("EngineUpdateError: ")
        assert f"version {last + 1} lacks" in error
        assert f"of version {last}" in error
        assert f"serves on with version {last}" in error
        assert tokens == answers[-1]
    if case == "qwen3 packed":
        go_back_to_base_and_part(place / "recovery", start_llm(base), weights, answers[1:])


def train_the_text_alone(place: Path, base: Path, other: Path) -> None:
    """Publish the text model of one that hears: whole, unchanged, and with 1 % changed."""
    whole = {name: one for name, one in weights_in(other).items() if name.startswith(TEXT)}
    changed = {name: one.clone() for name, one in whole.items()}
    for tensor in changed.values():
        tensor.view(-1)[::100] += 0.5
    sounds = media_prompts(HEARS)

    def ask(llm: Any) -> list[list[int]]:
        return greedy_answers(llm, sounds)

    fresh = [
        ask(start_llm(save_mixed(base, part, place / name), skip_tokenizer_init=False))
        for name, part in (("whole", whole), ("changed", changed))
    ]
    assert fresh[0] != fresh[1]
    llm = start_llm(base, skip_tokenizer_init=False)
    with following(llm, place / "store", ask, delta=True, partial=True) as switch:
        for part, answers in zip((whole, whole, changed), (fresh[0], *fresh), strict=True):
            assert switch(part) == [None, answers]


def select(weights: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    return {name: weights[name] for name in names}


def refuse_parts_of_layers(
    store: Path, family: str, weights: dict[str, torch.Tensor], llm: Any
) -> None:
    before = greedy(llm)

    def require_refused(seen: list[Any], reason: str) -> None:
        error, tokens = seen
        assert error.startswith("EngineUpdateError: ")
        assert reason in error
        assert tokens == before

    with following(llm, store, partial=True) as switch:
        for whose, names, reason in REFUSED:
            if whose == family:
                part = {name: weights.get(name, torch.ones(500, 64)) for name in names}
                require_refused(switch(part), reason)
    with following(llm, store) as switch:  # which has not been told that parts come
        require_refused(switch(select(weights, ATTENTION)), "WeightsMismatchError: only 0 of ")


def go_back_to_base_and_part(
    store: Path, llm: Any, weights: dict[str, torch.Tensor], fresh: list[Any]
) -> None:
    """Let a load fail; the version before does not hold what the failed one brings in addition."""
    from tests.support.engines.faulty_worker import watch_loads

    first, more = PARTS["qwen3"]

    def fail(handed_over: int) -> None:
        if handed_over == len(more):
            del model_of(llm).load_weights
            raise RuntimeError("on purpose")

    with following(llm, store, partial=True) as switch:
        switch(select(weights, first))
        watch_loads(model_of(llm), fail)
        error, tokens = switch(select(weights, [*more, *first]))
        assert "all ranks went back, and the engine serves on with version 1" in error
        assert tokens == fresh[0]
        # What the failed one had brought is gone again, so this is no mix.
        assert switch(select(weights, first)) == [None, fresh[0]]
        assert switch(select(weights, [*first, *more])) == [None, fresh[1]]


if __name__ == "__main__":
    judge(run)
