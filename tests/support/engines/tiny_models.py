"""Models small enough to make on the spot, that a real vLLM takes on a CPU."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 32}
_STATE = {"state_size": 16, "head_dim": 32, "num_heads": 4, "n_groups": 1}
_POSITIONS = {"n_layer": 2, "n_head": 2, "vocab_size": 500, "initializer_range": 0.2}


def _kinds() -> dict[str, tuple[str, dict[str, Any]]]:
    """The name of each family in transformers, and its configuration; of the shape as it is now."""
    four = {**SHAPE, "num_attention_heads": 4}
    two = {**SHAPE, "num_attention_heads": 2}
    others = {**two, **SPECIAL_TOKENS}

    def without(*names: str) -> dict[str, Any]:
        return {name: size for name, size in others.items() if name not in names}

    no_heads = ("intermediate_size", "num_key_value_heads", "max_position_embeddings")
    moe = {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return {
        "qwen3": ("Qwen3", {**four, "head_dim": 32}),
        "llama": ("Llama", two),
        "tied-qwen2": ("Qwen2", {**two, "tie_word_embeddings": True}),
        "qwen3-moe": ("Qwen3Moe", {**four, **_EXPERTS, **moe}),
        # vLLM has no models of its own for most of these; the others load in ways of their own.
        "bloom": ("Bloom", {**_POSITIONS, **SPECIAL_TOKENS, "hidden_size": 64}),
        "phi": ("Phi", others),  # its head has a bias, which the Transformers backend registers
        "olmo2": ("Olmo2", others),
        "gpt-neox": ("GPTNeoX", without("num_key_value_heads")),
        "starcoder2": ("Starcoder2", others),
        "gpt-j": ("GPTJ", {**_POSITIONS, "n_embd": 64, "n_positions": 256, "rotary_dim": 16}),
        "gpt-oss": ("GptOss", {**others, **_EXPERTS, "num_local_experts": 4}),
        "mamba2": ("Mamba2", {**without(*no_heads), **_STATE}),
    }


def make_model(family: str, seed: int) -> Any:
    """A model of random weights; the seed decides which."""
    import transformers  # takes seconds, and processes import this file to collect tests

    torch.manual_seed(seed)
    kind, shape = _kinds()[family]
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if family == "bloom":
        model.get_input_embeddings().weight.data.mul_(0.05)
    if family not in FAMILIES:
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


def make_tokenizer(*special: str) -> Any:
    """A word for each token, the last ones of their own names; words stand between spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

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
    shutil.copytree(base, path, dirs_exist_ok=True)
    save_file(weights_in(base) | part, path / "model.safetensors", {"format": "pt"})
    return path


def compressed_tensors(
    kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Configuration of a checkpoint that compressed-tensors has quantised, but for its head."""
    group = {"targets": ["Linear"], "weights": weights}
    if inputs is not None:
        group["input_activations"] = inputs
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
