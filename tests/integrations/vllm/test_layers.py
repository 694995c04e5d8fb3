"""Layers that vLLM loads in its own ways, in real engines, against fresh ones on those weights.

int8 layers, which are kernels with scales on a CPU; scales of quantised caches, which a checkpoint
may lack; vLLM's Transformers backend, whose layers are half transformers' own; heads with a bias,
and one that is tied to an embedding which is not vLLM's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.integrations.vllm.test_vllm import counted_reloads, error_of, set_packing
from tests.support.engines.media_models import media_prompts, save_media_model
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    PROMPTS,
    engine_arguments,
    greedy,
    greedy_answers,
    kept,
    leave,
    observe,
    vllm_release,
)

pytestmark = NEEDS_VLLM

# vLLM makes what experts need when its first engine has some, so that one comes first.
BACKEND = ("qwen3-moe packed", "olmo2 packed", "starcoder2 packed", "qwen3 live", "phi packed")
FAMILIES = (*BACKEND, "gpt-j packed", "bloom live")
if not () < vllm_release() < (0, 32):
    # Before, the backend takes no GPT-NeoX as transformers 5 saves it, and float32 no convolution.
    BACKEND += ("gpt-neox packed",)
    FAMILIES = (*BACKEND, "gpt-j packed", "bloom live", "mamba2 packed")
HEARS = "whisper"
"""Of an encoder and a decoder."""
JUDGES = "qwen3 that judges"
"""A classifier whose head has a bias, which vLLM registers as it loads it."""
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
needs_fp8_caches = pytest.mark.skipif(
    not HAS_FP8_CACHES, reason="vLLM keeps no fp8 caches on a CPU without AVX-512 and AMX"
)

SCALED, PLAIN = "cache with scales", "cache without scales"
MLP = "model.layers.0.mlp."
WARNING, LACK_BEGINS = ": Failed to load weights", "now something is missing"


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("layers")
    seen: dict[str, Any] = observe(__file__, directory)
    return seen | {"log": (directory / "log.txt").read_text()}


@pytest.mark.parametrize("case", [*FAMILIES, HEARS, JUDGES, RETIED, *INT8, ONLINE])
def test_switched_engines_answer_as_fresh_ones(observed: dict[str, Any], case: str) -> None:
    seen = observed[case]
    assert seen["errors"] == ["no error"] * 2
    for old, new in zip(*seen["fresh"][:2], strict=True):
        assert old != new
    assert seen["switched"] == seen["fresh"][1]
    assert seen["switched back"] == seen["fresh"][0]


@pytest.mark.parametrize("case", BACKEND)
def test_the_model_is_of_the_transformers_backend(observed: dict[str, Any], case: str) -> None:
    assert observed[case]["class"].startswith("Transformers")


def test_a_bias_that_a_loader_registers_must_come(observed: dict[str, Any]) -> None:
    error, answers = observed["without bias"]
    assert "score.bias of the engine's model was not published" in error
    assert answers == observed[JUDGES]["fresh"][0]


def test_a_tied_model_comes_in_any_form(observed: dict[str, Any]) -> None:
    seen = observed[RETIED]
    assert seen["forms"] == {form: ["no error", seen["fresh"][1]] for form in seen["forms"]}
    assert len(seen["forms"]) == 3


def test_a_head_that_differs_from_its_embedding_is_refused(observed: dict[str, Any]) -> None:
    error, tokens = observed[RETIED]["another head"]
    assert "lm_head.weight (it differs from model.embed_tokens.weight" in error
    assert tokens == observed[RETIED]["fresh"][0]


@pytest.mark.parametrize("case", INT8)
def test_a_part_of_an_int8_model(observed: dict[str, Any], case: str) -> None:
    seen = observed[case]
    assert seen["part"] == ["no error", seen["fresh"][2]]
    assert seen["fresh"][2] not in seen["fresh"][:2]


@pytest.mark.parametrize("case", INT8)
def test_int8_weights_without_their_scales_are_refused(observed: dict[str, Any], case: str) -> None:
    error, tokens = observed[case]["without scales"]
    assert "of model.layers.0.mlp.gate_up_proj came without its weight_scale" in error
    assert tokens == observed[case]["fresh"][0]


def test_an_int8_engine_goes_back_after_a_failed_load(observed: dict[str, Any]) -> None:
    before, error, tokens = observed["failed load"]
    assert before == "no error"
    assert "all ranks went back" in error
    assert tokens == observed["a scale a channel"]["fresh"][0]


def test_weights_that_are_not_quantised_are_refused_by_an_int8_engine(
    observed: dict[str, Any],
) -> None:
    error, is_as_before = observed["unquantised"]
    assert "torch.float32 does not convert to torch.int8" in error
    assert is_as_before


@pytest.mark.parametrize("partial", [False, True])
def test_a_layer_whose_reload_cannot_be_right_is_refused(
    observed: dict[str, Any], partial: bool
) -> None:
    seen = observed["fused"]
    error, tokens = seen[str(partial)]
    assert error.startswith("EngineUpdateError: ")
    assert "takes model.layers.0.mlp.gate_up_proj for whole" in error
    assert tokens == seen["fresh"]


@pytest.mark.parametrize("partial", [False, True])
def test_what_a_model_writes_past_its_loaders_is_refused(
    observed: dict[str, Any], partial: bool
) -> None:
    """vLLM's reload does not see it, and would leave the weights of the version before."""
    seen = observed["gpt oss"]
    error, tokens = seen[str(partial)]
    assert "GptOssForCausalLM writes model.layers.0.attn.sinks past its loader" in error
    assert tokens == seen["fresh"]


def test_what_was_a_view_of_a_packed_parameter_is_refused_at_once(observed: dict[str, Any]) -> None:
    """vLLM's reload leaves it as it is: half of the layer would be of the version before."""
    seen = observed["packed convolution"]
    if seen["is a view"]:  # where bfloat16 is not packed
        assert seen["error"] == "no error"
    else:
        assert seen["error"].startswith("UnsupportedError: ")
        assert "backbone.layers.0.mixer.conv_weights was a view of backbone." in seen["error"]


def test_layers_that_compute_are_reloaded_alone_beside_copies(observed: dict[str, Any]) -> None:
    """Mamba's mixers negate an exponential; all else of the model is copied, or packed before."""
    seen = observed["mixers"]
    assert seen["reloads"] == ["of a part"] * 2
    fresh = observed["mamba2 packed"]["fresh"]
    assert seen["answers"] == [fresh[1], fresh[0]]


@needs_fp8_caches
def test_scales_that_do_not_come_are_the_defaults(observed: dict[str, Any]) -> None:
    """As in an engine that is started on that checkpoint; not those of the version before."""
    seen = observed["scales"]
    assert seen["errors"] == ["no error"] * 3
    assert seen["lacking"] == seen[PLAIN]
    assert seen["brought"] == seen[SCALED]
    assert all(a != b for a, b in zip(seen[PLAIN], seen[SCALED], strict=True))


@needs_fp8_caches
def test_a_part_leaves_scales_as_they_are(observed: dict[str, Any]) -> None:
    assert observed["scales"]["part"] == observed["scales"][SCALED]


def test_nothing_is_warned_of_that_is_no_failure(observed: dict[str, Any]) -> None:
    before, _ = observed["log"].split(LACK_BEGINS)
    assert WARNING not in before


def test_what_really_gets_nothing_is_warned_of(observed: dict[str, Any]) -> None:
    _, after = observed["log"].split(LACK_BEGINS)
    assert f"QKVParallelLinear{WARNING}" in after
    assert f"RotaryEmbedding{WARNING}" not in after


# From here on, the program that runs in the subprocess.


def run(directory: Path, engines: list[Any]) -> dict[str, Any]:
    from tests.support.engines.tiny_models import save_mixed, save_model

    seen: dict[str, Any] = {}
    hears = [save_media_model(HEARS, directory, seed) for seed in (0, 1)]
    judges = [save_judge(directory / JUDGES, seed) for seed in (0, 1)]
    retied = [save_with_head(directory / RETIED, seed) for seed in (0, 1)]
    # vLLM changes transformers' classes for its backend, so all models are made before.
    pairs = {case: save_pair(directory, case) for case in FAMILIES}
    sinks = save_model("gpt-oss", 0, directory)
    convolution = save_model("mamba2", 0, directory / "convolution")
    saved = {case: save_int8_pair(directory / case, *INT8[case][:2]) for case in INT8}
    fused = save_int8_pair(directory / "fused", *FUSED[:2])
    scaled = save_int8(directory / SCALED, 0, caches=True)
    plain = save_int8(directory / PLAIN, 0, caches=True, leave_out=True)
    for case, pair in pairs.items():
        set_packing(packed=case.endswith("packed"))
        more = {"model_impl": "transformers"} if case in BACKEND else {}
        seen[case] = observe_pair(directory / case, pair, engines, **more)
    mamba = "mamba2 packed"
    mixers = engines[2 * FAMILIES.index(mamba)]
    seen["mixers"] = observe_mixers(directory / "mixers", pairs[mamba], mixers)
    set_packing(packed=True)
    sounds = media_prompts(HEARS)
    seen[HEARS] = observe_pair(
        directory / HEARS,
        hears,
        engines,
        answer=lambda llm: greedy_answers(llm, sounds),
        skip_tokenizer_init=False,
    )
    observe_judges(directory / "judging", judges, engines, seen)
    observe_retied(directory / "retied", retied, engines, seen)
    online = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    seen[ONLINE] = observe_pair(directory / ONLINE, pairs["qwen3 live"], engines, **online)
    observe_sinks(directory / "sinks", sinks, engines, seen)
    observe_packed_convolution(directory / "convolution", convolution, engines, seen)
    first = len(engines)
    for case, pair in saved.items():
        mixed = save_mixed(pair[0], part_of(pair[1]), directory / case / "mixed")
        seen[case] = observe_pair(directory / case, pair, engines, mixed, dtype=INT8[case][2])
    failures = directory / "failures"
    observe_int8_failures(failures, saved["a scale a channel"], engines[first], seen)
    observe_unquantised(failures / "plain", pairs["qwen3 live"][0], engines[first], seen)
    observe_fused(directory / "fused", fused[0], engines, seen)
    if HAS_FP8_CACHES:
        observe_scales(directory / "scales", scaled, plain, engines, seen)
    print(LACK_BEGINS, flush=True)
    observe_lack(engines[first])
    return seen


def save_pair(directory: Path, case: str) -> list[Path]:
    from tests.support.engines.tiny_models import save_model

    return [save_model(case.split()[0], seed, directory) for seed in (0, 1)]


def save_judge(directory: Path, seed: int) -> Path:
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from tests.support.engines.tiny_models import SHAPE, SPECIAL_TOKENS, save_tokenizer

    torch.manual_seed(seed)
    heads: dict[str, Any] = {"num_attention_heads": 4, "head_dim": 32, "num_labels": 2}
    model = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, **SPECIAL_TOKENS, **heads))
    path = directory / str(seed)
    model.save_pretrained(path)
    save_tokenizer(path)
    weights = load_file(path / "model.safetensors") | {"score.bias": torch.randn(2)}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def save_with_head(directory: Path, seed: int) -> Path:
    from safetensors.torch import save_file

    from tests.support.engines.tiny_models import save_model, weights_in

    path = save_model("tied-qwen2", seed, directory)
    weights = weights_in(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def save_int8_pair(directory: Path, strategy: str, static: bool) -> list[Path]:
    return [save_int8(directory, seed, strategy=strategy, static=static) for seed in (0, 1)]


def save_int8(
    directory: Path,
    seed: int,
    *,
    strategy: str = "channel",
    static: bool = False,
    caches: bool = False,
    leave_out: bool = False,
) -> Path:
    """A checkpoint in the format of compressed-tensors, weights and inputs of 8 bits."""
    from safetensors.torch import save_file

    from tests.support.engines.tiny_models import make_model

    model, path = make_model("qwen3", seed), directory / f"int8-{seed}"
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    inputs = {"strategy": "tensor"} if static else {"strategy": "token"}
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**bits, "strategy": strategy, "dynamic": False},
                "input_activations": {**bits, **inputs, "dynamic": not static},
            }
        },
    }
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
    directory: Path,
    pair: list[Path],
    engines: list[Any],
    part: Path | None = None,
    answer: Callable[[Any], list[list[int]]] = greedy,
    **more: Any,
) -> dict[str, Any]:
    """One engine follows; the other is what it is measured by, and answered before.

    With ``part``, a checkpoint of the first with a part of the second, that part comes first.
    """
    import vllm

    from dbuffer.integrations.vllm import follow

    checkpoints = pair if part is None else [*pair, part]
    started = [vllm.LLM(**engine_arguments(checkpoint, **more)) for checkpoint in checkpoints]
    engines += started
    llm = started[0]
    found: dict[str, Any] = {
        "class": type(model_of(llm)).__name__,
        "fresh": [answer(engine) for engine in started],
        "errors": [],
    }
    if part is not None:
        observe_parts(directory / "parts", part_of(pair[1]), llm, found)
    with dbuffer.WeightSender(directory / "store") as sender:
        with follow(llm, directory / "store") as follower:
            for checkpoint, when in zip(reversed(pair), ("switched", "switched back"), strict=True):
                sender.send(checkpoint)
                found["errors"].append(error_of(follower.sync))
                found[when] = answer(llm)
    return found


def observe_judges(
    directory: Path, pair: list[Path], engines: list[Any], seen: dict[str, Any]
) -> None:
    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import weights_in

    def judge(llm: Any) -> list[list[float]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.classify(prompts, use_tqdm=False)
        return [[round(float(p), 6) for p in each.outputs.probs] for each in outputs]

    more = {"runner": "pooling", "skip_tokenizer_init": False}
    seen[JUDGES] = observe_pair(directory, pair, engines, answer=judge, **more)
    llm, store = engines[-2], directory / "other"
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        weights = weights_in(pair[1])
        sender.send({name: t for name, t in weights.items() if name != "score.bias"})
        seen["without bias"] = [error_of(follower.sync), judge(llm)]


def observe_retied(
    directory: Path, pair: list[Path], engines: list[Any], seen: dict[str, Any]
) -> None:
    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import make_model, weights_in

    seen[RETIED] = observe_pair(directory, pair, engines)
    model, weights = make_model("tied-qwen2", 1), weights_in(pair[1])
    forms = {
        "module": model,
        "parameters": dict(model.named_parameters()),
        "both names": dict(model.state_dict()),
    }
    llm, store = engines[-2], directory / "other"
    seen[RETIED]["forms"] = {}
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        for form, content in forms.items():
            sender.send(content)
            seen[RETIED]["forms"][form] = [error_of(follower.sync), greedy(llm)]
            sender.send(pair[0])
            follower.sync()
        sender.send(weights | {"lm_head.weight": weights["lm_head.weight"] + 1})
        seen[RETIED]["another head"] = [error_of(follower.sync), greedy(llm)]


def observe_parts(
    store: Path, part: dict[str, torch.Tensor], llm: Any, found: dict[str, Any]
) -> None:
    from dbuffer.integrations.vllm import follow

    with dbuffer.WeightSender(store) as sender, follow(llm, store, partial=True) as follower:
        sender.send({n: tensor for n, tensor in part.items() if not n.endswith("weight_scale")})
        found["without scales"] = [error_of(follower.sync), greedy(llm)]
        sender.send(part)
        found["part"] = [error_of(follower.sync), greedy(llm)]


def observe_mixers(directory: Path, pair: list[Path], llm: Any) -> dict[str, Any]:
    from dbuffer.integrations.vllm import follow

    with dbuffer.WeightSender(directory) as sender, follow(llm, directory) as follower:

        def switch(checkpoint: Path) -> list[list[int]]:
            sender.send(checkpoint)
            follower.sync()
            return greedy(llm)

        for checkpoint in (*pair, *pair, pair[0]):  # until it is proven
            switch(checkpoint)
        with counted_reloads(llm) as reloads:
            answers = [switch(pair[1]), switch(pair[0])]
    return {"reloads": reloads, "answers": answers}


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def observe_int8_failures(
    directory: Path, pair: list[Path], llm: Any, seen: dict[str, Any]
) -> None:
    from dbuffer.integrations.vllm import follow
    from tests.support.engines.faulty_worker import watch_loads

    def fail(handed_over: int) -> None:
        if handed_over == 20:
            del model_of(llm).load_weights  # the first of them only
            raise RuntimeError("deliberate")

    with dbuffer.WeightSender(directory) as sender:
        with follow(llm, directory) as follower:
            sender.send(pair[0])
            before = error_of(follower.sync)
            watch_loads(model_of(llm), fail)
            sender.send(pair[1])
            seen["failed load"] = [before, error_of(follower.sync), greedy(llm)]
            model_of(llm).__dict__.pop("load_weights", None)


def observe_unquantised(store: Path, checkpoint: Path, llm: Any, seen: dict[str, Any]) -> None:
    from dbuffer.integrations.vllm import follow

    before = greedy(llm)
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        sender.send(checkpoint)
        seen["unquantised"] = [error_of(follower.sync), greedy(llm) == before]


def observe_fused(
    directory: Path, checkpoint: Path, engines: list[Any], seen: dict[str, Any]
) -> None:
    import vllm

    from dbuffer.integrations.vllm import follow

    llm = vllm.LLM(**engine_arguments(checkpoint, dtype=FUSED[2]))
    engines.append(llm)
    seen["fused"] = {"fresh": greedy(llm)}
    with dbuffer.WeightSender(directory / "store") as sender:
        sender.send(checkpoint)
        for partial in (False, True):
            with follow(llm, directory / "store", partial=partial) as follower:
                seen["fused"][str(partial)] = [error_of(follower.sync), greedy(llm)]


def observe_sinks(
    directory: Path, checkpoint: Path, engines: list[Any], seen: dict[str, Any]
) -> None:
    import vllm

    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import weights_in

    # In float32, vLLM's CPU builds before 0.31 have no attention with sinks.
    llm = vllm.LLM(**engine_arguments(checkpoint, dtype="bfloat16"))
    engines.append(llm)
    seen["gpt oss"] = {"fresh": greedy(llm)}
    part = ("model.layers.0.self_attn.sinks", "model.norm.weight")
    with dbuffer.WeightSender(directory / "store") as sender:
        for partial in (False, True):
            weights = weights_in(checkpoint)
            sender.send({name: weights[name] for name in part} if partial else weights)
            with follow(llm, directory / "store", partial=partial) as follower:
                seen["gpt oss"][str(partial)] = [error_of(follower.sync), greedy(llm)]


def observe_packed_convolution(
    directory: Path, checkpoint: Path, engines: list[Any], seen: dict[str, Any]
) -> None:
    import vllm

    from dbuffer.integrations.vllm import follow

    llm = vllm.LLM(**engine_arguments(checkpoint, dtype="bfloat16"))
    engines.append(llm)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    mixer = worker.get_model().get_submodule("backbone.layers.0.mixer")
    places = {t.untyped_storage().data_ptr() for t in (mixer.conv_weights, mixer.conv1d.weight)}
    with dbuffer.WeightSender(directory / "store"):
        error = error_of(lambda: follow(llm, directory / "store"))
    seen["packed convolution"] = {"is a view": len(places) == 1, "error": error}


def observe_scales(
    directory: Path, scaled: Path, plain: Path, engines: list[Any], seen: dict[str, Any]
) -> None:
    import vllm

    from dbuffer.integrations.vllm import follow

    llm, other = (
        vllm.LLM(**engine_arguments(checkpoint, kv_cache_dtype="fp8"))
        for checkpoint in (scaled, plain)
    )
    engines += [llm, other]
    found: dict[str, Any] = {SCALED: greedy(llm), PLAIN: greedy(other), "errors": []}
    with dbuffer.WeightSender(directory) as sender:
        with follow(llm, directory, partial=True) as follower:
            sender.send(part_of(plain))
            found["errors"].append(error_of(follower.sync))
            found["part"] = greedy(llm)
        with follow(llm, directory) as follower:
            for checkpoint, when in ((plain, "lacking"), (scaled, "brought")):
                sender.send(checkpoint)
                found["errors"].append(error_of(follower.sync))
                found[when] = greedy(llm)
    seen["scales"] = found


def observe_lack(llm: Any) -> None:
    """Load what no check has looked at."""
    from dbuffer.integrations.vllm.model import VllmModel

    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = VllmModel(worker.vllm_config, worker.get_model(), worker.device)
    model.load([("model.norm.weight", torch.ones(64))])


def part_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    from tests.support.engines.tiny_models import weights_in

    return {n: tensor for n, tensor in weights_in(checkpoint).items() if n.startswith(MLP)}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target, kept))
