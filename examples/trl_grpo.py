"""GRPO with TRL's own trainer and the vLLM engine in its process, which follows through a store.

    python examples/trl_grpo.py

Trains a tiny random Qwen3; the reward is the share of an answer's tokens that are in a secret set.
Only the line that makes the trainer differs from TRL without dbuffer. At the end the engine's
greedy answers must equal those of a fresh engine on the final checkpoint. Needs TRL and vLLM; takes
a minute on two cores.
"""

import os

# One core, no logs; torch and vLLM read this when they are imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM, SamplingParams

from dbuffer.integrations.trl import over_store

VOCABULARY, ANSWER_TOKENS, GROUP_SIZE, NUM_STEPS, CONTEXT_TOKENS = 512, 16, 8, 12, 256

_generator = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=_generator).tolist()
    for length in (4, 7, 12, 20, 31, 33, 48, 70)
]
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0


def main(directory: Path) -> bool:
    """Train; return whether the engine followed."""
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        values = IS_REWARDED[torch.tensor(completion_ids)].mean(dim=1)
        rewards.append(values.mean().item())
        print(f"step {len(rewards):2}: reward {rewards[-1]:.3f}", flush=True)
        return list(values.tolist())

    # Without dbuffer: `trainer = GRPOTrainer(...)`.
    trainer: Any = over_store(GRPOTrainer, directory / "store")(
        model=str(save(make_model(), directory / "initial")),
        reward_funcs=reward,
        args=configuration(directory),
        train_dataset=Dataset.from_dict({"prompt": [as_text(prompt) for prompt in PROMPTS]}),
    )
    trainer.train()
    trainer.vllm_generation.sync_weights()  # TRL syncs before it generates, not at the end
    final = generate(trainer.vllm_generation.llm)
    trainer.weight_sync.close()

    fresh = LLM(
        str(save(trainer.model, directory / "final")),
        max_model_len=CONTEXT_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="external_launcher",  # in this process, as with TRL
    )
    is_equal = generate(fresh) == final
    print(f"greedy answers of the engine and of a fresh one: {'equal' if is_equal else 'differ'}")
    return is_equal and statistics.fmean(rewards[-4:]) > statistics.fmean(rewards[:4]) + 0.1


def configuration(directory: Path) -> GRPOConfig:
    """Configure batches of all prompts, and an engine in the trainer's process."""
    return GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=CONTEXT_TOKENS,
        vllm_gpu_memory_utilization=0.1,  # of the machine's memory, on a CPU
        output_dir=str(directory / "trainer"),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=GROUP_SIZE * len(PROMPTS),
        num_generations=GROUP_SIZE,
        max_completion_length=ANSWER_TOKENS,
        generation_kwargs={"ignore_eos": True},
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def make_model() -> Any:
    """Return a Qwen3 with 0.2 million random parameters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def save(model: Any, directory: Path) -> Path:
    """Save a checkpoint with a tokenizer of one word for each token; return its directory."""
    words = {as_text([token]): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=as_text([0])))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=as_text([0]), eos_token=as_text([1])
    ).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def as_text(tokens: list[int]) -> str:
    """Return text that the tokenizer turns into these tokens."""
    return " ".join(f"word-{token}" for token in tokens)


def generate(engine: Any) -> list[list[int]]:
    """Return the engine's greedy answers to the prompts."""
    greedy = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        has_followed = main(Path(directory))
    sys.exit(None if has_followed else "the engine did not follow its trainer")
