"""A real vLLM engine in this process, on a model of random weights made on the spot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.models import Weights

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_SCALE = 0.1
"""Of random weights: large enough for layers to outweigh the tied embedding in the tokens."""

_HEAD_SIZES = {1.0: 64, 0.25: 32}
"""By the model's width; of those that vLLM's attention takes."""

_CACHE_BLOCK_TOKENS = 32
_PROMPTS = (range(1, 6), range(200, 300))  # one longer than a cache block
_TOKENS = 8

Tokens = list[list[int]]


def qwen2_weights(width: float, seed: int) -> Weights:
    """Weights of Qwen2.5-0.5B's shape; page-locked where there is a GPU to copy them to."""
    torch.manual_seed(seed)
    weights = models.random_weights(models.qwen2_0_5b(width=width))
    for name, tensor in weights.items():
        tensor.mul_(_SCALE).add_(1 if "norm" in name else 0)
    if torch.cuda.is_available():
        return {name: tensor.pin_memory() for name, tensor in weights.items()}
    return weights


class Checkpoint:
    """A Hugging Face checkpoint of one safetensors file, to be saved anew."""

    def __init__(self, directory: Path, width: float) -> None:
        from transformers import Qwen2Config

        self.directory = directory
        shapes, head_size = models.qwen2_0_5b(width=width), _HEAD_SIZES[width]
        vocabulary, hidden = shapes["model.embed_tokens.weight"]
        Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            dtype="bfloat16",
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=shapes["model.layers.0.mlp.up_proj.weight"][0],
            num_hidden_layers=sum(name.endswith("q_proj.weight") for name in shapes),
            num_attention_heads=hidden // head_size,
            num_key_value_heads=shapes["model.layers.0.self_attn.k_proj.weight"][0] // head_size,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ).save_pretrained(directory)

    def save(self, weights: Weights) -> None:
        """Write a new file, as trainers do; nobody's mapping of the old one is touched."""
        from safetensors.torch import save_file

        path = self.directory / "model.safetensors"
        path.unlink(missing_ok=True)
        save_file(weights, path, metadata={"format": "pt"})


def start_engine(checkpoint: Checkpoint, *, live: bool) -> Any:
    """A ``vllm.LLM`` on what the checkpoint holds, that takes weights from dbuffer.

    Args:
        checkpoint: the model.
        live: without vLLM's packing of weights for oneDNN, which it does on CPUs only: parameters
            are then read where they lie, as on a GPU.
    """
    os.environ.update(_ENVIRONMENT)  # read when vLLM is imported
    import vllm
    from vllm import _custom_ops
    from vllm.config import WeightTransferConfig

    if live:
        _custom_ops._supports_onednn = False  # noqa: SLF001 - it has no public switch
    return vllm.LLM(
        model=str(checkpoint.directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        block_size=_CACHE_BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        use_tqdm_on_load=False,
        weight_transfer_config=WeightTransferConfig(backend="dbuffer"),
    )


def greedy_tokens(llm: Any) -> Tokens:
    """What an engine answers a few fixed prompts with, from empty caches."""
    import vllm

    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in _PROMPTS]
    parameters = vllm.SamplingParams(
        temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
