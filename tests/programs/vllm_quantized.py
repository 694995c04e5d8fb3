"""Quantized engines of each method that vLLM's CPU build runs, against fresh ones.

Tokens and log-probabilities equal a fresh engine's on the same weights. The first switch verifies
images of the quantized layers against the reload; later ones reload nothing. An image with a wrong
scale does not pass, and its layer is reloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm

from dbuffer.integrations.vllm import packing
from tests.support.engines.quantized_models import int4, save_float8, save_int8
from tests.support.engines.tiny_models import save_model
from tests.support.engines.vllm_engines import (
    PROMPTS,
    counted_reloads,
    following,
    judge,
    model_of,
    require_different,
    set_packing,
    start_llm,
)

ONLINE = {"quantization": "fp8_per_channel"}

METHODS: dict[str, tuple[Callable[[Path, int], Path], dict[str, Any]]] = {
    "fp8, online": (lambda directory, seed: save_model("qwen3", seed, directory), ONLINE),
    "fp8": (save_float8, {}),
    "int8": (lambda directory, seed: save_int8(directory, seed), {}),
    "gptq": (int4("gptq"), {}),
    "awq": (int4("awq"), {}),
    "int4": (int4("compressed-tensors"), {}),
}
VERIFIED = ["of all"] * 2
"""Reloads of a switch that verifies its plan."""


def run(directory: Path) -> None:
    set_packing(packed=True)
    for method, (make, more) in METHODS.items():
        pair = [make(directory / method, seed) for seed in (0, 1)]
        engines = [start_llm(path, dtype="bfloat16", **more) for path in pair]
        fresh = [answers(llm) for llm in engines]
        require_different(*fresh)
        expected = (VERIFIED, [], [])
        switch_often(engines[0], directory / method / "store", pair, fresh, expected)
        if method == "fp8, online":
            reload_a_layer_whose_image_is_wrong(engines[1], directory, pair, fresh)


def reload_a_layer_whose_image_is_wrong(
    llm: Any, directory: Path, pair: list[Path], fresh: list[Any]
) -> None:
    wrong = model_of(llm).get_submodule("model.layers.1.mlp.down_proj")
    pack = packing.pack

    def pack_wrongly(shadow: Any, layer: Any) -> Any:
        copies = pack(shadow, layer)
        if layer is wrong:
            shadow.weight_scale[3] *= 1.01
        return copies

    packing.pack = pack_wrongly
    try:
        expected = (VERIFIED, ["of all", "of a part"] * 2, ["of a part"])
        switch_often(llm, directory / "wrong", pair, fresh, expected)
    finally:
        packing.pack = pack


def switch_often(
    llm: Any, store: Path, pair: list[Path], fresh: list[Any], reloads: tuple[list[str], ...]
) -> None:
    """Compare its answers with fresh engines' answers, and count the reloads of each switch."""
    with following(llm, store, answers) as switch, counted_reloads(llm) as counted:
        for number, expected in zip((1, 0, 1), reloads, strict=True):
            counted.clear()
            assert switch(pair[number]) == [None, fresh[number]]
            assert counted == expected


def answers(llm: Any) -> list[list[tuple[int, dict[int, float]]]]:
    few = vllm.SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=5
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    completions = [each.outputs[0] for each in llm.generate(prompts, few, use_tqdm=False)]
    return [
        [
            (token, {other: each.logprob for other, each in best.items()})
            for token, best in zip(each.token_ids, each.logprobs, strict=True)
        ]
        for each in completions
    ]


if __name__ == "__main__":
    judge(run)
