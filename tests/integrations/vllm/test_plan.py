"""Switches by copies alone, in real engines that are not what a plan takes for granted.

Weights that vLLM's own `reload_weights` has put back, of each kind of parameter of a deep model; a
reranker that computes its head from its embedding; and a model that keeps published tensors beside
its parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from tests.integrations.vllm.test_vllm import error_of, set_packing
from tests.support.engines.tiny_models import (
    SHAPE,
    save_mixed,
    save_model,
    save_tokenizer,
    weights_in,
)
from tests.support.engines.vllm_engines import NEEDS_VLLM, engine_arguments, kept, leave, observe

pytestmark = NEEDS_VLLM

NUM_LAYERS = 17  # of eight parameters each
KINDS = ("down_proj", "o_proj", "input_layernorm")
"""Of parameters; vLLM fuses some of them with others."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    seen: dict[str, Any] = observe(__file__, tmp_path_factory.mktemp("plan"))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_vllm_put_back_is_not_patched_upon(observed: dict[str, Any], kind: str) -> None:
    assert observed["put back"][kind] == {"put back": NUM_LAYERS, "wrong": []}


def test_a_reranker_that_computes_its_head_is_refused_and_serves_on(
    observed: dict[str, Any],
) -> None:
    error, is_as_before = observed["reranker"]
    assert error.startswith("EngineUpdateError: ")
    assert "computes score.weight from model.embed_tokens.weight" in error
    assert is_as_before


def test_what_a_model_keeps_beside_its_parameters_is_of_the_version(
    observed: dict[str, Any],
) -> None:
    assert observed["beside"][0] == [[7.0, 9.0], [11.0, 10.0]]


def test_a_tensor_of_which_a_model_keeps_a_view_is_refused(observed: dict[str, Any]) -> None:
    assert "no place for viewed" in observed["beside"][1]


# From here on, the program that runs in the subprocess.


def run(directory: Path) -> dict[str, Any]:
    set_packing(packed=False)
    return {
        "put back": observe_put_back(directory),
        "reranker": observe_reranker(directory),
        "beside": observe_beside(directory),
    }


def start(checkpoint: Path, **more: Any) -> Any:
    import vllm

    kept.append(vllm.LLM(**engine_arguments(checkpoint, how="none", **more)))
    return kept[-1]


def parameters(llm: Any) -> dict[str, torch.Tensor]:
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def observe_put_back(directory: Path) -> dict[str, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dbuffer.integrations.vllm import follow

    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": NUM_LAYERS}
    config = Qwen3Config(num_attention_heads=2, head_dim=32, **shape)
    Qwen3ForCausalLM(config).save_pretrained(directory / "deep")
    llm = start(directory / "deep")
    weights = weights_in(directory / "deep")
    seen: dict[str, Any] = {}

    def put(checkpoint: Path) -> dict[str, torch.Tensor]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
        return parameters(llm)

    with (
        dbuffer.WeightSender(directory / "deep store", delta=True) as sender,
        follow(llm, directory / "deep store", poll_interval_s=0.01) as follower,
    ):
        sender.send(weights)
        follower.sync()
        for kind in KINDS:
            base = save_mixed(directory / "deep", weights, directory / f"before {kind}")
            before = parameters(llm)
            for name, tensor in weights.items():
                if kind in name:
                    tensor.view(-1)[: max(1, tensor.numel() // 50)] += 0.5
            sender.send(weights)
            follower.sync()
            trained = parameters(llm)
            changed = [name for name in before if not torch.equal(before[name], trained[name])]
            put(base)
            weights["model.norm.weight"][3] += 1.0
            sender.send(weights)
            follower.sync()
            switched = parameters(llm)
            right = put(save_mixed(directory / "deep", weights, directory / f"after {kind}"))
            wrong = [name for name in right if not torch.equal(right[name], switched[name])]
            seen[kind] = {"put back": len(changed), "wrong": wrong}
    return seen


def observe_reranker(directory: Path) -> list[Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dbuffer.integrations.vllm import follow

    config = Qwen3Config(num_attention_heads=2, head_dim=32, tie_word_embeddings=True, **SHAPE)
    Qwen3ForCausalLM(config).save_pretrained(directory / "reranker")
    save_tokenizer(directory / "reranker")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["word10", "word20"],
        "is_original_qwen3_reranker": True,
        "method": "from_2_way_softmax",
        "num_labels": 1,
    }
    llm = start(
        directory / "reranker", skip_tokenizer_init=False, runner="pooling", hf_overrides=overrides
    )

    def score() -> list[float]:
        [output] = llm.classify([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
        return list(output.outputs.probs)

    before = score()
    with (
        dbuffer.WeightSender(directory / "reranker store") as sender,
        follow(llm, directory / "reranker store", poll_interval_s=0.01) as follower,
    ):
        sender.send(weights_in(directory / "reranker"))
        return [error_of(follower.sync), score() == before]


def observe_beside(directory: Path) -> list[Any]:
    """What a model has beside its parameters, after three versions without a change, and one."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    from dbuffer.integrations.vllm import follow

    class Keeping(Qwen3ForCausalLM):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> Any:
            def rest() -> Any:
                for name, tensor in weights:
                    if name == "kept":
                        self.kept = tensor.clone()
                        continue
                    if name == "viewed":
                        self.viewed = tensor.detach().view(-1)
                        continue
                    if name == "model.norm.weight":
                        self.largest = tensor.max()
                    yield name, tensor

            return super().load_weights(rest())

    ModelRegistry.register_model("Qwen3ForCausalLM", Keeping)
    base = save_model("qwen3", 0, directory)
    weights = weights_in(base) | {"kept": torch.tensor([7.0])}
    weights["model.norm.weight"][0] = 9.0
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    llm = start(base)
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    seen = []
    with (
        dbuffer.WeightSender(directory / "kept store") as sender,
        follow(llm, directory / "kept store", poll_interval_s=0.01) as follower,
    ):
        for number in range(4):
            weights["model.norm.weight"][1] += 0.1
            if number == 3:
                weights["kept"][0], weights["model.norm.weight"][0] = 11.0, 10.0
            sender.send(weights)
            follower.sync()
            if number >= 2:
                seen.append([float(model.kept[0]), float(model.largest)])
        # In memory that is written anew two versions later.
        sender.send(weights | {"viewed": torch.ones(8)})
        return [seen, error_of(follower.sync)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
