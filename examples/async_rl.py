"""Asynchronous RL: a vLLM engine samples while its trainer publishes, and stale tokens are masked.

    python examples/async_rl.py

Rollout workers keep an `AsyncLLM` busy and never wait for the trainer, so an answer may begin with
one version of the weights and end with another, and be several versions old when it is trained on.
The trainer knows the version and the log-probability of each token. It drops samples and masks
tokens that are too old, and corrects the rest by truncated importance sampling. The model is a tiny
random Qwen3; the reward is the share of an answer's tokens that are in a secret set. At the end
engine and trainer must compute the same log-probabilities. Needs transformers and vLLM 0.32; takes
a minute on two cores.
"""

import os

# One core for each process, and no logs; torch and vLLM read this when they are imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import asyncio
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from dbuffer import WeightSender
from dbuffer.integrations.vllm import follow, versions_of

VOCABULARY, PROMPT_TOKENS = 512, 12
ANSWER_TOKENS = range(16, 129)
NUM_WORKERS, BATCH_SIZE, NUM_STEPS = 32, 16, 50

MAX_TOKEN_AGE = 2
"""Versions that a token may be behind the newest; older tokens are masked."""
MAX_SAMPLE_AGE = 3
"""Versions that any token of a sample may be behind: the maximum of off-policy steps. Older samples
are dropped."""
MAX_WEIGHT = 2.0
"""Limit of the importance weights."""
MAX_ERROR = 1e-3
"""Difference of log-probabilities between two programs with the same weights."""

IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[: VOCABULARY // 4] = 1.0


@dataclass
class Sample:
    """An answer of the engine, with an entry for each token."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    """Log-probabilities under the behavior policy: the weights that sampled each token."""
    versions: list[int]
    """Versions of those weights."""

    @property
    def reward(self) -> float:
        return IS_REWARDED[self.tokens].mean().item()

    def age(self, newest: int) -> int:
        """Return how many versions the sample's oldest token is behind the newest."""
        return newest - min(self.versions)

    def mask(self, newest: int) -> list[bool]:
        """Return for each token whether it is new enough to be trained on."""
        return [newest - version <= MAX_TOKEN_AGE for version in self.versions]


async def main(directory: Path) -> bool:
    """Train; return whether the engine followed, and the policy learned."""
    learner = Learner()
    engine = start_engine(learner.model, directory / "initial")
    samples: asyncio.Queue[Sample] = asyncio.Queue(maxsize=BATCH_SIZE)
    rewards: list[float] = []
    num_dropped = num_masked = num_mixed = 0
    with WeightSender(directory / "store") as sender:
        newest = sender.send(learner.model, metadata={"step": 0}).version
        async with follow(engine, directory / "store", pause="keep") as follower:
            await follower.wait_applied_async(newest)
            workers = [
                asyncio.create_task(sample_for_ever(engine, samples, number))
                for number in range(NUM_WORKERS)
            ]
            for step in range(1, NUM_STEPS + 1):
                batch = [await samples.get() for _ in range(BATCH_SIZE)]
                kept = [sample for sample in batch if sample.age(newest) <= MAX_SAMPLE_AGE]
                masks = [sample.mask(newest) for sample in kept]
                dropped = BATCH_SIZE - len(kept)
                masked = sum(mask.count(False) for mask in masks)
                rewards.append(statistics.fmean(sample.reward for sample in batch))
                print(
                    f"step {step:2}: reward {rewards[-1]:.3f}, {dropped} of {BATCH_SIZE} samples "
                    f"dropped, {masked} of {sum(map(len, masks))} tokens masked; the engine is "
                    f"{step - 1 - follower.applied_metadata['step']} steps behind",
                    flush=True,
                )
                num_dropped, num_masked = num_dropped + dropped, num_masked + masked
                num_mixed += sum(len(set(sample.versions)) > 1 for sample in batch)
                if masked < sum(map(len, masks)):
                    await asyncio.to_thread(learner.update, kept, masks)
                publish = asyncio.to_thread(sender.send, learner.model, metadata={"step": step})
                newest = (await publish).version
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await follower.wait_applied_async(newest)
            last = await sample_one(engine, "last")
    engine.shutdown()
    print(f"{num_dropped} samples dropped, {num_masked} tokens masked")
    print(f"{num_mixed} samples of several versions")
    [log_probs] = learner.log_probs_of([last])
    error = (log_probs - torch.tensor(last.log_probs)).abs().max().item()
    print(f"log-probabilities of the engine and of the trainer differ by {error:.1g}")
    climb = statistics.fmean(rewards[-5:]) - statistics.fmean(rewards[:5])
    return error < MAX_ERROR and climb > 0.1 and min(num_masked, num_mixed) > 0


async def sample_for_ever(engine: AsyncLLM, samples: asyncio.Queue[Sample], worker: int) -> None:
    """Answer random prompts with whichever weights the engine has: one rollout worker."""
    for number in itertools.count():
        await samples.put(await sample_one(engine, f"{worker}-{number}"))


async def sample_one(engine: AsyncLLM, name: str) -> Sample:
    """Sample an answer at temperature 1, with the log-probability and version of each token."""
    prompt = [random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    options = SamplingParams(
        temperature=1.0,
        max_tokens=random.choice(ANSWER_TOKENS),
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, options, name):
        answer = output.outputs[0]
    tokens = list(answer.token_ids)
    log_probs = [row[token].logprob for row, token in zip(answer.logprobs, tokens, strict=True)]
    spans = versions_of(answer)
    versions = [span.version or 0 for span in spans for _ in tokens[span.start : span.end]]
    return Sample(prompt, tokens, log_probs, versions)


class Learner:
    """A model trained with REINFORCE, truncated importance sampling and Adam."""

    def __init__(self) -> None:
        self.model = make_model()
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def log_probs_of(self, batch: list[Sample]) -> torch.Tensor:
        """Return the log-probabilities of the answers' tokens under the current policy."""
        rows = padded([sample.prompt + sample.tokens for sample in batch]).long()
        # Attention is causal: padding at the end needs no mask.
        logits = self.model(rows).logits[:, PROMPT_TOKENS - 1 : -1]
        answers = rows[:, PROMPT_TOKENS:, None]
        log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, answers)[:, :, 0]
        return log_probs

    def update(self, batch: list[Sample], masks: list[list[bool]]) -> None:
        """Take a step on the tokens whose mask is true."""
        mask = padded(masks)
        rewards = torch.tensor([sample.reward for sample in batch])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        log_probs = self.log_probs_of(batch)
        behavior = padded([sample.log_probs for sample in batch])
        weights = (log_probs.detach() - behavior).exp().clamp(max=MAX_WEIGHT)
        loss: Any = -(mask * weights * advantages[:, None] * log_probs).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return rows of different lengths in one tensor, with zeros at their ends."""
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)


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
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


def start_engine(model: Any, checkpoint: Path) -> AsyncLLM:
    """Start a vLLM engine from a checkpoint of the model."""
    model.save_pretrained(checkpoint)
    arguments = AsyncEngineArgs(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=NUM_WORKERS,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
    )
    return AsyncLLM.from_engine_args(arguments)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        has_followed = asyncio.run(main(Path(directory)))
    sys.exit(None if has_followed else "the engine did not follow its trainer, or did not learn")
