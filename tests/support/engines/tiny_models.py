"""Models small enough to make on the spot, that a real vLLM takes on a CPU."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

FAMILIES = ("qwen3", "llama", "tied-qwen2", "qwen3-moe")

SHAPE: dict[str, Any] = {
    # No multiple of 64, so that vLLM pads its embeddings.
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Ten times the usual: weights must show in the tokens.
    "initializer_range": 0.2,
}
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def make_model(family: str, seed: int) -> Any:
    """A model of random weights; the seed decides which."""
    torch.manual_seed(seed)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, head_dim=32, **SHAPE))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **SHAPE))
    if family == "qwen3-moe":
        config = Qwen3MoeConfig(
            num_attention_heads=4,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            **SHAPE,
        )
        return Qwen3MoeForCausalLM(config)
    if family in OTHERS:
        return make_other(family)
    config = Qwen2Config(num_attention_heads=2, tie_word_embeddings=True, **SHAPE)
    return Qwen2ForCausalLM(config)


OTHERS = ("bloom", "phi", "olmo2", "gpt-neox", "starcoder2", "gpt-j", "gpt-oss", "mamba2")


def make_other(family: str) -> Any:
    """Families that vLLM has no model of its own for, and three that load in ways of their own."""
    more = {"num_attention_heads": 2, **SPECIAL_TOKENS}
    if family == "olmo2":
        model: Any = Olmo2ForCausalLM(Olmo2Config(**SHAPE, **more))
    elif family == "gpt-neox":
        shape = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, **more))
    elif family == "gpt-oss":
        experts = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
        model = GptOssForCausalLM(GptOssConfig(**SHAPE, **experts, **more))
    elif family == "mamba2":
        state = {"state_size": 16, "head_dim": 32, "num_heads": 4, "n_groups": 1}
        sizes = {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        model = Mamba2ForCausalLM(Mamba2Config(initializer_range=0.2, **sizes, **state, **more))
    elif family == "phi":  # its head has a bias, which vLLM's Transformers backend registers
        model = PhiForCausalLM(PhiConfig(**SHAPE, **more))
    elif family == "bloom":
        names = {"n_layer": 2, "n_head": 2, "hidden_size": 64, "vocab_size": 500}
        model = BloomForCausalLM(BloomConfig(initializer_range=0.2, **names, **SPECIAL_TOKENS))
        model.get_input_embeddings().weight.data.mul_(0.05)
    elif family == "starcoder2":
        model = Starcoder2ForCausalLM(Starcoder2Config(**SHAPE, **more))
    else:
        names = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 16}
        config = GPTJConfig(vocab_size=500, initializer_range=0.2, **names)
        model = GPTJForCausalLM(config)
    vary_vectors(model)
    return model


def vary_vectors(model: Any) -> None:
    """Norms and biases are all ones and zeros at first, and would not show."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)


def save_tokenizer(checkpoint: Path) -> None:
    """For who does not begin without one; nobody asks it much."""
    make_tokenizer().save_pretrained(checkpoint)


def make_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """A word for each token, the last ones of their own names; words stand between spaces."""
    plain = [f"word{number}" for number in range(SHAPE["vocab_size"] - len(special))]
    words = {word: number for number, word in enumerate([*plain, *special])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="word0",
        eos_token="word1",
        pad_token="word2",
        bos_token="word3",
        additional_special_tokens=list(special),
    )


def revealing_weights(version: int) -> dict[str, torch.Tensor]:
    """Weights for a "qwen3" that answers with :func:`token_of` ``(version)``, whatever it is asked.

    The embedding, the last norm and the head must be of one version to do so: with parts of two,
    the answer is token 0. All other weights are zero, so that only the residual stream remains.
    """
    shapes = _shapes_of_revealing_weights()
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    hidden = SHAPE["hidden_size"]
    # A direction that no two versions near each other share.
    axis = version % hidden
    weights["model.embed_tokens.weight"][:, axis] = 1.0
    weights["model.norm.weight"][axis] = 1.0
    head = weights["lm_head.weight"]
    head[0] = 1.0
    head[0, axis] = 0.0
    head[token_of(version), axis] = 1.0
    return weights


@functools.cache
def _shapes_of_revealing_weights() -> dict[str, tuple[torch.Size, torch.dtype]]:
    parameters = make_model("qwen3", 0).named_parameters()
    return {name: (tensor.shape, tensor.dtype) for name, tensor in parameters}


def token_of(version: int) -> int:
    """The token of a version; both halves of the vocabulary, so both of two ranks, have some."""
    return 1 + version % 249 + (250 if version % 2 else 0)


def version_of(reported: str) -> int:
    """The version that a response reports; an engine's starting weights are "default"."""
    return 0 if reported == "default" else int(reported)


def wrong_tokens(response: dict[str, Any]) -> list[Any]:
    """The spans whose tokens are not all of the version that is reported for them."""
    tokens = response["tokens"]
    return [
        (version, tokens[start:end], token_of(version_of(version)))
        for version, start, end in response["spans"]
        if set(tokens[start:end]) != {token_of(version_of(version))}
    ]


def save_revealing(version: int, directory: Path) -> Path:
    """Such a model as a Hugging Face checkpoint; its directory."""
    model = make_model("qwen3", 0)
    model.load_state_dict(revealing_weights(version), strict=False)
    path = directory / f"revealing-{version}"
    model.save_pretrained(path)
    return path


def save_model(family: str, seed: int, directory: Path) -> Path:
    """The same as a Hugging Face checkpoint; its directory."""
    path = directory / f"{family}-{seed}"
    make_model(family, seed).save_pretrained(path)
    return path


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return load_file(checkpoint / "model.safetensors")


def transformers_greedy(
    model: Any, prompts: Iterable[list[int]], max_tokens: int
) -> list[list[int]]:
    """Return the tokens that transformers answers each prompt with."""
    answers = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None
        )
        answers.append(output[0][len(prompt) :].tolist())
    return answers


def save_mixed(base: Path, part: dict[str, torch.Tensor], path: Path) -> Path:
    """A checkpoint of the base with a part of another one."""
    shutil.copytree(base, path)
    save_file(weights_in(base) | part, path / "model.safetensors", {"format": "pt"})
    return path
