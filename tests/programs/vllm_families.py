"""Program of `test_families.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.programs.vllm_drafts import bigrams, eagle
from tests.support.engines.families import CONFIGURATIONS, make_family, save_family
from tests.support.engines.media_models import MEDIA, media_prompts, save_media_model
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import (
    PROMPTS,
    greedy,
    greedy_answers,
    judge,
    require_different,
    set_packing,
    start_llm,
)
from tests.support.waiting import error_of
from tests.support.worlds import World

ORDER = {"plain": (1, 0), "delta": (1, 2, 1, 0)}
"""Numbers of the weights that a sender of each kind publishes one after another.

Weights 0 and 1 differ everywhere. Weights 2 are weights 1 with one element in fifty changed: deltas
lead there and back.
"""
ORDER_OF_CHECKPOINTS = {"plain": (1, 0) * 5}
"""The later ones of these switches are copies."""


@dataclass(frozen=True)
class Case:
    make: Callable[[Path, int], Path]
    module: Callable[[int], Any] | None = None
    """Makes the module of a seed. None: only checkpoints are published."""
    arguments: dict[str, Any] = field(default_factory=dict)
    draft: Callable[[Path, int], Path] | None = None
    other: dict[str, Any] | None = None
    is_embedding: bool = False
    media: str = ""
    unused_tensors: str = "refuse"
    refused: str = ""


def family(model_type: str, *, embeds: bool = False, **more: Any) -> Case:
    return Case(
        lambda directory, seed: save_family(model_type, directory, seed, embeds=embeds),
        lambda seed: make_family(model_type, seed, embeds=embeds),
        **more,
    )


def saved(name: str, **more: Any) -> Case:
    return Case(
        lambda directory, seed: save_model(name, seed, directory),
        lambda seed: make_model(name, seed),
        **more,
    )


def qwen3(directory: Path, seed: int) -> Path:
    return save_model("qwen3", seed, directory)


def few_words(directory: Path, seed: int) -> Path:
    model = make_model("qwen3", seed)
    model.resize_token_embeddings(30)
    path = directory / f"few-words-{seed}"
    model.save_pretrained(path)
    return path


AS_EMBEDDING = {"runner": "pooling", "skip_tokenizer_init": False}

OF_THEIR_OWN = {"bert", "qwen3", "granitemoehybrid"}

FAMILIES = {
    **{name: family(name) for name in sorted(CONFIGURATIONS.keys() - OF_THEIR_OWN)},
    "qwen3_next": family("qwen3_next", arguments={"dtype": "bfloat16"}),
    "gpt oss": saved(
        "gpt-oss",
        refused="GptOssForCausalLM writes model.layers.0.attn.sinks without its loader",
    ),
    "mamba 2": saved("mamba2"),
    # Its checkpoint has a pooler that vLLM's embedding model has no place for.
    "bert": family(
        "bert", embeds=True, arguments=AS_EMBEDDING, is_embedding=True, unused_tensors="warn"
    ),
    "bert, pooler refused": family(
        "bert", embeds=True, arguments=AS_EMBEDDING, is_embedding=True, refused="pooler.dense"
    ),
    "qwen 3 embedding": family("qwen3", embeds=True, arguments=AS_EMBEDDING, is_embedding=True),
}
FEATURES = {
    "ngram speculation": Case(
        qwen3,
        arguments={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
            }
        },
        other={},
    ),
    "suffix speculation": Case(
        qwen3,
        arguments={"speculative_config": {"method": "suffix", "num_speculative_tokens": 2}},
        other={},
    ),
    "eagle, two ranks": Case(
        bigrams,
        arguments={
            "speculative_config": {"method": "eagle", "num_speculative_tokens": 2},
            "tensor_parallel_size": 2,
        },
        draft=eagle,
        other={"tensor_parallel_size": 2},
    ),
}
BFLOAT16 = {
    f"{name}, bfloat16": replace(case, arguments={"dtype": "bfloat16"})
    for name, case in FAMILIES.items()
    if not (case.arguments or case.refused)
}
BFLOAT16["mamba 2, bfloat16"] = replace(
    BFLOAT16["mamba 2, bfloat16"],
    refused="conv_weights was a view of backbone.layers.0.mixer.conv1d.weight until vLLM packed",
)
# On a CPU vLLM fails to keep states of Mamba in its prefix cache, with or without dbuffer.
HYBRID = {
    f"mamba beside attention, {dtype}": family(
        "granitemoehybrid",
        arguments={"dtype": dtype, "enable_prefix_caching": False},
        refused=refused,
    )
    for dtype, refused in {
        "float32": "",
        "bfloat16": "conv_weights was a view of model.layers.0.mamba.conv1d.weight until",
    }.items()
}
TWO_RANKS = {
    f"{name}, two ranks": replace(
        FAMILIES[name], module=None, arguments={"tensor_parallel_size": 2}
    )
    for name in ("gemma2", "granite", "mistral", "mixtral", "qwen2_moe")
}
# Padded to 64 rows, of which the second rank has the last 32.
TWO_RANKS["a rank without a word, two ranks"] = Case(
    few_words, arguments={"tensor_parallel_size": 2}
)
SEES_OR_HEARS = {
    model_type: Case(
        lambda directory, seed, model_type=model_type: save_media_model(
            model_type, directory, seed
        ),
        arguments={"skip_tokenizer_init": False},
        media=model_type,
    )
    for model_type in MEDIA
}
QUANTIZED = {
    # The ranks have common scales for layers that are cut along their inputs.
    "fp8 per channel, online, two ranks": Case(
        qwen3,
        arguments={
            "quantization": "fp8_per_channel",
            "dtype": "bfloat16",
            "tensor_parallel_size": 2,
        },
    )
}
CASES = FAMILIES | BFLOAT16 | HYBRID | TWO_RANKS | QUANTIZED | FEATURES | SEES_OR_HEARS


Send = Callable[[int], bool]


def module_of(case: Case, number: int) -> Any:
    assert case.module is not None
    module = case.module(min(number, 1))
    if number == 2:
        torch.manual_seed(number)
        for parameter in module.parameters():
            some = parameter.data.view(-1)[::50]
            some += 0.5 * torch.randn(some.shape)
    return module


def checkpoint_of(case: Case, number: int, directory: Path) -> Path:
    path = case.make(directory / str(number), min(number, 1))
    if number == 2 and case.module is not None:
        module_of(case, number).save_pretrained(path)
    return path


class Trained:
    """Module that is given each of the weights in turn, as training changes one in place."""

    def __init__(self, case: Case, wrap: Callable[[Any], Any] = lambda module: module) -> None:
        self._module = wrap(module_of(case, 0))
        self._states = [wrap(module_of(case, number)).state_dict() for number in range(3)]

    def at(self, number: int) -> Any:
        self._module.load_state_dict(self._states[number])
        return self._module


@contextlib.contextmanager
def sending(store: Path, weights: Callable[[int], Any], delta: bool) -> Iterator[Send]:
    with dbuffer.WeightSender(store, delta=delta) as sender:
        yield lambda number: sender.send(weights(number)).delta_bytes is not None


@contextlib.contextmanager
def sending_sharded(store: Path, world: World, delta: bool) -> Iterator[Send]:
    world.run(open_sender, store, delta)
    yield lambda number: world.run(send, number)[0]
    world.run(close_sender)


def run(directory: Path, name: str, layers: str) -> None:
    case = CASES[name]
    set_packing(packed=layers == "packed")
    checkpoints = [checkpoint_of(case, number, directory) for number in range(3)]
    followed = dict(case.arguments)
    if case.draft is not None:
        draft = case.draft(directory / "draft", 2)
        followed["speculative_config"] = followed["speculative_config"] | {"model": str(draft)}
    # The one that speculates comes last: vLLM starts no engine after that in a process.
    more = case.arguments if case.other is None else case.other
    others = [start_llm(path, **more) for path in checkpoints[1 : 3 if case.module else 2]]
    llm, ask = start_llm(checkpoints[0], **followed), answering(case)
    fresh = [ask(engine) for engine in (llm, *others)]
    for one, other in itertools.pairwise(fresh):
        require_different(one, other)
    if case.media:  # what was seen or heard has a part in the answers
        assert all(len(set(map(tuple, answers))) > 1 for answers in fresh)
    try:
        switch_in_all_forms(directory, name, checkpoints, llm, fresh)
    except dbuffer.UnsupportedError as error:
        if not case.refused:
            raise
        assert case.refused in str(error)
        assert ask(llm) == fresh[0]


def switch_in_all_forms(
    directory: Path, name: str, checkpoints: list[Path], llm: Any, fresh: list[Any]
) -> None:
    """Switch to checkpoints, to a module and to a sharded module, in full and by deltas."""
    case, store = CASES[name], directory / "store"
    ask, orders = answering(case), ORDER_OF_CHECKPOINTS
    senders: list[Callable[[bool], Any]] = [
        functools.partial(sending, store, checkpoints.__getitem__)
    ]
    with contextlib.ExitStack() as stack:
        follower = follow(llm, store, unused_tensors=case.unused_tensors)
        stack.enter_context(follower)
        if case.module is not None:
            processes = multiprocessing.get_context("spawn")
            world = stack.enter_context(World(directory, 2, processes=processes))
            world.run(shard, name)
            senders += [
                functools.partial(sending, store, Trained(case).at),
                functools.partial(sending_sharded, store, world),
            ]
            orders = ORDER
        for kind, numbers in orders.items():
            for sender in senders:
                with sender(kind == "delta") as send:
                    for place, number in enumerate(numbers):
                        is_delta = send(number)
                        error, answers = error_of(follower.sync), ask(llm)
                        if case.refused:
                            assert case.refused in str(error)
                            assert answers == fresh[0]
                            continue
                        assert (error, answers) == (None, fresh[number])
                        assert is_delta == (kind == "delta" and place in (1, 2))


def answering(case: Case) -> Callable[[Any], Any]:
    if case.media:
        prompts = media_prompts(case.media)
        return lambda llm: greedy_answers(llm, prompts)
    return embeddings if case.is_embedding else greedy


def embeddings(llm: Any) -> list[list[float]]:
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    return [list(output.outputs.embedding) for output in outputs]


# What runs on the ranks.

_here: dict[str, Any] = {}


def shard(rank: int, name: str) -> None:
    _here["trained"] = Trained(CASES[name], sharded)


def sharded(module: nn.Module) -> nn.Module:
    for layers in [part for part in module.modules() if isinstance(part, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer)
    return fully_shard(module)


def open_sender(rank: int, store: Path, delta: bool) -> None:
    _here["sender"] = dbuffer.ShardedWeightSender(store, delta=delta)


def send(rank: int, number: int) -> bool:
    publication = _here["sender"].send(_here["trained"].at(number))
    return publication.delta_bytes is not None


def close_sender(rank: int) -> None:
    _here.pop("sender").close()


if __name__ == "__main__":
    judge(run)
