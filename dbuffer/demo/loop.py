"""The main job: train here, sample in another process, and let a store carry the weights."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from dbuffer.demo.engines import Engine, require_engine
from dbuffer.demo.policy import COMPLETION_TOKENS, PolicyGradient, Task, make_model, save_checkpoint
from dbuffer.demo.process import EngineProcess, EngineSpec
from dbuffer.demo.records import DemoOptions, DemoResult, SampleRequest, Step, Tokens
from dbuffer.sender import WeightSender

_MEMORY = Path("/dev/shm")  # noqa: S108
_AVERAGED_STEPS = 5
_MIN_CLIMB = 0.1
"""What the reward must gain to have climbed: 16 times the noise of an average of 5 steps."""


class Reporter(Protocol):
    """Told what is going on, while it is."""

    def phase(self, text: str) -> None:
        """Something else begins."""
        ...

    def step(self, step: Step) -> None:
        """A training step is done."""
        ...


class _Silent:
    def phase(self, text: str) -> None: ...

    def step(self, step: Step) -> None: ...


def run_demo(options: DemoOptions, reporter: Reporter | None = None) -> DemoResult:
    """Train a tiny model with rollouts from an engine in another process.

    Leaves ``demo.png`` and the engines' logs in the output directory, and nothing else: no
    process, no store.

    Args:
        options: what to run.
        reporter: told about each phase and step. Default: nobody.

    Raises:
        DemoError: the engine's package is missing, or the engine failed, died or hung.
    """
    from dbuffer.demo.plot import save_plot

    engine = require_engine(options.engine)
    options.output.mkdir(parents=True, exist_ok=True)
    plot = options.output / "demo.png"
    with _scratch_directory() as scratch, _one_torch_thread():
        demo = _Demo(options, engine, reporter or _Silent(), scratch)
        result = demo.run(plot)
    save_plot(result, plot)
    return result


class _Demo:
    def __init__(
        self, options: DemoOptions, engine: type[Engine], reporter: Reporter, scratch: Path
    ) -> None:
        self._options = options
        self._engine = engine
        self._reporter = reporter
        self._scratch = scratch
        self._task = Task(options.seed)
        self._model = make_model(options.seed)
        self._learner = PolicyGradient(self._model)

    def run(self, plot: Path) -> DemoResult:
        started = time.monotonic()
        options, store = self._options, self._scratch / "store"
        checkpoint = save_checkpoint(self._model, self._scratch / "initial")
        with (
            WeightSender(store) as sender,
            self._start_engine(checkpoint, store, "engine.log") as engine,
        ):
            self._reporter.phase(f"starting the {options.engine} engine in its own process")
            description = engine.wait_ready(options.start_timeout_s)
            self._reporter.phase(f"training here, sampling in {description}")
            tokens_before = self._greedy(engine, version=0)
            steps = tuple(self._train(sender, engine))
            tokens = self._greedy(engine, version=options.steps)
        self._reporter.phase("asking a fresh engine, started from the final checkpoint")
        tokens_expected = self._ask_fresh_engine()
        first, last = _mean_reward(steps[:_AVERAGED_STEPS]), _mean_reward(steps[-_AVERAGED_STEPS:])
        return DemoResult(
            engine=description,
            steps=steps,
            reward_first=first,
            reward_last=last,
            reward_climbed=last - first >= _MIN_CLIMB,
            tokens_match=tokens == tokens_expected,
            tokens_changed=tokens != tokens_before,
            num_prompts_compared=len(tokens),
            plot=plot,
            duration_s=time.monotonic() - started,
        )

    def _start_engine(self, checkpoint: Path, store: Path | None, log: str) -> EngineProcess:
        return EngineProcess(
            EngineSpec(
                engine=self._engine,
                checkpoint=checkpoint,
                store=store,
                seed=self._options.seed,
                log=self._options.output / log,
            )
        )

    def _train(self, sender: WeightSender, engine: EngineProcess) -> Iterator[Step]:
        """Train on one batch while the engine samples the next with the weights it has."""
        request = SampleRequest(prompts=self._task.training_prompts, num_tokens=COMPLETION_TOKENS)
        engine.request(request)
        for number in range(1, self._options.steps + 1):
            rollouts = engine.reply(self._options.reply_timeout_s)
            if number < self._options.steps:
                engine.request(request)
            rewards = self._task.rewards(rollouts.completions)
            self._learner.update(request.prompts, rollouts.completions, rewards)
            publication = sender.send(self._model, metadata={"step": number})
            step = Step(
                step=number,
                version_trained=publication.version,
                version_sampled=rollouts.version,
                reward=rewards.mean().item(),
                publish_ms=1e3 * publication.duration_s,
                stage_ms=rollouts.stage_ms,
                pause_ms=rollouts.pause_ms,
            )
            self._reporter.step(step)
            yield step

    def _greedy(self, engine: EngineProcess, version: int) -> Tokens:
        engine.request(
            SampleRequest(
                prompts=self._task.prompts,
                num_tokens=COMPLETION_TOKENS,
                greedy=True,
                at_version=version,
            )
        )
        return engine.reply(self._options.reply_timeout_s).completions

    def _ask_fresh_engine(self) -> Tokens:
        checkpoint = save_checkpoint(self._model, self._scratch / "final")
        with self._start_engine(checkpoint, None, "fresh-engine.log") as engine:
            engine.wait_ready(self._options.start_timeout_s)
            return self._greedy(engine, version=0)


def _mean_reward(steps: tuple[Step, ...]) -> float:
    return statistics.fmean(step.reward for step in steps)


@contextlib.contextmanager
def _scratch_directory() -> Iterator[Path]:
    """A directory for the store and the checkpoints, in memory where there is such a place."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="dbuffer-demo-", dir=parent) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The model is too small for more threads, and the engine needs the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
