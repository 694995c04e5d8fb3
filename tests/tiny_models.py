"""Models small enough to make on the spot, that a real vLLM takes on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("qwen3", "llama", "tied-qwen2")

_SHAPE: dict[str, Any] = {
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


def make_model(family: str, seed: int) -> Any:
    """A model of random weights; the seed decides which."""
    torch.manual_seed(seed)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, head_dim=32, **_SHAPE))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **_SHAPE))
    config = Qwen2Config(num_attention_heads=2, tie_word_embeddings=True, **_SHAPE)
    return Qwen2ForCausalLM(config)


def save_model(family: str, seed: int, directory: Path) -> Path:
    """The same as a Hugging Face checkpoint; its directory."""
    path = directory / f"{family}-{seed}"
    make_model(family, seed).save_pretrained(path)
    return path
