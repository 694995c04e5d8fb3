"""Switches by copies alone, in real engines that are not what a plan takes for granted.

Weights that something replaces while they serve; a reranker that computes its head from its
embedding; and a model that keeps buffers and a cached head beside its parameters.
"""

from __future__ import annotations

from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.tiny_models import SHAPE, save_mixed, save_tokenizer, weights_in
from tests.support.engines.vllm_engines import (
    counted_reloads,
    following,
    greedy,
    judge,
    model_of,
    set_packing,
    start_llm,
)
from tests.support.waiting import error_of


def run(directory: Path) -> None:
    set_packing(packed=False)
    base = save_qwen3(directory / "base", num_hidden_layers=3)
    llm = start_llm(base, how="none")
    fill_what_replaced_a_parameter_or_a_layer(directory, base, llm)
    refuse_a_reranker_that_computes_its_head(directory)
    keep_buffers_and_renew_a_cached_head(directory)


def save_qwen3(path: Path, **more: Any) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(num_attention_heads=2, head_dim=32, **{**SHAPE, **more})
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def fill_what_replaced_a_parameter_or_a_layer(directory: Path, base: Path, llm: Any) -> None:
    model, weights = model_of(llm), weights_in(base)
    mlp = model.model.layers[1].mlp

    def replace(parameter: Any) -> torch.nn.Parameter:
        like = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
        like.__class__ = parameter.__class__
        like.__dict__.update(parameter.__dict__)
        return like

    def replace_parameter() -> None:
        mlp.down_proj.weight = replace(mlp.down_proj.weight)

    published = [weights[f"model.{name}.weight"] for name in ("layers.1.mlp.down_proj", "norm")]

    def send() -> None:
        for tensor in published:
            tensor += 0.1
        sender.send(weights)

    store = directory / "replaced store"
    with (
        dbuffer.WeightSender(store) as sender,
        follow(llm, store) as follower,
        counted_reloads(llm) as reloads,
    ):

        def switch() -> None:
            send()
            assert follower.sync() is not None
            served = [mlp.down_proj.weight.detach(), model.model.norm.weight.detach()]
            assert all(map(torch.equal, served, published))

        switch()
        switch()
        assert follower.sync(force=True) is not None
        replace_parameter()
        switch()
        reloads.clear()
        switch()
        assert reloads == []
        replace_parameter()
        assert follower.sync(force=True) is not None
        switch()
        # vLLM knows the layers that it has made, and would empty these.
        before = mlp.down_proj
        shallow = copy(before)
        shallow._parameters = before._parameters | {"weight": replace(before.weight)}
        deep = deepcopy(before, {id(before.weight): replace(before.weight)})
        for mlp.down_proj in (shallow, deep, before):
            switch()
            assert follower.sync(force=True) is not None
            switch()
            switch()
        # vLLM computes with the old ones: it finds attention in a table, and the other layer here
        # calls a method of the layer that it is a copy of.
        for parent, name in ((model.model.layers[1].self_attn, "attn"), (model.model, "norm")):
            before = getattr(parent, name)
            layer = copy(before)
            if name == "norm":
                layer._parameters = before._parameters | {"weight": replace(before.weight)}
                layer.method = before.forward
            setattr(parent, name, layer)
            send()
            for force in (False, True):
                error = error_of(lambda force=force: follower.sync(force=force))
                assert f"{name} since following began" in error
                assert llm.llm_engine.get_weight_version() == "unknown"
            setattr(parent, name, before)
            assert follower.sync() is not None
        norm = model.model.layers[1].input_layernorm.weight
        norm.data, memory = model.model.norm.weight.data, norm.data
        error = error_of(lambda: follower.sync(force=True))
        assert "something replaced" in error
        assert "norm.weight since" in error
        assert llm.llm_engine.get_weight_version() == "unknown"
        norm.data = memory
        assert follower.sync() is not None


def refuse_a_reranker_that_computes_its_head(directory: Path) -> None:
    reranker = save_qwen3(directory / "reranker", tie_word_embeddings=True)
    save_tokenizer(reranker)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["word10", "word20"],
        "is_original_qwen3_reranker": True,
        "method": "from_2_way_softmax",
        "num_labels": 1,
    }
    more = {"skip_tokenizer_init": False, "runner": "pooling", "hf_overrides": overrides}
    llm = start_llm(reranker, how="none", **more)

    def score(llm: Any) -> list[float]:
        [output] = llm.classify([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
        return list(output.outputs.probs)

    before = score(llm)
    with following(llm, directory / "reranker store", score) as switch:
        error, after = switch(weights_in(reranker))
    assert error.startswith("EngineUpdateError: ")
    assert "computes score.weight from model.embed_tokens.weight" in error
    assert after == before


def keep_buffers_and_renew_a_cached_head(directory: Path) -> None:
    """Switch by a reload and by copies, and after a reset of vLLM's weight checker."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class Caching(Qwen3ForCausalLM):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            norm = self.model.norm
            for name, value in (
                ("scalar", torch.tensor(0.75)),
                ("filled", torch.zeros(2)),
                ("alias", norm.weight.data),
            ):
                norm.register_buffer(name, value, persistent=False)
            self.head = -1, torch.empty(0)

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            self.model.norm.filled.fill_(3.0)
            weight = self.lm_head.weight
            if self.head[0] != weight._version:
                self.head = weight._version, weight.double()
            return (hidden.double() @ self.head[1].T).float()

    ModelRegistry.register_model("Qwen3ForCausalLM", Caching)
    checkpoint = save_qwen3(directory / "caching", tie_word_embeddings=False)
    llm = start_llm(checkpoint, how="none")
    model, weights = model_of(llm), weights_in(checkpoint)

    def checksums() -> Any:
        return llm.collective_rpc("compute_weight_checksums")

    def state(_: Any) -> Any:
        greedy(llm, 1)
        norm = model.model.norm
        head = weights["lm_head.weight"]
        assert torch.equal(model.head[1][: len(head)], head.double())  # vLLM pads the vocabulary
        assert torch.equal(norm.alias, weights["model.norm.weight"])
        assert (float(norm.scalar), norm.filled.tolist()) == (0.75, [3.0, 3.0])
        return checksums()

    seen = []
    with following(llm, directory / "caching store", state, delta=True) as switch:
        for number in range(6):
            if number == 5:
                llm.collective_rpc("reset_weights")
            for tensor in weights.values():
                tensor.view(-1)[number :: tensor.numel() // 2] += 0.5
            error, checksum = switch(weights)
            assert error is None
            saved = save_mixed(checkpoint, weights, directory / f"caching {number}")
            seen.append((saved, checksum))
    for saved, checksum in seen:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(saved)})
        assert checksums() == checksum


if __name__ == "__main__":
    judge(run)
