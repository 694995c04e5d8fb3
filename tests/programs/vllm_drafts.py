"""Program of `test_drafts.py`, which says what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.tiny_models import (
    SHAPE,
    make_model,
    save_mixed,
    save_model,
    weights_in,
)
from tests.support.engines.vllm_engines import (
    counted_reloads,
    greedy,
    judge,
    set_packing,
    start_llm,
)
from tests.support.waiting import error_of

NUM_PROVEN = 4
"""After so many switches of each kind, with a draft and without one, all are copies."""
NUM_VERSIONS = 20
NOISE = 0.003
"""How far a draft is from its policy, as after training beside the policy."""

HIDDEN, INNER, VOCABULARY = (
    SHAPE[size] for size in ("hidden_size", "intermediate_size", "vocab_size")
)
NUM_HEADS = 2
WIDTH = {"num_attention_heads": NUM_HEADS, **SHAPE}

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """How an engine speculates."""

    target: Callable[[Path, int], Path]
    """Saves the checkpoint of a seed below a directory."""
    speculates: dict[str, Any]
    draft: Callable[[Path, int], Path] | None = None
    """Saves one, where it is not in the target's checkpoint."""


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
}
SHARES = {
    "eagle": [True, True],
    "eagle3": [True, True],
    "eagle3 with a head": [True, False],
    "draft model": [False, False],
}
"""Whether a draft has the target's embedding, and its head."""


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


def is_of_mtp(name: str) -> bool:
    return "mtp" in name


class Engines:
    """Targets 0 and 1, drafts 0 and 1, and fresh engines of any two of them."""

    def __init__(self, directory: Path, name: str, dtype: str) -> None:
        case = CASES[name]
        self.dtype = dtype
        self.is_mtp = case.draft is None
        self.directory = directory
        self.targets = [case.target(directory, seed) for seed in (0, 1)]
        self.drafts: list[Path] = []
        if case.draft is not None:
            self.drafts = [case.draft(directory / f"draft-{seed}", seed) for seed in (2, 3)]
        self.speculates = case.speculates
        self.answers: dict[tuple[int, int], Any] = {}

    def start(self, target: int, draft: int, **more: Any) -> tuple[Any, Callable[[], Any]]:
        if self.is_mtp:
            mixed = self.directory / f"mixed-{target}-{draft}"
            path = save_mixed(self.targets[target], self.version(target, draft)[0], mixed)
            config = self.speculates
        else:
            path = self.targets[target]
            config = self.speculates | {"model": str(self.drafts[draft])}
        llm = start_llm(path, dtype=self.dtype, speculative_config=config, **more)
        return llm, asking(llm)

    def fresh(self, target: int, draft: int) -> Any:
        """The tokens and proposals of a fresh engine."""
        if (target, draft) not in self.answers:
            self.answers[target, draft] = self.start(target, draft)[1]()
        return self.answers[target, draft]

    def version(self, target: int, draft: int | None) -> tuple[Weights, Weights | None]:
        weights = weights_in(self.targets[target])
        if not self.is_mtp:
            return weights, None if draft is None else weights_in(self.drafts[draft])
        rest = {name: tensor for name, tensor in weights.items() if not is_of_mtp(name)}
        if draft is None:
            return rest, None
        others = weights_in(self.targets[draft])
        return rest | {n: t for n, t in others.items() if is_of_mtp(n)}, None


def follow_drafts(directory: Path, name: str, form: str) -> None:
    dtype, layers = form.split()
    set_packing(packed=layers == "packed")
    engines = Engines(directory, name, dtype)
    llm, ask = engines.start(0, 0)
    assert ask() == engines.fresh(0, 0)
    assert engines.fresh(0, 0)[1] != engines.fresh(0, 1)[1]
    assert engines.is_mtp or shares_of(llm) == SHARES.get(name)
    store = directory / "store"
    with dbuffer.WeightSender(store, keep=9) as sender, follow(llm, store) as follower:

        def send(target: int, draft: int | None) -> Any:
            weights, of_draft = engines.version(target, draft)
            sender.send(weights, draft=of_draft)
            return error_of(follower.sync)

        # With a draft and without one: such a version leaves the draft.
        kept = 0
        for place, (target, draft) in enumerate([(1, 1), (0, None), (0, 0), (1, None)] * 4):
            with counted_reloads(llm) as reloads:
                assert send(target, draft) is None
            kept = kept if draft is None else draft
            assert ask() == engines.fresh(target, kept), (place, target, draft)
            assert place < 2 * NUM_PROVEN or not reloads, (place, reloads)
        assert send(1, 1) is None
        served = ask()
        refuse_misfits(engines, sender, follower)
        assert ask() == served == engines.fresh(1, 1)
        assert runner_of(llm).model is not runner_of(llm).drafter.model
        go_back(llm, lambda: send(0, 0))
        assert ask() == engines.fresh(1, 1)
        # Back to a version without a draft: the draft becomes the one of the start.
        assert send(1, None) is None
        go_back(llm, lambda: send(0, 1))
        assert ask() == engines.fresh(1, 0)
        assert send(1, 1) is None
        assert ask() == engines.fresh(1, 1)
        load_without_a_follower(engines, sender)
    if name == "eagle":  # several tokens in a step: what it proposes is often right
        assert all(len(proposals) < 12 for _, proposals in engines.answers.values())


def misfits(part: Weights) -> list[tuple[Weights, str]]:
    """Return drafts that do not fit, each with the error message that it causes."""
    names = [name for name, tensor in part.items() if tensor.dim() == 2]
    name = next((n for n in names if is_of_mtp(n)), names[-1])
    narrow = {**part, name: part[name][:, :-1].contiguous()}
    fewer = {n: t for n, t in part.items() if n != name}
    return [
        (narrow, name),
        (fewer, "were published"),
        ({**part, "of_none.w": torch.ones(3)}, "of_none"),
    ]


def refuse_misfits(engines: Engines, sender: Any, follower: Any) -> None:
    weights, draft = engines.version(0, 0)
    for changed, told in misfits(weights if draft is None else draft)[: 2 if engines.is_mtp else 3]:
        parts = (changed, None) if draft is None else (weights, changed)
        sender.send(parts[0], draft=parts[1])
        error = error_of(follower.sync)
        assert error is not None, told
        assert told in str(error), error


def load_without_a_follower(engines: Engines, sender: Any) -> None:
    """At an engine's start, and in vLLM's own session for a draft."""
    options = {"dbuffer": {"store": str(sender.store)}}
    llm, ask = engines.start(0, 0, additional_config=options)
    assert ask() == engines.fresh(1, 1)
    assert llm.llm_engine.collective_rpc("supports_draft_weight_updates") == [True]
    weights, draft = engines.version(0, 0)
    sender.send(weights, draft=draft)
    llm.start_draft_weight_update()
    llm.update_weights({"update_info": {}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    assert ask() == engines.fresh(0, 0)


def go_back(llm: Any, send: Callable[[], Any]) -> None:
    """A load that fails after all of a version was loaded."""
    from dbuffer.engine.endpoint import RankEndpoint

    model: Any = RankEndpoint.of(runner_of(llm).model).receiver._model  # type: ignore[union-attr]
    load, num_loads = model.load, 0

    def fail_once(staged: Any) -> None:
        nonlocal num_loads
        num_loads += 1
        load(staged)
        if num_loads == 1:
            raise RuntimeError("out of luck")

    model.load = fail_once
    try:
        error = send()
    finally:
        del model.load
    assert "all ranks went back" in str(error), error
    assert num_loads == 2


def measure_acceptance(directory: Path) -> dict[str, float]:
    """Two engines begin with one policy and its draft, and follow the policy's twenty versions.

    One engine's draft comes with each version. The other engine's draft stays as it is.
    """
    start, end = (weights_in(save_model("llama", seed, directory)) for seed in (0, 1))
    policies = [
        {name: torch.lerp(start[name], end[name], step / NUM_VERSIONS) for name in start}
        for step in range(NUM_VERSIONS + 1)
    ]
    draft = save_mixed(directory / "llama-0", near(policies[0]), directory / "draft")
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    shares: dict[str, float] = {}
    for follows in (False, True):
        llm = start_llm(directory / "llama-0", disable_log_stats=False, speculative_config=config)
        store = directory / f"store-{follows}"
        shares["at first"] = acceptance(llm)
        with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
            for policy in policies[1:]:
                sender.send(policy, draft=near(policy) if follows else None)
                assert follower.sync() is not None
        shares["at last, with drafts" if follows else "at last, without"] = acceptance(llm)
    return shares


def near(policy: Weights) -> Weights:
    torch.manual_seed(0)
    return {name: tensor + NOISE * torch.randn_like(tensor) for name, tensor in policy.items()}


def acceptance(llm: Any) -> float:
    """Return the share of a draft's tokens that an engine accepts."""
    before = counts(llm)
    greedy(llm, 32)
    proposed, accepted = (b - a for a, b in zip(before, counts(llm), strict=True))
    return accepted / proposed


def counts(llm: Any) -> list[float]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [values[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")]


def run(directory: Path, *case: str) -> Any:
    return follow_drafts(directory, *case) if case else measure_acceptance(directory)


if __name__ == "__main__":
    judge(run)
