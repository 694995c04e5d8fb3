"""LoRA: train an adapter, publish the merged model, sample with it in another process.

``python -m dbuffer.examples.lora`` trains a LoRA adapter of a tiny Qwen3 by policy gradient. After
each step the model with the adapter merged into it is published, layer by layer, from the peft
model, which stays as it is; the sampler loads it like any other model. At the end the adapter alone
is published into a second store, as for an engine that loads adapters. With ``--broken-sync``
nothing is published, and the reward stays where it was.
"""
# ruff: noqa: T201 - a program prints

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from dbuffer import WeightReceiver, WeightSender
from dbuffer.demo.engines import ENGINES, TorchEngine
from dbuffer.demo.policy import (
    COMPLETION_TOKENS,
    PolicyGradient,
    Task,
    make_model,
    save_checkpoint,
)
from dbuffer.demo.process import EngineProcess, EngineSpec
from dbuffer.demo.records import SampleRequest, Tokens
from dbuffer.integrations.peft import merged_weights, save_adapter, send_adapter

LORA = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
)
NUM_STEPS = 20
NUM_AVERAGED_STEPS = 5
MIN_CLIMB = 0.1
"""What the reward must gain: ten times what two averages of 5 steps differ by without learning."""
START_TIMEOUT_S = 240.0
REPLY_TIMEOUT_S = 60.0


class Step(NamedTuple):
    """One batch of samples, and one update."""

    number: int
    reward: float
    publish_ms: float
    """Merging included."""


class Trainer:
    """Trains an adapter on what the sampler samples, and publishes the merged model."""

    def __init__(self, model: PeftModel, task: Task, sampler: EngineProcess) -> None:
        self._model = model
        self._task = task
        self._sampler = sampler
        self._learner = PolicyGradient(model)

    def train(self, sender: WeightSender, *, broken_sync: bool) -> Iterator[Step]:
        """Take every step with the weights of the step before."""
        prompts, version = self._task.training_prompts, 0
        weights = merged_weights(self._model)  # merged when they are sent, each time anew
        for number in range(1, NUM_STEPS + 1):
            completions = sample(self._sampler, prompts, version)
            rewards = self._task.rewards(completions)
            self._learner.update(prompts, completions, rewards)
            started = time.perf_counter()
            if not broken_sync:
                version = sender.send(weights).version
            yield Step(number, rewards.mean().item(), 1e3 * (time.perf_counter() - started))


def sample(
    sampler: EngineProcess, prompts: Tokens, version: int, *, greedy: bool = False
) -> Tokens:
    """Completions by this version, or a later one."""
    request = SampleRequest(
        prompts=prompts, num_tokens=COMPLETION_TOKENS, greedy=greedy, at_version=version
    )
    sampler.request(request)
    return sampler.reply(REPLY_TIMEOUT_S).completions


def greedy_with_adapter(
    base: torch.nn.Module, model: PeftModel, task: Task, directory: Path
) -> Tokens:
    """Publish the adapter, save it where peft reads it, and sample with base and adapter."""
    with WeightSender(directory / "adapters") as sender:
        publication = send_adapter(sender, model)
    with WeightReceiver(directory / "adapters") as receiver:
        saved = save_adapter(receiver, directory / "saved")
    print(f"the adapter by itself: {publication.num_bytes / 1e6:.2f} MB in {saved.path.name}")
    merged = PeftModel.from_pretrained(base, saved.path).merge_and_unload()
    reader = TorchEngine(save_checkpoint(merged, directory / "merged"), 0)
    return reader.sample(task.prompts, COMPLETION_TOKENS, greedy=True)


def run(directory: Path, seed: int, engine: str, *, broken_sync: bool) -> bool:
    """Train, print how it goes, and return whether it worked."""
    task, base = Task(seed), make_model(seed)
    checkpoint, store = save_checkpoint(base, directory / "base"), directory / "store"
    model: Any = get_peft_model(base, LORA)
    spec = EngineSpec(ENGINES[engine], checkpoint, store, seed, directory / "sampler.log")
    with WeightSender(store) as sender, EngineProcess(spec) as sampler:
        print(f"sampling with {sampler.wait_ready(START_TIMEOUT_S)}")
        steps = []
        for step in Trainer(model, task, sampler).train(sender, broken_sync=broken_sync):
            steps.append(step)
            print(
                f"step {step.number:2}: reward {step.reward:.3f}, "
                f"merged and published in {step.publish_ms:.0f} ms"
            )
        version = 0 if broken_sync else NUM_STEPS
        tokens = sample(sampler, task.prompts, version, greedy=True)
    is_equal = tokens == greedy_with_adapter(make_model(seed), model, task, directory)
    first, last = (
        statistics.fmean(step.reward for step in some)
        for some in (steps[:NUM_AVERAGED_STEPS], steps[-NUM_AVERAGED_STEPS:])
    )
    has_climbed = last - first >= MIN_CLIMB
    print(
        f"reward {first:.3f} to {last:.3f}: {'climbed' if has_climbed else 'did not climb'}; "
        f"greedy answers of sampler and adapter {'are equal' if is_equal else 'differ'}"
    )
    return has_climbed and is_equal


def main() -> int:
    """Run with the command line's options; whether it worked, as an exit status."""
    parser = argparse.ArgumentParser(prog="python -m dbuffer.examples.lora", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--engine", choices=list(ENGINES), default="torch", help="default: torch")
    parser.add_argument("--broken-sync", action="store_true", help="publish nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the sampler needs the other core
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dbuffer-lora-") as directory:
        has_worked = run(
            Path(directory), arguments.seed, arguments.engine, broken_sync=arguments.broken_sync
        )
    print(f"{'success' if has_worked else 'failed'} in {time.monotonic() - started:.0f} s")
    return 0 if has_worked else 1


if __name__ == "__main__":
    sys.exit(main())
