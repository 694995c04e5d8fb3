"""The main job: train here, sample in another process, and let a store carry the weights."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from dbuffer.publish.sender import WeightSender
from dbuffer.tools.demo.engines import require_engine
from dbuffer.tools.demo.policy import (
    COMPLETION_TOKENS,
    PolicyGradient,
    Task,
    make_model,
    save_checkpoint,
)
from dbuffer.tools.demo.process import EngineProcess, EngineSpec, Request
from dbuffer.tools.demo.records import DemoOptions, DemoResult, Step, Tokens

_MEMORY = Path("/dev/shm")  # noqa: S108
_AVERAGED_STEPS = 5
_MIN_CLIMB = 0.1
"""What the reward must gain to have climbed: 16 times the noise of an average of 5 steps."""

Report: TypeAlias = Callable[[str | Step], None]
"""Called with each phase that begins, as text, and with each training step."""


def run_demo(options: DemoOptions, report: Report = lambda _: None) -> DemoResult:
    """Train a tiny model with rollouts from an engine in another process.

    Leaves ``demo.png`` and the engines' logs in the output directory, and nothing else: no
    process, no store.

    Raises:
        DemoError: a package is missing, or the engine failed, died or hung.
    """
    engine = require_engine(options.engine)
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    task, model = Task(options.seed), make_model(options.seed)
    with _scratch_directory() as scratch, _one_torch_thread():
        store = scratch / "store"
        spec = EngineSpec(
            engine=engine,
            checkpoint=save_checkpoint(model, scratch / "initial"),
            store=store,
            seed=options.seed,
            log=options.output / "engine.log",
        )
        with WeightSender(store) as sender, EngineProcess(spec) as process:
            report(f"starting the {options.engine} engine in its own process")
            description = process.wait_ready(options.start_timeout_s)
            report(f"training here, sampling in {description}")
            tokens_before = _greedy(process, task, options, version=0)
            steps = []
            for step in _train(task, PolicyGradient(model), sender, process, options):
                report(step)
                steps.append(step)
            tokens = _greedy(process, task, options, version=options.steps)
        report("asking a fresh engine, started from the final checkpoint")
        final = save_checkpoint(model, scratch / "final")
        log = options.output / "fresh-engine.log"
        with EngineProcess(spec._replace(checkpoint=final, store=None, log=log)) as process:
            process.wait_ready(options.start_timeout_s)
            tokens_expected = _greedy(process, task, options, version=0)
    first, last = _mean_reward(steps[:_AVERAGED_STEPS]), _mean_reward(steps[-_AVERAGED_STEPS:])
    result = DemoResult(
        engine=description,
        steps=tuple(steps),
        reward_first=first,
        reward_last=last,
        reward_climbed=last - first >= _MIN_CLIMB,
        tokens_match=tokens == tokens_expected,
        tokens_changed=tokens != tokens_before,
        num_prompts_compared=len(tokens),
        plot=options.output / "demo.png",
        duration_s=time.monotonic() - started,
    )
    from dbuffer.tools.demo.plot import save_plot

    save_plot(result)
    return result


def _train(
    task: Task,
    learner: PolicyGradient,
    sender: WeightSender,
    process: EngineProcess,
    options: DemoOptions,
) -> Iterator[Step]:
    """Train on one batch while the engine samples the next with the weights it has."""
    request = Request(task.training_prompts, COMPLETION_TOKENS)
    process.request(request)
    for number in range(1, options.steps + 1):
        rollouts = process.reply(options.reply_timeout_s)
        if number < options.steps:
            process.request(request)
        rewards = task.rewards(rollouts.completions)
        learner.update(request.prompts, rollouts.completions, rewards)
        publication = sender.send(learner.model, metadata={"step": number})
        yield Step(
            step=number,
            version_trained=publication.version,
            version_sampled=rollouts.weights.version,
            reward=rewards.mean().item(),
            publish_ms=1e3 * publication.duration_s,
            stage_ms=rollouts.weights.stage_ms,
            pause_ms=rollouts.weights.pause_ms,
        )


def _greedy(process: EngineProcess, task: Task, options: DemoOptions, *, version: int) -> Tokens:
    process.request(Request(task.prompts, COMPLETION_TOKENS, greedy=True, at_version=version))
    return process.reply(options.reply_timeout_s).completions


def _mean_reward(steps: Sequence[Step]) -> float:
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
