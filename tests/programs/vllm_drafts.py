"""Program of `test_drafts.py`, which says what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.tiny_models import SHAPE, make_model, save_model, weights_in
from tests.support.engines.vllm_engines import (
    counted_reloads,
    following,
    greedy,
    judge,
    require_different,
    set_packing,
    start_llm,
)

ORDER = (1, 0) * 4
"""Of the two targets, as they are published."""
NUM_PROVEN = 4
"""After so many switches all are copies."""

HIDDEN, INNER, VOCABULARY = (
    SHAPE[size] for size in ("hidden_size", "intermediate_size", "vocab_size")
)
NUM_HEADS = 2
WIDTH = {"num_attention_heads": NUM_HEADS, **SHAPE}


@dataclass(frozen=True)
class Case:
    """How an engine speculates."""

    target: Callable[[Path, int], Path]
    """Saves the checkpoint of a seed below a directory."""
    speculates: dict[str, Any]
    draft: Callable[[Path, int], Path] | None = None
    """Saves one, where it is not in the target's checkpoint."""
    needs: str = "vllm"
    """The package that proposes."""


def llama(directory: Path, seed: int) -> Path:
    return save_model("llama", seed, directory)


def bigrams(directory: Path, seed: int) -> Path:
    """A target whose next token is nearly a matter of its embedding and its head alone."""
    model = make_model("llama", seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.002)
    path = directory / f"bigrams-{seed}"
    model.save_pretrained(path)
    return path


def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
    return scale * torch.randn(shape)


def layer(prefix: str, *, num_inputs: int = 1, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """A decoder layer's weights, which adds this much to what goes through."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return {
        **{f"{attention}{p}_proj.weight": normal(HIDDEN, num_inputs * HIDDEN) for p in "qkv"},
        f"{attention}o_proj.weight": normal(HIDDEN, HIDDEN, scale=scale),
        f"{mlp}gate_proj.weight": normal(INNER, HIDDEN),
        f"{mlp}up_proj.weight": normal(INNER, HIDDEN),
        f"{mlp}down_proj.weight": normal(HIDDEN, INNER, scale=scale),
        f"{prefix}post_attention_layernorm.weight": 1 + normal(HIDDEN),
    }


def save_draft(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"dtype": "float32", **config}))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def eagle(directory: Path, seed: int) -> Path:
    """Has neither embedding nor head: with those of a target of bigrams, it often is right."""
    torch.manual_seed(seed)
    passes = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    return save_draft(
        directory / "eagle",
        {**WIDTH, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **ONE_LAYER},
        {"fc.weight": passes, **layer("layers.0.", scale=0.0004)},
    )


def eagle3(directory: Path, seed: int, *, has_head: bool = False) -> Path:
    torch.manual_seed(seed)
    head = {"lm_head.weight": normal(VOCABULARY, HIDDEN)} if has_head else {}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return save_draft(
        directory / "eagle3",
        {
            **WIDTH,
            **ONE_LAYER,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
        {
            "fc.weight": normal(HIDDEN, 3 * HIDDEN),
            **layer("midlayer.", num_inputs=2),
            **{f"{norm}.weight": 1 + normal(HIDDEN) for norm in norms},
            **head,
        },
    )


def medusa(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    blocks = {f"blocks.{i}.layers.0.weight": normal(HIDDEN, HIDDEN) for i in range(NUM_HEADS)}
    heads = {f"lm_heads.{i}.weight": normal(VOCABULARY, HIDDEN) for i in range(NUM_HEADS)}
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": NUM_HEADS}
    return save_draft(directory / "medusa", {**config, **sizes}, {**blocks, **heads})


def mimo(directory: Path, seed: int) -> Path:
    """A target whose checkpoint holds a layer more, which is the draft."""
    path = save_model("tied-qwen2", seed, directory)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    weights = weights_in(path)
    torch.manual_seed(seed)
    draft = "model.mtp_layers.0."
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.0."):
            ones = 1 if "norm" in name else 0
            weights[draft + name.removeprefix("model.layers.0.")] = ones + normal(*tensor.shape)
    for norm in ("token", "hidden", "final"):
        weights[f"{draft}{norm}_layernorm.weight"] = 1 + normal(HIDDEN)
    weights[f"{draft}input_proj.weight"] = normal(HIDDEN, 2 * HIDDEN)
    return save_draft(directory / f"mimo-{seed}", config, weights)


ONE_LAYER = {"num_hidden_layers": 1}
CASES = {
    "eagle": Case(bigrams, {"method": "eagle", "num_speculative_tokens": 2}, eagle),
    "eagle3": Case(llama, {"method": "eagle3", "num_speculative_tokens": 2}, eagle3),
    "eagle3 with a head": Case(
        llama,
        {"method": "eagle3", "num_speculative_tokens": 2},
        lambda directory, seed: eagle3(directory, seed, has_head=True),
    ),
    "medusa": Case(llama, {"method": "medusa", "num_speculative_tokens": 2}, medusa),
    "draft model": Case(llama, {"method": "draft_model", "num_speculative_tokens": 2}, llama),
    "mtp": Case(mimo, {"method": "mtp", "num_speculative_tokens": 1}),
    "suffix": Case(
        llama, {"method": "suffix", "num_speculative_tokens": 2}, needs="arctic_inference"
    ),
}


SHARES = {
    "eagle": [True, True],
    "eagle3": [True, True],
    "eagle3 with a head": [True, False],
    "draft model": [False, False],
}
"""Whether a draft has the target's embedding, and its head."""


def run(directory: Path, name: str, dtype: str) -> dict[str, int]:
    case = CASES[name]
    set_packing(packed=True)
    pair = [case.target(directory, seed) for seed in (0, 1)]
    config = case.speculates | ({"model": str(case.draft(directory, 2))} if case.draft else {})
    fresh = [greedy(start_llm(path, dtype=dtype)) for path in pair]
    require_different(*fresh)
    engines = [start_llm(path, dtype=dtype, speculative_config=config) for path in pair]
    ask, ask_other = map(asking, engines)
    speculating = [ask(), ask_other()]
    assert [tokens for tokens, _ in speculating] == fresh
    proposals = []
    with following(engines[0], directory / "store", lambda _: ask()) as switch:
        for place, number in enumerate(ORDER):
            with counted_reloads(engines[0]) as reloads:
                error, (tokens, proposed) = switch(pair[number])
            assert (error, tokens) == (None, fresh[number])
            assert place < NUM_PROVEN or not reloads
            proposals.append(proposed)
    judge_proposals(name, [proposed for _, proposed in speculating], proposals)
    if name not in ("suffix", "mtp"):
        assert shares_of(engines[0]) == SHARES.get(name)
    return {"switches of engines that speculate": len(ORDER)}


def judge_proposals(name: str, fresh: list[Any], switched: list[Any]) -> None:
    assert fresh[0] != fresh[1]
    if name == "suffix":  # several tokens in a step: it proposes what a version before has answered
        assert all(len(proposals) < 12 for proposals in switched[2:])
    else:
        assert switched == [fresh[number] for number in ORDER]
    if name == "eagle":  # several tokens in a step: what it proposes is often right
        assert all(len(proposals) < 12 for proposals in (*fresh, *switched))


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def shares_of(llm: Any) -> list[bool] | None:
    target, draft = (runner_of(llm).model, getattr(runner_of(llm).drafter, "model", None))
    if not hasattr(getattr(draft, "model", None), "embed_tokens"):
        return None
    shares_embedding = draft.model.embed_tokens is target.model.embed_tokens
    return [shares_embedding, draft.lm_head is target.lm_head]


def asking(llm: Any) -> Callable[[], tuple[Any, Any]]:
    """How an engine is asked: its tokens, and all that was proposed meanwhile, step by step."""
    drafter = runner_of(llm).drafter
    propose, proposals = drafter.propose, []

    def listened(*args: Any, **kwargs: Any) -> Any:
        proposed = propose(*args, **kwargs)
        is_tensor = isinstance(proposed, torch.Tensor)
        proposals.append(proposed.tolist() if is_tensor else proposed)
        return proposed

    drafter.propose = listened

    def ask() -> tuple[Any, Any]:
        proposals.clear()
        return greedy(llm), list(proposals)

    return ask


if __name__ == "__main__":
    judge(run)
