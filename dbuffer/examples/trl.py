"""GRPO with TRL's own trainer: a vLLM engine in its process answers, and follows through a store.

``python -m dbuffer.examples.trl`` trains a tiny Qwen3 that knows nothing; with ``--lora`` an
adapter of it. Its reward is the share of an answer's tokens that are in a secret set. What is
dbuffer's here is the line that makes the trainer. With ``--broken-sync`` the engine gets no
weights, and the reward stays where it was.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM

from dbuffer.examples.common import are_equal, has_climbed, make_tokenizer, run_example, say
from dbuffer.integrations.trl import over_store
from dbuffer.tools.demo import policy
from dbuffer.tools.demo.engines import generate

GROUP_SIZE = 8
"""Answers to one prompt, whose rewards are compared with each other."""
NUM_STEPS = 12
CONTEXT_TOKENS = 256
MEMORY_SHARE = 0.1
"""Of the device's memory, or of the machine's: for TRL's engine."""
LORA = LoraConfig(r=16, lora_alpha=64, target_modules="all-linear")


def run(directory: Path, *, broken_sync: bool, lora: bool) -> bool:
    """Train; whether the engine came along."""
    task, rewards = policy.Task(seed=0), []

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        found = task.rewards(tuple(map(tuple, completion_ids)))
        rewards.append(found.mean().item())
        say(f"step {len(rewards):2}: reward {rewards[-1]:.3f}")
        return list(found.tolist())

    say("starting a trainer with a vLLM engine in it")
    # Without dbuffer: `trainer = GRPOTrainer(...)`.
    trainer: Any = over_store(GRPOTrainer, directory / "store")(
        model=str(save(first_model(lora=lora), directory / "initial")),
        reward_funcs=reward,
        args=configuration(directory, len(task.prompts)),
        train_dataset=make_dataset(task.prompts),
        peft_config=LORA if lora else None,
    )
    if broken_sync:
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    trainer.vllm_generation.sync_weights()  # TRL does so before it generates, not at the end
    final = generate(trainer.vllm_generation.llm, task.prompts, greedy=True)
    trainer.weight_sync.close()

    say("asking a fresh engine, started from the final checkpoint")
    fresh = fresh_engine(save(whole(trainer.model), directory / "final"))
    expected = generate(fresh, task.prompts, greedy=True)
    is_same = are_equal(final, expected, "the engine's greedy answers and the fresh one's")
    return has_climbed(rewards, 4) and is_same


def configuration(directory: Path, num_prompts: int, **options: Any) -> GRPOConfig:
    """For batches of all prompts, with an engine in the trainer's process."""
    chosen: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": CONTEXT_TOKENS,
        "vllm_gpu_memory_utilization": MEMORY_SHARE,
        "output_dir": str(directory / "trainer"),
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": GROUP_SIZE * num_prompts,
        "num_generations": GROUP_SIZE,
        "max_completion_length": policy.COMPLETION_TOKENS,
        "generation_kwargs": {"ignore_eos": True},
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return GRPOConfig(**chosen | options)


def first_model(*, lora: bool) -> Any:
    """The model that is trained, or that the adapter is trained on."""
    model: Any = policy.make_model(seed=0)
    if lora:  # TRL trains no adapter of the head, and the others reach the tokens only through it
        with torch.no_grad():
            model.lm_head.weight.mul_(10)
    return model


def make_dataset(prompts: policy.Tokens) -> Dataset:
    """The prompts as text, of which the tokenizer makes the same tokens."""
    texts = [" ".join(f"word-{token}" for token in prompt) for prompt in prompts]
    return Dataset.from_dict({"prompt": texts})


def save(model: Any, directory: Path) -> Path:
    """A checkpoint with a tokenizer, which TRL and its engine ask for; the directory."""
    make_tokenizer().save_pretrained(directory)
    return policy.save_checkpoint(model, directory)


def whole(model: Any) -> Any:
    """What was trained, with an adapter merged into it."""
    has_adapter = hasattr(model, "merge_and_unload")
    return copy.deepcopy(model).merge_and_unload() if has_adapter else model


def fresh_engine(checkpoint: Path) -> LLM:
    """An engine as TRL starts them."""
    return LLM(
        str(checkpoint),
        max_model_len=CONTEXT_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="external_launcher",
    )


if __name__ == "__main__":
    run_example(__doc__, run, "--lora")
