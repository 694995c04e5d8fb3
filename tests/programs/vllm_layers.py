"""Program of `test_layers.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.families import save_family
from tests.support.engines.media_models import media_prompts, save_media_model
from tests.support.engines.tiny_models import (
    SHAPE,
    SPECIAL_TOKENS,
    compressed_tensors,
    make_model,
    save_mixed,
    save_model,
    save_tokenizer,
    weights_in,
)
from tests.support.engines.vllm_engines import (
    PROMPTS,
    Ask,
    counted_reloads,
    following,
    greedy,
    greedy_answers,
    leave,
    model_of,
    set_packing,
    start_llm,
    vllm_release,
)
from tests.support.waiting import error_of

# vLLM makes what experts need when its first engine has some, so that one comes first.
BACKEND = ("qwen3-moe packed", "olmo2 packed", "starcoder2 packed", "qwen3 live", "phi packed")
FAMILIES = (*BACKEND, "gpt-j packed", "bloom live")
MIXERS = "mamba2 packed"
"""Negate an exponential, as they are loaded."""
if not () < vllm_release() < (0, 32):
    # Before, the backend takes no GPT-NeoX as transformers 5 saves it, and float32 no convolution.
    BACKEND += ("gpt-neox packed",)
    FAMILIES = (*BACKEND, "gpt-j packed", "bloom live", MIXERS)
HEARS = "whisper"
"""Of an encoder and a decoder."""
JUDGES = "qwen3 that judges"
"""A classifier whose head has a bias, which vLLM registers as it loads it."""
BIASED = "biases in float32"
"""Kernels for AMX take them so, whatever the engine's dtype."""
RETIED = "tied-qwen2 with a head of its own"
"""vLLM ties it once both are loaded, and found equal."""
ONLINE = "float8 online"
"""An engine that quantises what it loads, and follows a trainer that does not."""
INT8 = {
    # Strategy of the weights' scales, whether inputs' scales are in the checkpoint, and the dtype.
    "a scale a channel": ("channel", False, "float32"),
    "a scale a tensor": ("tensor", False, "bfloat16"),
    "static inputs": ("channel", True, "bfloat16"),
}
FUSED = ("tensor", True, "bfloat16")
"""The parts of a fused layer bring more scales than it holds: vLLM's reload miscounts them."""
HAS_FP8_CACHES = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()

SCALED, PLAIN = "cache with scales", "cache without scales"
SINKS = ("model.layers.0.self_attn.sinks", "model.norm.weight")
MLP = "model.layers.0.mlp."
WARNING, LACK_BEGINS = ": Failed to load weights", "now something is missing"


def run(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    hears = [save_media_model(HEARS, directory, seed) for seed in (0, 1)]
    judges = [save_judge(directory / JUDGES, seed) for seed in (0, 1)]
    biased = [save_biased(directory / BIASED, seed) for seed in (0, 1)]
    latent = save_family("deepseek_v2", directory, 0)
    retied = [save_with_head(directory / RETIED, seed) for seed in (0, 1)]
    # vLLM changes transformers' classes for its backend, so all models are made before.
    pairs = {
        case: [save_model(case.split()[0], seed, directory) for seed in (0, 1)] for case in FAMILIES
    }
    sinks = save_model("gpt-oss", 0, directory)
    convolution = save_model("mamba2", 0, directory / "convolution")
    int8 = {
        case: [save_int8(directory / case, seed, *INT8[case][:2]) for seed in (0, 1)]
        for case in INT8
    }
    fused = save_int8(directory / "fused", 0, *FUSED[:2])
    scaled = save_int8(directory / SCALED, 0, caches=True)
    plain = save_int8(directory / PLAIN, 0, caches=True, leave_out=True)
    followed: dict[str, Any] = {}
    for case, pair in pairs.items():
        set_packing(packed=case.endswith("packed"))
        more = {"model_impl": "transformers"} if case in BACKEND else {}
        followed[case], seen[case] = observe_pair(directory / case, pair, **more)
    set_packing(packed=True)
    sounds = media_prompts(HEARS)
    _, seen[HEARS] = observe_pair(
        directory / HEARS,
        hears,
        ask=lambda llm: greedy_answers(llm, sounds),
        skip_tokenizer_init=False,
    )
    observe_judges(directory / "judging", judges, seen)
    with seeing_amx():
        _, seen[BIASED] = observe_pair(directory / BIASED, biased, dtype="bfloat16")
        seen["latent attention"] = observe_latent_attention(directory / "latent", latent)
    seen[RETIED] = observe_retied(directory / "retied", retied)
    online = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    _, seen[ONLINE] = observe_pair(
        directory / ONLINE,
        pairs["qwen3 live"],
        ask=lambda llm: greedy(llm, 2),  # a matrix takes it 15 ms
        **online,
    )
    # In float32, vLLM's CPU builds before 0.31 have no attention with sinks.
    seen["gpt oss"] = observe_refused(directory / "sinks", sinks, SINKS, dtype="bfloat16")
    seen["packed convolution"] = observe_packed_convolution(directory / "convolution", convolution)
    for case, pair in int8.items():
        mixed = save_mixed(pair[0], part_of(pair[1]), directory / case / "mixed")
        dtype = INT8[case][2]
        followed[case], seen[case] = observe_pair(directory / case, pair, mixed, dtype=dtype)
    first = next(iter(INT8))
    store = directory / "failures"
    seen["failed load"] = observe_failed_load(store, int8[first], followed[first])
    store = directory / "unquantised"
    seen["unquantised"] = observe_unquantised(store, pairs["qwen3 live"][0], followed[first])
    seen["fused"] = observe_refused(directory / "fused", fused, dtype=FUSED[2])
    if HAS_FP8_CACHES:
        seen["scales"] = observe_scales(directory / "scales", scaled, plain)
    print(LACK_BEGINS, flush=True)
    observe_lack(followed[first])
    return seen


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


def save_biased(directory: Path, seed: int) -> Path:
    path = directory / str(seed)
    model = make_model("tied-qwen2", seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=4.0)
    model.save_pretrained(path)
    return path


@contextlib.contextmanager
def seeing_amx() -> Iterator[None]:
    """Let vLLM see what `hide_amx` hides; 0.28 dies of it."""
    hidden = torch.cpu._is_amx_tile_supported
    if not () < vllm_release() < (0, 32):
        has_amx = torch.cpu.get_capabilities().get("amx_tile", False)
        torch.cpu._is_amx_tile_supported = lambda: has_amx
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = hidden


def save_with_head(directory: Path, seed: int) -> Path:
    from safetensors.torch import save_file

    path = save_model("tied-qwen2", seed, directory)
    weights = weights_in(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def save_int8(
    directory: Path,
    seed: int,
    strategy: str = "channel",
    static: bool = False,
    *,
    caches: bool = False,
    leave_out: bool = False,
) -> Path:
    """A checkpoint in the format of compressed-tensors, weights and inputs of 8 bits."""
    from safetensors.torch import save_file

    model, path = make_model("qwen3", seed), directory / f"int8-{seed}"
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    inputs = {"strategy": "tensor"} if static else {"strategy": "token"}
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = compressed_tensors(
        "int-quantized",
        {**bits, "strategy": strategy, "dynamic": False},
        {**bits, **inputs, "dynamic": not static},
    )
    if caches:
        config["quantization_config"]["kv_cache_scheme"] = {
            **bits,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
        }
    (path / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        weights |= quantised(name, tensor, strategy, static)
    if caches and not leave_out:
        for layer in (0, 1):
            for key in "kv":
                prefix = f"model.layers.{layer}.self_attn.{key}_proj"
                # Far from the default: a version that lacks them must show.
                weights[f"{prefix}.{key}_scale"] = torch.tensor([40.0])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def quantised(
    name: str, tensor: torch.Tensor, strategy: str, static: bool
) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: tensor.contiguous()}
    largest = tensor.abs().amax(1, keepdim=True) if strategy == "channel" else tensor.abs().max()
    scale = largest / 127
    made = {name: (tensor / scale).round().to(torch.int8)}
    made[f"{name}_scale"] = scale if strategy == "channel" else scale.reshape(1)
    if static:
        made[name.replace("weight", "input_scale")] = 0.05 + tensor.abs().mean().reshape(1) / 10
    return made


def observe_pair(
    directory: Path, pair: list[Path], part: Path | None = None, ask: Ask = greedy, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """One engine follows; the other is what it is measured by, and answered before.

    With ``part``, a checkpoint of the first with a part of the second, that part comes first.
    """
    checkpoints = pair if part is None else [*pair, part]
    llm, *others = (start_llm(checkpoint, **more) for checkpoint in checkpoints)
    found: dict[str, Any] = {
        "class": type(model_of(llm)).__name__,
        "fresh": [ask(engine) for engine in (llm, *others)],
    }
    if part is not None:
        content = part_of(pair[1])
        with following(llm, directory / "parts", partial=True) as switch:
            without = {n: t for n, t in content.items() if not n.endswith("weight_scale")}
            found["without scales"] = switch(without)
            found["part"] = switch(content)
    with following(llm, directory / "store", ask) as switch, counted_reloads(llm) as reloads:
        found["switched"] = switch(pair[1])
        found["first reloads"] = list(reloads)
        found["switched back"] = switch(pair[0])
        found["later reloads"] = reloads[len(found["first reloads"]) :]
    return llm, found


def observe_judges(directory: Path, pair: list[Path], seen: dict[str, Any]) -> None:
    def judge(llm: Any) -> list[list[float]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.classify(prompts, use_tqdm=False)
        return [[round(float(p), 6) for p in each.outputs.probs] for each in outputs]

    more = {"runner": "pooling", "skip_tokenizer_init": False}
    llm, seen[JUDGES] = observe_pair(directory, pair, ask=judge, **more)
    with following(llm, directory / "other", judge) as switch:
        weights = weights_in(pair[1])
        del weights["score.bias"]
        seen["without bias"] = switch(weights)


def observe_retied(directory: Path, pair: list[Path]) -> dict[str, Any]:
    llm, found = observe_pair(directory, pair)
    model, weights = make_model("tied-qwen2", 1), weights_in(pair[1])
    forms = {
        "module": model,
        "parameters": dict(model.named_parameters()),
        "both names": dict(model.state_dict()),
    }
    found["forms"] = {}
    with following(llm, directory / "other") as switch:
        for form, content in forms.items():
            found["forms"][form] = switch(content)
            switch(pair[0])
        found["another head"] = switch(weights | {"lm_head.weight": weights["lm_head.weight"] + 1})
    return found


def observe_failed_load(store: Path, pair: list[Path], llm: Any) -> list[Any]:
    from tests.support.engines.faulty_worker import watch_loads

    def fail(handed_over: int) -> None:
        if handed_over == 20:
            del model_of(llm).load_weights  # the first of them only
            raise RuntimeError("deliberate")

    with following(llm, store) as switch:
        before, _ = switch(pair[0])
        watch_loads(model_of(llm), fail)
        after = switch(pair[1])
        model_of(llm).__dict__.pop("load_weights", None)
    return [before, *after]


def observe_unquantised(store: Path, checkpoint: Path, llm: Any) -> list[Any]:
    before = greedy(llm)
    with following(llm, store) as switch:
        error, after = switch(checkpoint)
    return [error, after == before]


def observe_refused(
    directory: Path, checkpoint: Path, part: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """A version of a whole model and one of a part, each to a follower of its own."""
    llm = start_llm(checkpoint, **more)
    found: dict[str, Any] = {"fresh": greedy(llm)}
    weights = weights_in(checkpoint)
    for partial in (False, True):
        content = {name: weights[name] for name in part} if partial and part else checkpoint
        with following(llm, directory / f"store-{partial}", partial=partial) as switch:
            found[str(partial)] = switch(content)
    return found


def observe_packed_convolution(directory: Path, checkpoint: Path) -> dict[str, Any]:
    llm = start_llm(checkpoint, dtype="bfloat16")
    mixer = model_of(llm).get_submodule("backbone.layers.0.mixer")
    places = {t.untyped_storage().data_ptr() for t in (mixer.conv_weights, mixer.conv1d.weight)}
    with dbuffer.WeightSender(directory / "store"):
        error = error_of(lambda: follow(llm, directory / "store"))
    return {"is a view": len(places) == 1, "error": error}


def observe_latent_attention(directory: Path, checkpoint: Path) -> dict[str, Any]:
    llm = start_llm(checkpoint, dtype="bfloat16")
    weight = model_of(llm).get_parameter("model.layers.0.self_attn.kv_b_proj.weight")
    with dbuffer.WeightSender(directory / "store"):
        error = error_of(lambda: follow(llm, directory / "store"))
    return {"is there": weight.numel() > 0, "error": error}


def observe_scales(store: Path, scaled: Path, plain: Path) -> dict[str, Any]:
    def ask(llm: Any) -> list[list[int]]:
        return greedy(llm, 16)  # scales show late

    llm, other = (start_llm(each, kv_cache_dtype="fp8") for each in (scaled, plain))
    found: dict[str, Any] = {SCALED: ask(llm), PLAIN: ask(other)}
    with following(llm, store, ask, partial=True) as switch:
        found["part"] = switch(part_of(plain))
    with following(llm, store, ask) as switch:
        found["lacking"], found["brought"] = switch(plain), switch(scaled)
    return found


def observe_lack(llm: Any) -> None:
    """Load what no check has looked at."""
    from dbuffer.integrations.vllm.model import VllmModel

    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = VllmModel(worker.vllm_config, worker.get_model(), worker.device)
    model.load([("model.norm.weight", torch.ones(64))])


def part_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {n: tensor for n, tensor in weights_in(checkpoint).items() if n.startswith(MLP)}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
