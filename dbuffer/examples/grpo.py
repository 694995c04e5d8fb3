"""GRPO with TorchRL's wrappers and loss: a vLLM engine answers, and follows through a store.

``python -m dbuffer.examples.grpo`` trains a tiny Qwen3 that knows nothing. Its reward is the share
of an answer's tokens that are in a secret set. With ``--broken-sync`` the engine never looks for
new weights, and the reward stays where it was.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import PreTrainedTokenizerFast

from dbuffer.examples.common import are_equal, has_climbed, make_tokenizer, run_example, say
from dbuffer.integrations.torchrl import VLLMDoubleBufferSyncScheme
from dbuffer.tools.demo import policy
from dbuffer.tools.demo.engines import generate, start_llm

GROUP_SIZE = 8
"""Answers to one prompt, whose rewards are compared with each other."""
NUM_STEPS = 12


def run(directory: Path, *, broken_sync: bool) -> bool:
    """Train; whether the engine came along."""
    task, model, tokenizer = policy.Task(seed=0), policy.make_model(seed=0).eval(), make_tokenizer()
    say("starting a vLLM engine")
    engine = start_llm(policy.save_checkpoint(model, directory / "initial"), seed=0)
    sampler, questions = wrap(engine, tokenizer), make_questions(task)
    learner = Learner(model, tokenizer, len(questions))

    # TorchRL's class of this name takes the same lines.
    scheme = VLLMDoubleBufferSyncScheme(str(directory / "store"))
    sender = scheme.create_sender()
    sender.register_model(model)
    receiver = scheme.create_receiver(engine)

    rewards = []
    for step in range(1, NUM_STEPS + 1):
        answers: Any = sampler(questions.copy())
        tokens = answers.get(("tokens", "response"), as_list=True)
        reward = task.rewards(tuple(tuple(row.tolist()) for row in tokens))
        sample_share = learner.update(answers, reward)
        sender.update_weights()
        if not broken_sync:
            receiver.poll_and_apply(60.0)
        rewards.append(reward.mean().item())
        say(f"step {step:2}: reward {rewards[-1]:.3f}, effective sample size {sample_share:4.0%}")
    final = generate(engine, task.prompts, greedy=True)
    receiver.shutdown()
    sender.shutdown()
    engine.llm_engine.engine_core.shutdown()

    say("asking a fresh engine, started from the final checkpoint")
    engine = start_llm(policy.save_checkpoint(model, directory / "final"), seed=0)
    expected = generate(engine, task.prompts, greedy=True)
    engine.llm_engine.engine_core.shutdown()
    is_same = are_equal(final, expected, "the engine's greedy answers and the fresh one's")
    return has_climbed(rewards, 4) and is_same


class Learner:
    """TorchRL's advantages within groups of answers, and its clipped loss, by Adam."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerFast, num_answers: int
    ) -> None:
        actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
        self._loss = GRPOLoss(actor, entropy_bonus=False)
        self._optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        self._buffer = ReplayBuffer(
            storage=LazyStackStorage(num_answers),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(GROUP_SIZE),
            batch_size=num_answers,
        )

    def update(self, answers: TensorDictBase, rewards: torch.Tensor) -> float:
        """Train on one batch.

        Returns:
            The effective sample size, of the number of answers: 1 where they were sampled with the
            weights that are trained, and less the further the engine is behind.
        """
        answers["next", "reward"] = rewards[:, None, None]
        answers["next", "done"] = torch.ones(len(rewards), 1, dtype=torch.bool)
        self._buffer.empty()
        self._buffer.extend(answers)
        loss = self._loss(self._buffer.sample())
        self._optimizer.zero_grad()
        loss.loss_objective.backward()
        nn.utils.clip_grad_norm_(self._loss.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.ESS)


def make_questions(task: policy.Task) -> TensorDictBase:
    """Each of the task's prompts, as often as it is answered."""
    return lazy_stack(
        [
            TensorDict({"query": str(number), "tokens": {"prompt": torch.tensor(prompt)}})
            for number, prompt in enumerate(task.prompts)
            for _ in range(GROUP_SIZE)
        ]
    )


def wrap(engine: Any, tokenizer: PreTrainedTokenizerFast) -> vLLMWrapper:
    """Let TorchRL sample from an engine, with the log-probability of each token."""
    # The wrapper does not say whether to draw a progress bar for each batch.
    engine.generate = functools.partial(engine.generate, use_tqdm=False)
    options = {"max_new_tokens": policy.COMPLETION_TOKENS, "ignore_eos": True, "detokenize": False}
    return vLLMWrapper(
        engine,
        tokenizer=tokenizer,
        input_mode="tokens",
        return_log_probs=True,
        generate_kwargs={"temperature": 1.0, **options},
    )


if __name__ == "__main__":
    run_example(__doc__, run)
