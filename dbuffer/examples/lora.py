"""LoRA: train an adapter, publish the merged model, sample with it in another process.

``python -m dbuffer.examples.lora`` trains a LoRA adapter of a tiny Qwen3 by policy gradient. After
each step the model with the adapter merged into it is published, layer by layer, from the peft
model, which stays as it is; the sampler loads it like any other model. At the end the adapter alone
is published into a second store, as for an engine that loads adapters. With ``--broken-sync``
nothing is published, and the reward stays where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model

from dbuffer import WeightReceiver, WeightSender
from dbuffer.examples.common import SEED, has_worked, run_example, say
from dbuffer.integrations.peft import merged_weights, save_adapter, send_adapter
from dbuffer.tools.demo.engines import ENGINES, TorchEngine
from dbuffer.tools.demo.policy import (
    COMPLETION_TOKENS,
    PolicyGradient,
    Task,
    make_model,
    save_checkpoint,
)
from dbuffer.tools.demo.process import EngineProcess, EngineSpec, Request
from dbuffer.tools.demo.records import Tokens

LORA = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
)
NUM_STEPS = 20


def sample(
    sampler: EngineProcess, prompts: Tokens, version: int, *, greedy: bool = False
) -> Tokens:
    """Completions by this version, or a later one."""
    sampler.request(Request(prompts, COMPLETION_TOKENS, greedy, version))
    return sampler.reply(timeout_s=60.0).completions


def greedy_with_adapter(model: PeftModel, task: Task, directory: Path, seed: int) -> Tokens:
    """Publish the adapter, save it where peft reads it, and sample with base and adapter."""
    with WeightSender(directory / "adapters") as sender:
        publication = send_adapter(sender, model)
    with WeightReceiver(directory / "adapters") as receiver:
        saved = save_adapter(receiver, directory / "saved")
    say(f"the adapter by itself: {publication.num_bytes / 1e6:.2f} MB in {saved.path.name}")
    merged = PeftModel.from_pretrained(make_model(seed), saved.path).merge_and_unload()
    reader = TorchEngine(save_checkpoint(merged, directory / "merged"), 0)
    return reader.sample(task.prompts, COMPLETION_TOKENS, greedy=True)


def run(directory: Path, arguments: argparse.Namespace) -> bool:
    """Train; whether the sampler came along."""
    task, base = Task(arguments.seed), make_model(arguments.seed)
    engine = ENGINES[arguments.engine]
    checkpoint, store = save_checkpoint(base, directory / "base"), directory / "store"
    spec = EngineSpec(engine, checkpoint, store, arguments.seed, directory / "sampler.log")
    model: Any = get_peft_model(base, LORA)
    learner, rewards, version = PolicyGradient(model), [], 0
    weights = merged_weights(model)  # merged when they are sent, each time anew
    with WeightSender(store) as sender, EngineProcess(spec) as sampler:
        say(f"sampling with {sampler.wait_ready(timeout_s=240.0)}")
        for step in range(1, NUM_STEPS + 1):
            completions = sample(sampler, task.training_prompts, version)
            reward = task.rewards(completions)
            learner.update(task.training_prompts, completions, reward)
            started = time.perf_counter()
            if not arguments.broken_sync:
                version = sender.send(weights).version
            publish_ms = 1e3 * (time.perf_counter() - started)
            rewards.append(reward.mean().item())
            say(f"step {step:2}: reward {rewards[-1]:.3f}, merged and sent in {publish_ms:.0f} ms")
        tokens = sample(sampler, task.prompts, version, greedy=True)
    is_equal = tokens == greedy_with_adapter(model, task, directory, arguments.seed)
    return has_worked(rewards, 5, "greedy answers of sampler and adapter", is_equal)


if __name__ == "__main__":
    engine = {"choices": list(ENGINES), "default": "torch", "help": "default: torch"}
    sys.exit(run_example("lora", __doc__, run, seed=SEED, engine=engine))
