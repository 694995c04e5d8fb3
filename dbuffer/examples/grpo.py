"""GRPO with TorchRL's wrappers and loss: a vLLM engine answers, and follows through a store.

``python -m dbuffer.examples.grpo`` trains a tiny Qwen3 that knows nothing. Its reward is the share
of an answer's tokens that are in a secret set. With ``--broken-sync`` the engine never looks for
new weights, and the reward stays where it was.
"""
# ruff: noqa: E402, T201 - what is imported reads the environment; a program prints

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # A core for the engine, whose process is its own, and one for the trainer.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Quiet: these are for the engine's processes as well.
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import torch
import vllm
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import PreTrainedTokenizerFast

from dbuffer.demo.policy import (
    COMPLETION_TOKENS,
    VOCAB_SIZE,
    Task,
    make_model,
    save_checkpoint,
)
from dbuffer.integrations.torchrl import VLLMDoubleBufferSyncScheme

GROUP_SIZE = 8
"""Answers to one prompt, whose rewards are compared with each other."""
LEARNING_RATE = 1e-2
NUM_STEPS = 12
NUM_AVERAGED_STEPS = 4
MIN_CLIMB = 0.1
"""What the reward must gain: ten times what two averages of 4 steps differ by without learning."""
SYNC_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of answers, and one update."""

    reward: float
    sample_share: float
    """Effective sample size of the answers, of their number: 1 where they were sampled with the
    weights that are trained, and less the further the engine is behind."""
    sync_ms: float
    """Publishing new weights and letting the engine switch to them."""


class Sampler:
    """A vLLM engine, and TorchRL's wrapper around it."""

    def __init__(self, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        # bfloat16 on a GPU, because its fastest attention kernels take no float32.
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        self.llm = vllm.LLM(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            enforce_eager=True,
            dtype=dtype,
            seed=seed,
            max_model_len=256,
            max_num_seqs=64,
            block_size=32,  # some prompts are longer: a stale prefix cache would show in those
            kv_cache_memory_bytes=64 << 20,
        )
        # The wrapper does not say whether to draw a progress bar for each batch.
        self.llm.generate = functools.partial(self.llm.generate, use_tqdm=False)
        self._wrapper = vLLMWrapper(
            self.llm,
            tokenizer=tokenizer,
            input_mode="tokens",
            return_log_probs=True,
            generate_kwargs={
                "max_new_tokens": COMPLETION_TOKENS,
                "temperature": 1.0,
                "ignore_eos": True,
                "detokenize": False,
            },
        )

    def answer(self, questions: TensorDictBase) -> Any:
        """One answer to each, with the log-probability of each of its tokens."""
        return self._wrapper(questions.copy())

    def answer_greedily(self, task: Task) -> tuple[list[list[int]], torch.Tensor]:
        """Tokens, and how probable they are: what the weights say, without chance."""
        parameters = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=COMPLETION_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in task.prompts]
        answers = [one.outputs[0] for one in self.llm.generate(prompts, parameters)]
        log_probs = torch.tensor([answer.cumulative_logprob for answer in answers])
        return [list(answer.token_ids) for answer in answers], log_probs

    def close(self) -> None:
        """End the engine's processes, which else end with this one."""
        self.llm.llm_engine.engine_core.shutdown()


class Learner:
    """TorchRL's advantages within groups of answers, and its clipped loss, by Adam."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerFast, num_answers: int
    ) -> None:
        actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
        self._model = model
        self._loss = GRPOLoss(actor, entropy_bonus=False)
        self._optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
        self._buffer = ReplayBuffer(
            storage=LazyStackStorage(num_answers),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(GROUP_SIZE),
            batch_size=num_answers,
        )

    def update(self, answers: TensorDictBase, rewards: torch.Tensor) -> float:
        """Train on one batch; the effective sample size, of the number of samples."""
        answers["next", "reward"] = rewards[:, None, None]
        answers["next", "done"] = torch.ones(len(rewards), 1, dtype=torch.bool)
        self._buffer.empty()
        self._buffer.extend(answers)
        loss = self._loss(self._buffer.sample())
        self._optimizer.zero_grad()
        loss.loss_objective.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.ESS)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words for the model's tokens: the wrappers want a tokenizer, to know what padding is."""
    words = {f"word-{token}": token for token in range(VOCAB_SIZE)}
    words_only = Tokenizer(WordLevel(words, unk_token="word-0"))  # noqa: S106 - no password
    return PreTrainedTokenizerFast(tokenizer_object=words_only, pad_token="word-0")  # noqa: S106


def make_questions(task: Task) -> TensorDictBase:
    """Each of the task's prompts, as often as it is answered."""
    return lazy_stack(
        [
            TensorDict({"query": str(number), "tokens": {"prompt": torch.tensor(prompt)}})
            for number, prompt in enumerate(task.prompts)
            for _ in range(GROUP_SIZE)
        ]
    )


def train(
    sampler: Sampler, learner: Learner, task: Task, sync: Callable[[], None]
) -> Iterator[Step]:
    """Let the engine answer, learn from that, and call ``sync`` to bring it the new weights."""
    questions = make_questions(task)
    for _ in range(NUM_STEPS):
        answers = sampler.answer(questions)
        tokens = answers.get(("tokens", "response"), as_list=True)
        rewards = task.rewards(tuple(tuple(row.tolist()) for row in tokens))
        sample_share = learner.update(answers, rewards)
        started = time.perf_counter()
        sync()
        yield Step(rewards.mean().item(), sample_share, 1e3 * (time.perf_counter() - started))


def run(directory: Path, seed: int, *, broken_sync: bool) -> bool:
    """Train, print how it goes, and return whether it worked."""
    task, model, tokenizer = Task(seed), make_model(seed).eval(), make_tokenizer()
    print("starting a vLLM engine")
    sampler = Sampler(save_checkpoint(model, directory / "initial"), tokenizer, seed)
    learner = Learner(model, tokenizer, len(task.prompts) * GROUP_SIZE)

    # TorchRL's class of this name takes the same lines.
    scheme = VLLMDoubleBufferSyncScheme(str(directory / "store"))
    sender = scheme.create_sender()
    sender.register_model(model)
    receiver = scheme.create_receiver(sampler.llm)

    def sync() -> None:
        sender.update_weights()
        if not broken_sync:
            receiver.poll_and_apply(SYNC_TIMEOUT_S)

    rewards = []
    for number, step in enumerate(train(sampler, learner, task, sync), start=1):
        rewards.append(step.reward)
        print(
            f"step {number:2}: reward {step.reward:.3f}, effective sample size "
            f"{step.sample_share:4.0%}, sync {step.sync_ms:.0f} ms"
        )
    tokens, log_probs = sampler.answer_greedily(task)
    receiver.shutdown()
    sender.shutdown()
    sampler.close()

    print("asking a fresh engine, started from the final checkpoint")
    fresh = Sampler(save_checkpoint(model, directory / "final"), tokenizer, seed)
    fresh_tokens, fresh_log_probs = fresh.answer_greedily(task)
    fresh.close()
    # Weights of one step before give the same tokens here, and other probabilities.
    is_equal = tokens == fresh_tokens and torch.allclose(log_probs, fresh_log_probs, atol=1e-3)
    first, last = (
        statistics.fmean(some)
        for some in (rewards[:NUM_AVERAGED_STEPS], rewards[-NUM_AVERAGED_STEPS:])
    )
    has_climbed = last - first >= MIN_CLIMB
    print(
        f"reward {first:.3f} to {last:.3f}: {'climbed' if has_climbed else 'did not climb'}; "
        f"the engine's greedy answers and the fresh one's {'are equal' if is_equal else 'differ'}"
    )
    return has_climbed and is_equal


def main() -> int:
    """Run with the command line's options; whether it worked, as an exit status."""
    parser = argparse.ArgumentParser(prog="python -m dbuffer.examples.grpo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--broken-sync", action="store_true", help="never look for new weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dbuffer-grpo-") as directory:
        has_worked = run(Path(directory), arguments.seed, broken_sync=arguments.broken_sync)
    print(f"{'success' if has_worked else 'failed'} in {time.monotonic() - started:.0f} s")
    return 0 if has_worked else 1


if __name__ == "__main__":
    sys.exit(main())
