"""The trainer's side: a tiny Qwen3, the task, and the policy gradient."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""Token ids, one row per sequence."""

VOCAB_SIZE = 512
COMPLETION_TOKENS = 16
LEARNING_RATE = 3e-3
TARGET_SHARE = 0.25
"""Share of the vocabulary that is rewarded: what a policy that knows nothing scores."""
MIN_CLIMB = 0.1
"""What a reward must gain to have climbed: ten times what two averages of 4 steps differ by without
learning, and 16 times the noise of an average of 5."""

_PROMPT_TOKENS = (4, 7, 12, 20, 31, 33, 48, 70)
"""Lengths of the prompts, below and above vLLM's cache block of 32 tokens: a stale prefix cache
would show only in the longer ones."""
_SAMPLES_PER_PROMPT = 8


def make_model(seed: int) -> nn.Module:
    """A Qwen3 of 0.2 million random parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model: nn.Module = Qwen3ForCausalLM(config)
    return model


def save_checkpoint(model: nn.Module, directory: Path) -> Path:
    """Write ``model`` as a Hugging Face checkpoint; the directory."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # for a fraction of a second, across the demo's lines
    model.save_pretrained(directory)  # type: ignore[operator]
    return directory


class Task:
    """Prompts, and a reward: the share of a completion's tokens that are in a secret set."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.prompts: Tokens = tuple(
            tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist())
            for length in _PROMPT_TOKENS
        )
        self.training_prompts: Tokens = self.prompts * _SAMPLES_PER_PROMPT
        order = torch.randperm(VOCAB_SIZE, generator=generator)
        self._is_target = torch.zeros(VOCAB_SIZE)
        self._is_target[order[: int(VOCAB_SIZE * TARGET_SHARE)]] = 1.0

    def rewards(self, completions: Tokens) -> torch.Tensor:
        """One reward per completion, from 0 to 1."""
        return self._is_target[torch.tensor(completions)].mean(dim=1)


class PolicyGradient:
    """REINFORCE by Adam."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def update(self, prompts: Tokens, completions: Tokens, rewards: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        policy_loss(self.model, prompts, completions, rewards).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


def policy_loss(
    model: nn.Module, prompts: Tokens, completions: Tokens, rewards: torch.Tensor
) -> torch.Tensor:
    """REINFORCE's, with the batch's mean as baseline and normalised advantages."""
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    chosen = torch.tensor(completions)
    rows = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
    # Padding stands behind what is looked at, so causal attention needs no mask for it.
    batch = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None] - 1
    positions = starts + torch.arange(chosen.shape[1])
    logits: torch.Tensor = model(batch).logits
    logits = logits.gather(1, positions[:, :, None].expand(-1, -1, logits.shape[-1]))
    log_probs = logits.log_softmax(-1).gather(-1, chosen[:, :, None])[:, :, 0]
    return -(advantages[:, None] * log_probs).mean()


def climb(rewards: Sequence[float], num_averaged: int) -> tuple[float, float, bool]:
    """The mean of the first rewards and of the last ones, and whether those are above these."""
    first = statistics.fmean(rewards[:num_averaged])
    last = statistics.fmean(rewards[-num_averaged:])
    return first, last, last - first >= MIN_CLIMB
