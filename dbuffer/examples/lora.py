"""LoRA: train an adapter, publish the merged model, sample with it in another process.

``python -m dbuffer.examples.lora`` trains a LoRA adapter of a tiny Qwen3 by policy gradient. After
each step the model with the adapter merged into it is published, layer by layer, from the peft
model, which stays as it is; the sampler loads it like any other model. At the end the adapter alone
is published into a second store, as for an engine that loads adapters. With ``--broken-sync``
nothing is published, and the reward stays where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model

from dbuffer import WeightReceiver, WeightSender
from dbuffer.examples.common import are_equal, has_climbed, run_example, say
from dbuffer.integrations.peft import merged_weights, save_adapter, send_adapter
from dbuffer.tools.demo.engines import TorchEngine
from dbuffer.tools.demo.policy import PolicyGradient, Task, Tokens, make_model, save_checkpoint
from dbuffer.tools.demo.process import EngineProcess

LORA = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
)
NUM_STEPS = 20


def run(directory: Path, *, broken_sync: bool) -> bool:
    """Train; whether the sampler came along."""
    task, base, store = Task(seed=0), make_model(seed=0), directory / "store"
    checkpoint, log = save_checkpoint(base, directory / "base"), directory / "sampler.log"
    model: Any = get_peft_model(base, LORA)
    learner, rewards = PolicyGradient(model), []
    weights = merged_weights(model)  # merged when they are sent, each time anew
    with (
        WeightSender(store) as sender,
        EngineProcess(TorchEngine, checkpoint, 0, log, store) as sampler,
    ):
        say(f"sampling with {sampler.wait_ready()}")
        for step in range(1, NUM_STEPS + 1):
            completions = sampler.sample(task.training_prompts)
            reward = task.rewards(completions)
            learner.update(task.training_prompts, completions, reward)
            if not broken_sync:
                sender.send(weights)
            rewards.append(reward.mean().item())
            say(f"step {step:2}: reward {rewards[-1]:.3f}")
        answers = sampler.sample(task.prompts, greedy=True)
    expected = answers_with_adapter(model, task, directory)
    is_same = are_equal(answers, expected, "greedy answers of sampler and adapter")
    return has_climbed(rewards, 5) and is_same


def answers_with_adapter(model: PeftModel, task: Task, directory: Path) -> Tokens:
    """Publish the adapter, save it where peft reads it, and sample with base and adapter."""
    with WeightSender(directory / "adapters") as sender:
        publication = send_adapter(sender, model)
    with WeightReceiver(directory / "adapters") as receiver:
        saved = save_adapter(receiver, directory / "saved")
    say(f"the adapter by itself: {publication.num_bytes / 1e6:.2f} MB in {saved.path.name}")
    merged = PeftModel.from_pretrained(make_model(seed=0), saved.path).merge_and_unload()
    reader = TorchEngine(save_checkpoint(merged, directory / "merged"), seed=0)
    return reader.sample(task.prompts, greedy=True)


if __name__ == "__main__":
    run_example(__doc__, run)
