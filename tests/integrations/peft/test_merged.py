"""A peft model published as the model that it acts as, which is what peft itself would merge."""

from __future__ import annotations

import copy
import resource
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dbuffer
from dbuffer.integrations import peft as integration
from tests.support.children import Child
from tests.support.engines.tiny_models import make_model
from tests.support.peft_parts import (
    LINEAR,
    NEEDS_PEFT,
    bits,
    config,
    everything_in,
    lora,
    make,
    reference,
    train,
)
from tests.support.soak import is_soak
from tests.support.waiting import error_of
from tests.support.ways import NEEDS_CONVERSIONS

METHODS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "lora, rank-stabilised, ranks by layer": partial(
        lora, use_rslora=True, rank_pattern={"v_proj": 2}
    ),
    "lora of biases": partial(lora, target_modules=["q_proj"], lora_bias=True),
    "dora": partial(lora, use_dora=True),
    "lora on the embedding": partial(lora, target_modules=[*LINEAR, "embed_tokens"]),
    "lora on embedding and head": partial(
        lora, target_modules=["q_proj", "embed_tokens", "lm_head"]
    ),
    "head trained whole": partial(lora, modules_to_save=["lm_head"]),
    "some tokens": partial(lora, trainable_token_indices=[1, 2]),
    "ia3": partial(
        config,
        "IA3Config",
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "loha": partial(config, "LoHaConfig", r=4, target_modules=LINEAR),
    "lokr": partial(config, "LoKrConfig", r=4, target_modules=LINEAR),
    "oft": partial(config, "OFTConfig", oft_block_size=4, r=0, target_modules=LINEAR),
    "vera": partial(config, "VeraConfig", r=4, target_modules=["q_proj"]),
    "norms": partial(config, "LNTuningConfig", target_modules=["norm"]),
}
UNTIED = ("lora", "lora on the embedding", "lora on embedding and head", "head trained whole")
CASES = [
    *(("tied-qwen2", method) for method in METHODS),
    # Its layers have no biases.
    *(("qwen3", m) for m in (METHODS if is_soak() else UNTIED) if m != "lora of biases"),
]
"""Outside of soaks, methods that reach neither embedding nor head with the tied family alone."""

pytestmark = [
    *NEEDS_PEFT,
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
]


def received(store: Path) -> dict[str, torch.Tensor]:
    """All tensors under all their names, in memory of their own."""
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        return tensors | {alias: tensors[name] for alias, name in snapshot.aliases.items()}


@pytest.mark.parametrize(("family", "method"), CASES)
def test_what_arrives_is_what_peft_would_merge(store, sender, family, method):
    model = make(family, METHODS[method]())
    expected, before = reference(model), everything_in(model)
    weights = integration.merged_weights(model)
    sender.send(weights)
    assert list(weights) == list(expected)
    assert bits(received(store)) == bits(expected)
    assert everything_in(model) == before
    base = make_model(family, 0).state_dict()
    assert list(expected) == list(base)
    assert bits(expected) != bits(base)
    # What is tied in the merged model is stored once.
    is_tied = (
        expected["lm_head.weight"].data_ptr() == expected["model.embed_tokens.weight"].data_ptr()
    )
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert snapshot.aliases == (
            {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        )
    assert is_tied == (family == "tied-qwen2" and method != "head trained whole")


@NEEDS_CONVERSIONS
def test_experts_that_are_one_parameter_are_merged_once_and_published_one_by_one(
    store, sender, tmp_path, monkeypatch
):
    model = make(
        "qwen3-moe",
        lora(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    from dbuffer.integrations.peft import merged

    merge, merges = merged._merge_layer, list[Any]()
    monkeypatch.setattr(merged, "_merge_layer", lambda layer: merges.append(layer) or merge(layer))
    weights = integration.merged_weights(model)
    for step in range(2):
        merges.clear()
        sender.send(weights)
        assert len(merges) == 6  # of two layers: queries, and two tensors of experts
        alone = copy.deepcopy(model).merge_and_unload()
        alone.save_pretrained(tmp_path / str(step))
        expected = load_file(tmp_path / str(step) / "model.safetensors")
        assert bits(received(store)) == bits(expected)
        train(model, seed=step + 1)
    sender.send(integration.merged_weights(model, as_checkpoint=False))
    assert bits(received(store)) == bits(reference(model))


class TestSeveralAdapters:
    @pytest.fixture
    def model(self) -> Any:
        model = make("qwen3", lora(target_modules=["q_proj", "v_proj"]))
        model.add_adapter("other", lora(r=2, target_modules=["v_proj", "down_proj"]))
        model.base_model.set_adapter(["default", "other"])
        train(model, 3)
        return model

    def test_all_that_are_active(self, store, sender, model):
        sender.send(integration.merged_weights(model))
        assert bits(received(store)) == bits(reference(model))
        assert bits(reference(model)) != bits(reference(model, ["default"]))

    def test_some_are_merged_already(self, store, sender, model):
        expected = reference(model)
        model.merge_adapter(["default"])
        before = everything_in(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft says that it adds to those
            sender.send(integration.merged_weights(model))
        assert everything_in(model) == before
        assert bits(received(store)) == bits(expected)

    def test_one_that_is_merged_and_not_active_is_refused(self, sender, model):
        model.set_adapter("other")
        model.merge_adapter(["default"])
        with pytest.raises(dbuffer.InvalidWeightsError, match="merged into it, 'default'"):
            integration.merged_weights(model)

    def test_switched_since_is_refused(self, store, sender, model):
        weights = integration.merged_weights(model)
        model.set_adapter("default")
        with pytest.raises(dbuffer.InvalidWeightsError, match="merged or disabled since"):
            sender.send(weights)
        sender.send(integration.merged_weights(model))
        assert bits(received(store)) == bits(reference(model, ["default"]))


class TestPublishing:
    def test_a_failure_half_way_leaves_model_and_store_alone(self, store, sender, monkeypatch):
        model = make("qwen3", lora())
        sender.send(integration.merged_weights(model))
        first, before = received(store), everything_in(model)
        train(model, 7)
        before = everything_in(model)
        weights = integration.merged_weights(model)
        from peft.tuners.lora.layer import Linear

        merge, calls = Linear.merge, []

        def fail(layer: Any, *args: Any, **kwargs: Any) -> None:
            merge(layer, *args, **kwargs)
            calls.append(layer)
            if len(calls) == 3:
                raise ValueError("NaNs detected")

        monkeypatch.setattr(Linear, "merge", fail)
        with pytest.raises(ValueError, match="NaNs"):
            sender.send(weights)
        monkeypatch.undo()
        assert everything_in(model) == before
        assert bits(received(store)) == bits(first)
        sender.send(weights)
        assert bits(received(store)) == bits(reference(model))


MORE_BYTES = 64 << 20


def publish_under_a_limit(connection: Connection, store: Path) -> None:
    """Publish a model again when little more memory is allowed; then try to copy the model."""
    from peft import get_peft_model

    layers = [torch.nn.Linear(1024, 1024) for _ in range(32)]
    model = get_peft_model(torch.nn.Sequential(*layers), lora(target_modules=r"\d+"))
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        for _ in range(3):  # threads, buffers and caches are there then
            sender.send(integration.merged_weights(model))
        # Private memory only: what is mapped from the store's files does not count.
        status = Path("/proc/self/status").read_text().splitlines()
        [used_kib] = [int(line.split()[1]) for line in status if "VmData" in line]
        limit_bytes = (used_kib << 10) + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
        sender.send(integration.merged_weights(model))
        connection.send("published")
        connection.send(error_of(lambda: copy.deepcopy(model).merge_and_unload()))


def test_no_second_copy_of_the_model(store):
    """Of 32 layers of 4 MiB one or two are there twice; a copy of the model would be 128 MiB."""
    with Child(publish_under_a_limit, store) as child:
        assert child.receive() == "published"
        assert "memory" in child.receive()  # so the limit refuses one


class TestRefused:
    def refuse(self, model: Any, match: str) -> None:
        before = everything_in(model) if hasattr(model, "peft_config") else None
        with pytest.raises(dbuffer.InvalidWeightsError, match=match):
            integration.merged_weights(model)
        assert before is None or everything_in(model) == before

    def test_models_that_peft_cannot_merge(self):
        self.refuse(torch.nn.Linear(2, 2), "a Linear has no adapters")
        prompts = config("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=2)
        self.refuse(make("qwen3", prompts), "has no adapters that can be merged")
        biased = lora(target_modules=["q_proj"], lora_bias=True)
        self.refuse(make("qwen3", biased), "peft cannot merge .* has no bias")

    def test_adapters_that_are_disabled(self):
        model = make("qwen3", lora())
        with model.disable_adapter():
            self.refuse(model, "are disabled")

    def test_quantised(self):
        model = make("qwen3", lora())
        model.get_base_model().quantization_method = "bitsandbytes"
        self.refuse(model, "the base model is quantized")

    def test_tensors_that_are_more_than_tensors(self):
        class Packed(torch.nn.Parameter):
            pass

        model = make("qwen3", lora())
        layer = model.get_base_model().model.layers[0].mlp.up_proj
        layer.weight = Packed(layer.weight.data, requires_grad=False)
        self.refuse(model, "up_proj.weight' is a Packed, quantized or sharded")
