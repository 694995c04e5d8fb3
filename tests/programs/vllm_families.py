"""Program of `test_families.py`, which says what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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


def run(directory: Path, name: str, layers: str) -> None:
    case = CASES[name]
    set_packing(packed=layers == "packed")
    checkpoints = [case.make(directory / str(seed), seed) for seed in (0, 1)]
    followed = dict(case.arguments)
    if case.draft is not None:
        draft = case.draft(directory / "draft", 2)
        followed["speculative_config"] = followed["speculative_config"] | {"model": str(draft)}
    # The one that speculates comes last: vLLM starts no engine after that in a process.
    more = case.arguments if case.other is None else case.other
    other = start_llm(checkpoints[1], **more)
    llm, ask = start_llm(checkpoints[0], **followed), answering(case)
    fresh = [ask(llm), ask(other)]
    require_different(*fresh)
    if case.media:  # what was seen or heard has a part in the answers
        assert all(len(set(map(tuple, answers))) > 1 for answers in fresh)
    try:
        switch(directory / "store", case, checkpoints, llm, fresh)
    except dbuffer.UnsupportedError as error:
        if not case.refused:
            raise
        assert case.refused in str(error)
        assert ask(llm) == fresh[0]


def switch(store: Path, case: Case, checkpoints: list[Path], llm: Any, fresh: list[Any]) -> None:
    """Switch to checkpoints, the later ones by copies, and to modules."""
    forms: list[list[Any]] = [checkpoints] * 5
    if case.module is not None:
        forms.append([case.module(seed) for seed in (0, 1)])
    with follow(llm, store, unused_tensors=case.unused_tensors) as follower:
        for weights in forms:
            for seed in (1, 0):
                with dbuffer.WeightSender(store) as sender:
                    sender.send(weights[seed])
                error, answers = error_of(follower.sync), answering(case)(llm)
                if case.refused:
                    assert case.refused in str(error)
                    assert answers == fresh[0]
                else:
                    assert (error, answers) == (None, fresh[seed])


def answering(case: Case) -> Callable[[Any], Any]:
    if case.media:
        prompts = media_prompts(case.media)
        return lambda llm: greedy_answers(llm, prompts)
    return embeddings if case.is_embedding else greedy


def embeddings(llm: Any) -> list[list[float]]:
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    return [list(output.outputs.embedding) for output in outputs]


if __name__ == "__main__":
    judge(run)
