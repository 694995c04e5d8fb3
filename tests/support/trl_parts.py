"""A tiny model, prompts and a reward for TRL's trainers, and the engines that answer them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

VOCABULARY, ANSWER_TOKENS, GROUP_SIZE = 512, 16, 8
LORA = LoraConfig(r=16, lora_alpha=64, target_modules="all-linear")

_generator = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=_generator).tolist()
    for length in (4, 7, 12, 20, 31, 33, 48, 70)  # below and above vLLM's cache block
]
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0


def rewards_of(answers: list[list[int]]) -> list[float]:
    """The share of each answer's tokens that are in a secret set, a quarter of all."""
    return IS_REWARDED[torch.tensor(answers)].mean(dim=1).tolist()


def configuration(directory: Path, **options: Any) -> GRPOConfig:
    """Batches of all prompts, with a server."""
    chosen: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "output_dir": str(directory / "trainer"),
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": GROUP_SIZE * len(PROMPTS),
        "num_generations": GROUP_SIZE,
        "max_completion_length": ANSWER_TOKENS,
        "generation_kwargs": {"ignore_eos": True},
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    return GRPOConfig(**chosen | options)


def first_model(*, lora: bool) -> Any:
    """The model that is trained, or that the adapter is trained on."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM(config)
    if lora:  # TRL trains no adapter of the head, and the others reach the tokens only through it
        with torch.no_grad():
            model.lm_head.weight.mul_(10)
    return model


def make_dataset() -> Dataset:
    """The prompts as text, of which the tokenizer makes the same tokens."""
    texts = [" ".join(f"word-{token}" for token in prompt) for prompt in PROMPTS]
    return Dataset.from_dict({"prompt": texts})


def save(model: Any, directory: Path) -> Path:
    """Save a checkpoint with a tokenizer, which TRL and its engine ask for; the directory."""
    words = {f"word-{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word-0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="word-0", eos_token="word-1"
    ).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def merged(model: Any) -> Any:
    """Return the trained model, with an adapter merged into it."""
    has_adapter = hasattr(model, "merge_and_unload")
    return copy.deepcopy(model).merge_and_unload() if has_adapter else model


def ask_server(client: httpx.Client) -> list[list[int]]:
    """A vLLM server's greedy answers to the prompts."""
    question = {
        "model": "policy",
        "prompt": PROMPTS,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=question).raise_for_status()
    return [choice["token_ids"] for choice in response.json()["choices"]]


def ask_fresh_engine(checkpoint: Path) -> list[list[int]]:
    """The greedy answers of an engine that was started from a checkpoint."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]
