"""Versions that hold a part of a model, in real vLLM engines, against fresh ones on the whole.

With linear layers packed as vLLM does on a CPU and live as on a GPU, tied embeddings and experts.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.integrations.vllm.test_vllm import error_of, set_packing
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    engine_arguments,
    greedy,
    kept,
    leave,
    observe,
)

pytestmark = NEEDS_VLLM

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


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe(__file__, tmp_path_factory.mktemp("partial")))


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_base_with_the_part(observed: dict[str, Any], case: str) -> None:
    seen = observed[case]
    fresh = [seen["base"], *seen["fresh"]]
    assert seen["switched"] == fresh
    for one, other in itertools.pairwise(fresh):
        assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_less_than_was_brought_before_is_refused(observed: dict[str, Any], case: str) -> None:
    error, tokens = observed[case]["less"]
    assert error.startswith("EngineUpdateError: ")
    last = len(observed[case]["fresh"])
    assert f"version {last + 1} lacks" in error
    assert f"of version {last}" in error
    assert f"serves on with version {last}" in error
    assert tokens == observed[case]["fresh"][-1]


def test_without_being_told_a_part_is_refused(observed: dict[str, Any]) -> None:
    error, tokens = observed["not told"]
    assert error.startswith("EngineUpdateError: ")
    assert "WeightsMismatchError: only 0 of " in error
    assert tokens == observed["qwen3 packed"]["base"]


@pytest.mark.parametrize("name", REFUSED)
def test_part_of_a_layer_is_refused(observed: dict[str, Any], name: str) -> None:
    family, _, reason = REFUSED[name]
    error, tokens = observed["refused"][name]
    assert error.startswith("EngineUpdateError: ")
    assert reason in error
    assert tokens == observed[f"{family} packed"]["base"]


def test_a_failed_load_goes_back_to_base_and_part(observed: dict[str, Any]) -> None:
    """The version before does not hold what the failed one had begun to bring in addition."""
    seen = observed["recovery"]
    assert "all ranks went back, and the engine serves on with version 1" in seen["error"]
    assert seen["tokens"] == observed["qwen3 packed"]["fresh"][0]
    assert seen["less again"] == observed["qwen3 packed"]["fresh"][0]
    assert seen["then"] == observed["qwen3 packed"]["fresh"][1]


# From here on, the program that runs in the subprocess.


def run(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"refused": {}}
    for case in CASES:
        seen[case] = observe_case(directory, case, kept, seen)
    set_packing(packed=True)
    observe_recovery(directory, kept, seen)
    return seen


def observe_case(
    directory: Path, case: str, engines: list[Any], seen: dict[str, Any]
) -> dict[str, Any]:
    import vllm

    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import save_mixed, save_model, weights_in

    family, layers = case.split()
    set_packing(layers == "packed")
    base = save_model(family, 0, directory)
    llm = vllm.LLM(**engine_arguments(base, how="backend"))
    engines.append(llm)
    found: dict[str, Any] = {"base": greedy(llm), "fresh": [], "switched": []}
    weights = weights_in(save_model(family, 1, directory))
    if layers == "packed":
        observe_refusals(directory / case, family, weights, llm, seen)
    found["switched"].append(greedy(llm))
    with (
        dbuffer.WeightSender(directory / case / "store") as sender,
        follow(llm, directory / case / "store", partial=True) as follower,
    ):
        first, more = PARTS[family]
        for number, names in enumerate([first, first + more][layers == "live" :]):
            part = {name: weights[name] for name in names}
            version = sender.send(part).version
            assert follower.sync().version == version
            found["switched"].append(greedy(llm))
            mixed = save_mixed(base, part, directory / case / f"mixed-{number}")
            fresh = vllm.LLM(**engine_arguments(mixed))
            engines.append(fresh)
            found["fresh"].append(greedy(fresh))
        sender.send({name: weights[name] for name in PARTS[family][0]})
        found["less"] = [error_of(follower.sync), greedy(llm)]
    return found


def observe_refusals(
    directory: Path, family: str, weights: dict[str, torch.Tensor], llm: Any, seen: dict[str, Any]
) -> None:
    from dbuffer.integrations.vllm import follow

    with dbuffer.WeightSender(directory / "refused") as sender:
        with follow(llm, directory / "refused", partial=True) as follower:
            for name, (whose, names, _) in REFUSED.items():
                if whose == family:
                    part = {name: weights.get(name, torch.ones(500, 64)) for name in names}
                    sender.send(part)
                    seen["refused"][name] = [error_of(follower.sync), greedy(llm)]
        if family == "qwen3":
            with follow(llm, directory / "refused") as follower:
                sender.send({name: weights[name] for name in ATTENTION})
                seen["not told"] = [error_of(follower.sync), greedy(llm)]


def observe_recovery(directory: Path, engines: list[Any], seen: dict[str, Any]) -> None:
    import vllm

    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import weights_in

    settings = {"worker_extension_cls": "tests.support.engines.faulty_worker.Faults"}
    llm = vllm.LLM(**engine_arguments(directory / "qwen3-0", how="none", **settings))
    engines.append(llm)
    weights = weights_in(directory / "qwen3-1")
    first, more = PARTS["qwen3"]
    found: dict[str, Any] = {}
    with (
        dbuffer.WeightSender(directory / "recovery") as sender,
        follow(llm, directory / "recovery", partial=True) as follower,
    ):
        sender.send({name: weights[name] for name in first})
        follower.sync()
        sender.send({name: weights[name] for name in [*more, *first]})
        llm.collective_rpc("test_fail_load", args=(0, 1, len(more), "on purpose"))
        found["error"] = error_of(follower.sync)
        found["tokens"] = greedy(llm)
        # What the failed one had brought is gone again, so this is no mix.
        sender.send({name: weights[name] for name in first})
        follower.sync()
        found["less again"] = greedy(llm)
        sender.send({name: weights[name] for name in [*first, *more]})
        follower.sync()
        found["then"] = greedy(llm)
    seen["recovery"] = found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
