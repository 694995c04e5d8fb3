"""Real vLLM engines, started from models with random weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.models import Shapes, Weights

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_SCALE = 0.1
"""Scale of random weights: so large that the layers decide the tokens, not the tied embedding."""

_CACHE_BLOCK_TOKENS = 32
_PROMPTS = (range(1, 6), range(200, 300))  # the second is longer than a cache block
_TOKENS = 8

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Model:
    """Model to start an engine from."""

    name: str
    shapes: Shapes
    head_size: int

    @property
    def title(self) -> str:
        """Name, dtype and size of the model."""
        size = models.num_bytes(self.shapes) / 1e9
        return f"{self.name} in bfloat16, {size:.2f} GB in {len(self.shapes):,} tensors"

    def weights(self, seed: int) -> Weights:
        """Return random weights, in page-locked memory if there is a GPU."""
        torch.manual_seed(seed)
        weights = models.random_weights(self.shapes)
        for name, tensor in weights.items():
            tensor.mul_(_SCALE).add_(1 if "norm" in name else 0)
        if torch.cuda.is_available():
            return {name: tensor.pin_memory() for name, tensor in weights.items()}
        return weights

    def config(self) -> Any:
        """Return the model's configuration for transformers."""
        from transformers import Qwen2Config, Qwen3MoeConfig

        shapes = self.shapes
        vocabulary, hidden = shapes["model.embed_tokens.weight"]
        first = "model.layers.0"
        common = {
            "dtype": "bfloat16",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in shapes),
            "num_attention_heads": shapes[f"{first}.self_attn.q_proj.weight"][0] // self.head_size,
            "num_key_value_heads": shapes[f"{first}.self_attn.k_proj.weight"][0] // self.head_size,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": "lm_head.weight" not in shapes,
        }
        expert = f"{first}.mlp.experts.0.up_proj.weight"
        if expert not in shapes:
            width = shapes[f"{first}.mlp.up_proj.weight"][0]
            return Qwen2Config(
                architectures=["Qwen2ForCausalLM"], intermediate_size=width, **common
            )
        return Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            head_dim=self.head_size,
            moe_intermediate_size=shapes[expert][0],
            num_experts=shapes[f"{first}.mlp.gate.weight"][0],
            num_experts_per_tok=8,
            norm_topk_prob=True,
            **common,
        )


class Checkpoint:
    """Hugging Face checkpoint with one safetensors file, which can be saved repeatedly."""

    def __init__(self, directory: Path, model: Model) -> None:
        self.directory = directory
        model.config().save_pretrained(directory)

    def save(self, weights: Weights) -> None:
        """Write a new file, as trainers do, so that mappings of the old file keep its data."""
        from safetensors.torch import save_file

        path = self.directory / "model.safetensors"
        path.unlink(missing_ok=True)
        save_file(weights, path, metadata={"format": "pt"})


def import_vllm(*, live: bool) -> None:
    """Import vLLM, with engines in this process.

    Args:
        live: disable vLLM's packing of weights for oneDNN (on CPUs). Layers then compute with
            their parameters as they were loaded, as on a GPU.
    """
    os.environ.update(_ENVIRONMENT)  # read when vLLM is imported
    from vllm import _custom_ops

    if live:
        _custom_ops._supports_onednn = False  # noqa: SLF001 - no public option


def versions() -> dict[str, str]:
    """Return the versions of vLLM and transformers, and the GPU."""
    [distribution, *_] = packages_distributions()["vllm"]
    packages = {name: version(name) for name in (distribution, "transformers")}
    if not torch.cuda.is_available():
        return packages
    gpu = torch.cuda.get_device_properties(0)
    return packages | {
        "GPU": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda),
    }


def start_engine(checkpoint: Checkpoint, *, live: bool, **more: Any) -> Any:
    """Start a ``vllm.LLM`` from a checkpoint, with dbuffer as its weight-transfer backend.

    Args:
        checkpoint: checkpoint of the model.
        live: see :func:`import_vllm`.
        more: arguments of vLLM's engine.
    """
    import_vllm(live=live)
    import vllm

    return vllm.LLM(**_arguments(checkpoint, max_num_seqs=4), use_tqdm_on_load=False, **more)


def start_async_engine(checkpoint: Checkpoint, *, max_num_seqs: int, **more: Any) -> Any:
    """Start an ``AsyncLLM`` from a checkpoint, with its engine core in another process.

    ``more`` has arguments of vLLM's engine.
    """
    import_vllm(live=False)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**_arguments(checkpoint, max_num_seqs=max_num_seqs), **more)
    return AsyncLLM.from_engine_args(arguments)


def _arguments(checkpoint: Checkpoint, *, max_num_seqs: int) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    return {
        "model": str(checkpoint.directory),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": max_num_seqs,
        "block_size": _CACHE_BLOCK_TOKENS,
        "kv_cache_memory_bytes": 64 << 20,
        "weight_transfer_config": WeightTransferConfig(backend="dbuffer"),
    }


def greedy_tokens(llm: Any) -> Tokens:
    """Return an engine's greedy answers to fixed prompts, computed with empty caches."""
    import vllm

    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in _PROMPTS]
    parameters = vllm.SamplingParams(
        temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
