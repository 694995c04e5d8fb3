"""Families of models beside those of ``tiny_models``, each as small as its engines' kernels allow.

For the tests that compare breadth, of whichever engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.engines.tiny_models import SHAPE, SPECIAL_TOKENS, save_tokenizer, vary_vectors

_COMMON: dict[str, Any] = {
    **SHAPE,
    **SPECIAL_TOKENS,
    "num_attention_heads": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_TIED = {"tie_word_embeddings": True}
_GEMMA = {"head_dim": 32, "sliding_window": 64, **_TIED}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bert": {},
    "cohere": _TIED,
    "deepseek_v2": {
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        **_ROUTED,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", **_TIED},
    "gemma2": {
        **_GEMMA,
        "query_pre_attn_scalar": 32,
        "hidden_act": "gelu_pytorch_tanh",  # SGLang reads it, which transformers calls otherwise
    },
    "gemma3_text": _GEMMA,
    "glm4_moe": {"head_dim": 32, **_ROUTED},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, **_TIED},
    "granite": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
    "mistral": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 128},
    "phi3": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 64, **_EXPERTS},
    "qwen3": {"head_dim": 32},
    "qwen3_next": {
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "shared_expert_intermediate_size": 64,
        **_EXPERTS,
    },
}
"""By transformers' name of the family: what is not as in ``_COMMON``."""


def make_family(model_type: str, seed: int, *, embeds: bool = False) -> Any:
    """Return a model of random weights; the seed decides which.

    Args:
        embeds: a model without a head.
    """
    import transformers

    torch.manual_seed(seed)
    more = CONFIGURATIONS[model_type]
    config = transformers.AutoConfig.for_model(model_type, **_COMMON | more)
    kind = transformers.AutoModel if embeds else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    if config.tie_word_embeddings:  # else each token is answered with itself
        model.get_input_embeddings().weight.data.mul_(0.05)
    vary_vectors(model)
    return model


def save_family(model_type: str, directory: Path, seed: int, *, embeds: bool = False) -> Path:
    """Save such a model below the directory; one that embeds comes with a tokenizer."""
    path = directory / f"{model_type}-{seed}"
    make_family(model_type, seed, embeds=embeds).save_pretrained(path)
    if embeds:
        save_tokenizer(path)
    return path
