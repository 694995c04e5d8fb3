"""What comes out of a demo run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dbuffer.errors import DBufferError

Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""Token ids, one row per sequence."""


class DemoError(DBufferError, RuntimeError):
    """The demo could not run to its end."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step."""

    step: int
    version_trained: int
    """The version that this step published."""
    version_sampled: int
    """The version that this step's rollouts were sampled with; 0 is the initial checkpoint."""
    reward: float
    """Mean over the rollouts: share of sampled tokens that are in the target set."""
    publish_ms: float
    stage_ms: float
    """Opening and checking ``version_sampled`` in the engine; 0 for version 0."""
    pause_ms: float
    """Swapping it in, with nothing generating."""
    lag: int
    """Versions between the weights that sampled and those that were trained."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """How the run went."""

    engine: str
    """What sampled, as "vLLM 0.32.0, float32 on CPU"."""
    steps: tuple[Step, ...]
    reward_first: float
    """Mean over the first five steps; ``reward_last`` over the last five."""
    reward_last: float
    reward_climbed: bool
    tokens_match: bool
    """Whether the engine's greedy tokens equal those of a fresh engine that was started from the
    trainer's final checkpoint."""
    tokens_changed: bool
    """Whether they differ from those of the initial checkpoint."""
    num_prompts_compared: int
    plot: Path
    duration_s: float
    success: bool
    """Whether the weights reached the engine and made the reward climb."""
