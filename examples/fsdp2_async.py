"""Two ranks of FSDP2 train on the samples of a vLLM `AsyncLLM`, which follows their store.

    python examples/fsdp2_async.py

Each rank is a process with half of the model. All ranks publish together with a
`ShardedWeightSender`, and nothing is gathered. The engine is in this process; it switches to each
new version while it samples the next batches, so a batch may be some versions old. Under torchrun,
each of its processes would call `train`. The model is a tiny random Qwen3; the reward is the share
of an answer's tokens that are in a secret set. At the end engine and ranks must compute the same
log-probabilities. Needs transformers and vLLM 0.32; takes a minute on two cores.
"""

import os

# One core for each process, and no logs; torch and vLLM read this when they are imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import asyncio
import multiprocessing
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from dbuffer import ShardedWeightSender
from dbuffer.integrations.vllm import follow, versions_of

NUM_RANKS, NUM_STEPS, BATCH_SIZE = 2, 30, 64
VOCABULARY, PROMPT_TOKENS, ANSWER_TOKENS = 512, 12, 16

MAX_ERROR = 1e-3
"""Difference of log-probabilities between two programs with the same weights."""

IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[: VOCABULARY // 4] = 1.0


@dataclass
class Sample:
    """An answer of the engine."""

    tokens: list[int]
    """Prompt and answer."""
    log_probs: list[float]
    """Log-probabilities of the answer's tokens under the weights that sampled them."""
    versions: list[int]
    """Versions of those weights."""

    @property
    def reward(self) -> float:
        return IS_REWARDED[self.tokens[PROMPT_TOKENS:]].mean().item()


# The trainer.


def train(rank: int, batches: Any, directory: Path) -> None:
    """Run one rank: train on batches, and publish after each step."""
    torch.set_num_threads(1)
    address = f"file://{directory}/ranks"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_RANKS)
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with ShardedWeightSender(directory / "store") as sender:  # every call on all ranks
        newest = sender.send(model, metadata={"step": 0}).version
        for step in range(1, NUM_STEPS + 1):
            update(model, optimizer, batches.get())
            newest = sender.send(model, metadata={"step": step}).version
        sender.wait_applied(newest, receivers=["engine"], timeout_s=60)
    batch = batches.get()
    expected = torch.tensor([sample.log_probs for sample in batch])
    error = (log_probs_of(model, batch) - expected).abs().max().item()
    distributed.destroy_process_group()
    sys.exit(None if error < MAX_ERROR else f"rank {rank}: log-probabilities differ by {error:.1g}")


def update(model: Any, optimizer: torch.optim.Optimizer, batch: list[Sample]) -> None:
    """Take a step of REINFORCE with importance weights; FSDP2 averages the ranks' gradients."""
    rewards = torch.tensor([sample.reward for sample in batch])
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    log_probs = log_probs_of(model, batch)
    behavior = torch.tensor([sample.log_probs for sample in batch])
    weights = (log_probs.detach() - behavior).exp().clamp(max=2.0)
    loss: Any = -(weights * advantages[:, None] * log_probs).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def log_probs_of(model: Any, batch: list[Sample]) -> torch.Tensor:
    """Return the log-probabilities of the answers' tokens."""
    rows = torch.tensor([sample.tokens for sample in batch])
    logits = model(rows).logits[:, PROMPT_TOKENS - 1 : -1]
    answers = rows[:, PROMPT_TOKENS:, None]
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, answers)[:, :, 0]
    return log_probs


def make_model() -> Any:
    """Return a Qwen3 with 0.2 million random parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


# The engine.


async def sample_batches(queues: list[Any], directory: Path) -> bool:
    """Give each rank its part of each batch; return whether the policy learned."""
    make_model().save_pretrained(directory / "initial")
    arguments = AsyncEngineArgs(
        str(directory / "initial"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=BATCH_SIZE,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    rewards: list[float] = []
    async with follow(engine, directory / "store", engine_id="engine") as follower:
        for step in range(1, NUM_STEPS + 1):
            batch = await sample_batch(engine, f"step-{step}")
            for rank, queue in enumerate(queues):  # waits for the ranks, which limits a batch's age
                await asyncio.to_thread(queue.put, batch[rank::NUM_RANKS], timeout=60)
            rewards.append(statistics.fmean(sample.reward for sample in batch))
            versions = {version for sample in batch for version in sample.versions}
            print(
                f"step {step:2}: reward {rewards[-1]:.3f}, sampled with versions "
                f"{min(versions)} to {max(versions)}",
                flush=True,
            )
        await follower.wait_applied_async(NUM_STEPS + 1, timeout_s=60)
        batch = await sample_batch(engine, "last")
        for queue in queues:
            queue.put(batch, timeout=60)
    engine.shutdown()
    return statistics.fmean(rewards[-5:]) - statistics.fmean(rewards[:5]) > 0.1


async def sample_batch(engine: AsyncLLM, name: str) -> list[Sample]:
    """Sample answers to random prompts."""
    answers = (sample_one(engine, f"{name}-{number}") for number in range(BATCH_SIZE))
    return await asyncio.gather(*answers)


async def sample_one(engine: AsyncLLM, name: str) -> Sample:
    """Sample an answer at temperature 1, with the log-probability and version of each token."""
    prompt = [random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    options = SamplingParams(
        temperature=1.0,
        max_tokens=ANSWER_TOKENS,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, options, name):
        answer = output.outputs[0]
    tokens = list(answer.token_ids)
    log_probs = [row[token].logprob for row, token in zip(answer.logprobs, tokens, strict=True)]
    versions = [span.version or 0 for span in versions_of(answer)]
    return Sample(prompt + tokens, log_probs, versions)


def main(directory: Path) -> None:
    """Start the ranks, sample for them, and wait for their verdict."""
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(maxsize=1) for _ in range(NUM_RANKS)]
    ranks = [
        context.Process(target=train, args=(rank, queue, directory), daemon=True)
        for rank, queue in enumerate(queues)
    ]
    for process in ranks:
        process.start()
    has_learned = asyncio.run(sample_batches(queues, directory))
    for process in ranks:
        process.join()
    if not has_learned or any(process.exitcode for process in ranks):
        sys.exit("the engine did not follow its trainer, or did not learn")
    print("log-probabilities of the engine and of both ranks: equal")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        main(Path(directory))
