"""Layers that vLLM loads in its own ways, in real engines, against fresh ones on those weights.

Quantized layers of each method that vLLM's CPU build runs, whose tokens and log-probabilities equal
a fresh engine's; scales of quantized caches, which a checkpoint may lack; vLLM's Transformers
backend, whose layers are half transformers' own; heads with a bias. The first switch verifies
copies, and images of packed layers, against the reload; later ones reload nothing. An image with a
wrong scale does not pass, and its layer is reloaded. What vLLM's reload would not load right is
refused.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm import layers as vllm_layers
from tests.support.engines.families import save_family
from tests.support.engines.in_workers import watch_loads
from tests.support.engines.media_models import media_prompts, save_media_model
from tests.support.engines.quantized_models import int4, save_float8, save_int8
from tests.support.engines.tiny_models import (
    SHAPE,
    SPECIAL_TOKENS,
    save_model,
    save_tokenizer,
    weights_in,
)
from tests.support.engines.vllm_engines import (
    IS_BEFORE_0_32,
    PROMPTS,
    Ask,
    counted_reloads,
    following,
    greedy,
    greedy_answers,
    judge,
    model_of,
    require_different,
    set_packing,
    start_llm,
    vllm_release,
)
from tests.support.soak import is_soak
from tests.support.waiting import error_of

# vLLM makes what experts need when its first engine has some, so that one comes first.
BACKEND = ("qwen3-moe packed", "qwen3 live", "phi packed")
OTHERS = ("bloom live",)
MIXERS = "mamba2 packed"
if not IS_BEFORE_0_32:  # else float32 has no convolution
    OTHERS += (MIXERS,)
if is_soak():
    BACKEND += ("olmo2 packed", "starcoder2 packed")
    OTHERS += ("gpt-j packed",)
    if not IS_BEFORE_0_32:  # else the backend takes no GPT-NeoX as transformers 5 saves it
        BACKEND += ("gpt-neox packed",)
FAMILIES = BACKEND + OTHERS
HEARS = "whisper"
JUDGES = "qwen3 that judges"
"""A classifier whose head has a bias, which vLLM registers as it loads it."""
INT8_STATIC = "int8, static inputs"
ONLINE = "fp8, online"
QUANTIZED: dict[str, Callable[[Path, int], Path]] = {
    ONLINE: lambda directory, seed: save_model("qwen3", seed, directory),
    INT8_STATIC: lambda directory, seed: save_int8(directory, seed, static=True),
}
HAS_AVX512 = torch.cpu._is_avx512_supported()
if HAS_AVX512:  # else vLLM's CPU build has no kernel for weights of 4 bits
    QUANTIZED["gptq"] = int4("gptq")
if is_soak():
    QUANTIZED |= {
        "fp8": save_float8,
        "int8": save_int8,
        "int8, a scale a tensor": lambda directory, seed: save_int8(directory, seed, "tensor"),
    }
    if HAS_AVX512:
        QUANTIZED |= {"awq": int4("awq"), "int4": int4("compressed-tensors")}
HAS_FP8_CACHES = HAS_AVX512 or torch.cpu._is_amx_tile_supported()

MLP = "model.layers.0.mlp."

Reloads = tuple[list[str], ...]
"""Reloads of each switch."""

VERIFIED = ["of all"] * 2
"""Reloads of a switch that verifies the copies that the next one is."""
COPIED: Reloads = VERIFIED, []
IN_PART = ["of all", "of a part"] * 2, ["of a part"]
NOT_ALONE = ["of all", "of a part", "of all"], ["of all"]
"""Where a packed layer is loaded by computing: its kernel shows nothing to compare."""
RELOADS = {MIXERS: IN_PART, "bloom live": IN_PART, "phi packed": NOT_ALONE}


def run(directory: Path) -> None:
    hears = [save_media_model(HEARS, directory, seed) for seed in (0, 1)]
    judges = [save_judge(directory / JUDGES, seed) for seed in (0, 1)]
    latent = save_family("deepseek_v2", directory, 0)
    # vLLM changes transformers' classes for its backend, so all models are made before.
    pairs = {
        case: [save_model(case.split()[0], seed, directory) for seed in (0, 1)] for case in FAMILIES
    }
    sinks = save_model("gpt-oss", 0, directory)
    convolution = save_model("mamba2", 0, directory / "convolution")
    quantized = {
        case: [make(directory / case, seed) for seed in (0, 1)] for case, make in QUANTIZED.items()
    }
    fused = save_int8(directory / "fused", 0, "tensor", static=True)
    scaled = save_int8(directory / "scaled", 0, caches=True)
    plain = save_int8(directory / "plain", 0, caches=True, leave_out=True)
    for case, pair in pairs.items():
        set_packing(packed=case.endswith("packed"))
        more = {"model_impl": "transformers"} if case in BACKEND else {}
        llm, _ = switch_pair(directory / case, pair, RELOADS.get(case, COPIED), **more)
        if case in BACKEND:
            assert type(model_of(llm)).__name__.startswith("Transformers")
    set_packing(packed=True)
    sounds = media_prompts(HEARS)
    switch_pair(
        directory / HEARS,
        hears,
        NOT_ALONE,
        ask=lambda llm: greedy_answers(llm, sounds),
        skip_tokenizer_init=False,
    )
    switch_judges(directory / "judging", judges)
    if not IS_BEFORE_0_32:  # else vLLM's CPU build cannot make latent attention
        with seeing_amx():
            refuse_latent_attention(directory / "latent", latent)
    # What a model writes past its loaders, vLLM's reload would leave as the version before has it.
    # In float32, vLLM's CPU builds before 0.31 have no attention with sinks.
    # Since 0.33, the sinks have a loader.
    past = "attn.sinks"
    if vllm_release() >= (0, 33):
        past = "mlp.experts.routed_experts.w13_weight"
    problem = f"GptOssForCausalLM writes model.layers.0.{past} without its loader"
    refuse(directory / "sinks", sinks, problem)
    refuse_packed_convolution(directory / "convolution", convolution)
    if IS_BEFORE_0_32:  # attention has scales of caches then, which the fast path does not copy
        quantized = {ONLINE: quantized[ONLINE]}
    for case, pair in quantized.items():
        switch_quantized(directory / case, case, pair)
    # The parts of a fused layer bring more scales than it holds: vLLM's reload miscounts them.
    refuse(directory / "fused", fused, "would finish model.layers.0.mlp.gate_up_proj")
    if HAS_FP8_CACHES:
        switch_scales(directory / "scales", scaled, plain)


def save_judge(directory: Path, seed: int) -> Path:
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(seed)
    heads: dict[str, Any] = {"num_attention_heads": 4, "head_dim": 32, "num_labels": 2}
    model = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, **SPECIAL_TOKENS, **heads))
    path = directory / str(seed)
    model.save_pretrained(path)
    save_tokenizer(path)
    weights = load_file(path / "model.safetensors") | {"score.bias": torch.randn(2)}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@contextlib.contextmanager
def seeing_amx() -> Iterator[None]:
    """Let vLLM see what `hide_amx` hides."""
    hidden = torch.cpu._is_amx_tile_supported
    has_amx = torch.cpu.get_capabilities().get("amx_tile", False)
    torch.cpu._is_amx_tile_supported = lambda: has_amx
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = hidden


def switch_pair(
    directory: Path, pair: list[Path], reloads: Reloads = COPIED, ask: Ask = greedy, **more: Any
) -> list[Any]:
    """Switch an engine there and back; return it, and another one, by which it is measured."""
    engines = [start_llm(checkpoint, **more) for checkpoint in pair]
    fresh = [ask(llm) for llm in engines]
    require_different(*fresh)
    switch_there_and_back(engines[0], directory / "store", pair, fresh, reloads, ask)
    return engines


def switch_there_and_back(
    llm: Any, store: Path, pair: list[Path], fresh: list[Any], reloads: Reloads, ask: Ask
) -> None:
    """Compare its answers with those of fresh engines, and the reloads of each switch."""
    with following(llm, store, ask) as switch, counted_reloads(llm) as counted:
        for number, expected in zip(itertools.cycle((1, 0)), reloads, strict=False):
            counted.clear()
            assert switch(pair[number]) == [None, fresh[number]]
            assert counted == expected


def switch_quantized(directory: Path, case: str, pair: list[Path]) -> None:
    more = {"quantization": "fp8_per_channel"} if case == ONLINE else {}
    reloads: Reloads = VERIFIED, [], [], []
    engines = switch_pair(directory, pair, reloads, probabilities, dtype="bfloat16", **more)
    if case == ONLINE:
        reload_a_layer_whose_image_is_wrong(directory / "wrong", pair, engines)
    if case == INT8_STATIC:
        refuse_without_scales(directory / "unscaled", pair[1], engines[0])
        go_back_after_a_failed_load(directory / "failures", pair, engines[0])


def probabilities(llm: Any) -> list[list[tuple[int, dict[int, float]]]]:
    """Return the tokens that an engine answers with, and log-probabilities beside each."""
    import vllm

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


def reload_a_layer_whose_image_is_wrong(store: Path, pair: list[Path], engines: list[Any]) -> None:
    fresh, llm = [probabilities(each) for each in engines], engines[1]
    wrong = model_of(llm).get_submodule("model.layers.1.mlp.down_proj")
    pack = vllm_layers.pack

    def pack_wrongly(shadow: Any, layer: Any) -> Any:
        copies = pack(shadow, layer)
        if layer is wrong:
            shadow.weight_scale[3] *= 1.01
        return copies

    vllm_layers.pack = pack_wrongly
    try:
        reloads: Reloads = VERIFIED, ["of all", "of a part"] * 2, ["of a part"]
        switch_there_and_back(llm, store, pair, fresh, reloads, probabilities)
    finally:
        vllm_layers.pack = pack


def refuse_without_scales(store: Path, checkpoint: Path, llm: Any) -> None:
    before = greedy(llm)
    with following(llm, store) as switch:
        weights = weights_in(checkpoint)
        error, tokens = switch({n: t for n, t in weights.items() if not is_scale_of_mlp(n)})
    assert "elements of model.layers.0.mlp.gate_up_proj.weight_scale were published" in error
    assert tokens == before


def switch_judges(directory: Path, pair: list[Path]) -> None:
    def judge(llm: Any) -> list[list[float]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.classify(prompts, use_tqdm=False)
        return [[round(float(p), 6) for p in each.outputs.probs] for each in outputs]

    more = {"runner": "pooling", "skip_tokenizer_init": False}
    llm, _ = switch_pair(directory, pair, NOT_ALONE, judge, **more)
    before = judge(llm)
    with following(llm, directory / "other", judge) as switch:
        weights = weights_in(pair[1])
        del weights["score.bias"]  # which a loader registers
        error, after = switch(weights)
    assert "score.bias of the engine's model was not published" in error
    assert after == before


def go_back_after_a_failed_load(store: Path, pair: list[Path], llm: Any) -> None:
    def fail(handed_over: int) -> None:
        if handed_over == 20:
            del model_of(llm).load_weights  # the first of them only
            raise RuntimeError("deliberate")

    before = greedy(llm)
    with following(llm, store, plan=False) as switch:
        assert switch(pair[0]) == [None, before]
        watch_loads(model_of(llm), fail)
        error, tokens = switch(pair[1])
        model_of(llm).__dict__.pop("load_weights", None)
    assert "all ranks went back" in error
    assert tokens == before


def refuse(directory: Path, checkpoint: Path, problem: str) -> None:
    llm = start_llm(checkpoint, dtype="bfloat16")
    before = greedy(llm)
    with following(llm, directory / "store") as switch:
        error, tokens = switch(checkpoint)
    assert error.startswith("EngineUpdateError: ")
    assert problem in error
    assert tokens == before


def require_refused_at_once(llm: Any, store: Path, problem: str | None) -> None:
    with dbuffer.WeightSender(store):
        error = error_of(lambda: follow(llm, store))
    assert (error is None) == (problem is None)
    if problem is not None:
        assert str(error).startswith("UnsupportedError: ")
        assert problem in str(error)


def refuse_packed_convolution(directory: Path, checkpoint: Path) -> None:
    """vLLM's reload leaves a view of what was packed: half of the layer would be a version old."""
    llm = start_llm(checkpoint, dtype="bfloat16")
    mixer = model_of(llm).get_submodule("backbone.layers.0.mixer")
    places = {t.untyped_storage().data_ptr() for t in (mixer.conv_weights, mixer.conv1d.weight)}
    is_packed = len(places) > 1  # as bfloat16 is where there are kernels for it
    problem = "backbone.layers.0.mixer.conv_weights was a view of backbone." if is_packed else None
    require_refused_at_once(llm, directory / "store", problem)


def refuse_latent_attention(directory: Path, checkpoint: Path) -> None:
    """It drops a packed weight, for which vLLM's reload has no place and would fail halfway."""
    llm = start_llm(checkpoint, dtype="bfloat16")
    weight = model_of(llm).get_parameter("model.layers.0.self_attn.kv_b_proj.weight")
    is_there = weight.numel() > 0  # on a processor without AMX
    problem = None if is_there else "start the engine with attention_backend='CPU_MLA'"
    require_refused_at_once(llm, directory / "store", problem)


def switch_scales(store: Path, scaled: Path, plain: Path) -> None:
    """Scales of caches that do not come are the defaults, as where an engine is started so.

    The scales of the version before are gone.
    """

    def ask(llm: Any) -> list[list[int]]:
        return greedy(llm, 16)  # scales show late

    llm, other = (start_llm(each, kv_cache_dtype="fp8") for each in (scaled, plain))
    with_scales, without = ask(llm), ask(other)
    require_different(with_scales, without)
    with following(llm, store, ask) as switch:
        assert switch(plain) == [None, without]
        assert switch(scaled) == [None, with_scales]


def is_scale_of_mlp(name: str) -> bool:
    return name.startswith(MLP) and name.endswith("weight_scale")


if __name__ == "__main__":
    judge(run)
