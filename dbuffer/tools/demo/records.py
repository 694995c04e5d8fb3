"""What goes into a demo run, and what comes out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dbuffer.errors import DBufferError
from dbuffer.runtime import options as checks

MIN_STEPS = 20
"""With fewer, a climbing reward cannot be told from noise."""

Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""Token ids, one row per sequence."""


class DemoError(DBufferError, RuntimeError):
    """The demo could not run to its end."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What to run.

    Raises:
        OptionError: (a ``ValueError``) ``engine`` or ``steps`` is not what it may be.
    """

    output: Path
    """Directory for ``demo.png`` and the engines' logs; made if it is missing."""
    engine: Literal["vllm", "torch"] = "vllm"
    steps: int = 40
    seed: int = 0
    start_timeout_s: float = 240.0
    """How long an engine may take to start. The first one of a machine takes longest."""
    reply_timeout_s: float = 60.0
    """How long an engine may take to answer once it runs."""

    def __post_init__(self) -> None:
        checks.choice("engine", self.engine, ("vllm", "torch"))
        checks.whole_number("steps", self.steps, at_least=MIN_STEPS)


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

    @property
    def lag(self) -> int:
        """Versions between the weights that sampled and those that were trained."""
        return self.version_trained - 1 - self.version_sampled


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """How the run went."""

    engine: str
    """What sampled, as "vLLM 0.32.0, float32 on CPU"."""
    steps: tuple[Step, ...]
    reward_first: float
    """Mean reward of the first steps."""
    reward_last: float
    """Mean reward of the last steps."""
    reward_climbed: bool
    tokens_match: bool
    """Whether the engine's greedy tokens equal those of a fresh engine that was started from the
    trainer's final checkpoint."""
    tokens_changed: bool
    """Whether they differ from those of the initial checkpoint."""
    num_prompts_compared: int
    plot: Path
    duration_s: float

    @property
    def success(self) -> bool:
        """Whether the weights reached the engine and made the reward climb."""
        return self.reward_climbed and self.tokens_match and self.tokens_changed

    def as_dict(self) -> dict[str, Any]:
        """All of it, in types that JSON knows."""
        steps = [asdict(step) | {"lag": step.lag} for step in self.steps]
        return asdict(self) | {"steps": steps, "plot": str(self.plot), "success": self.success}
