"""LoRA with peft: train an adapter, publish the merged model, sample with it in another process.

    python examples/peft_lora.py

Trains an adapter of a tiny random Qwen3 by policy gradient; the reward is the share of an answer's
tokens that are in a secret set. After each step the merged model is published, layer by layer; the
peft model does not change. At the end the adapter alone is published into a second store, as for an
engine that loads adapters. The sampler and the base model with that adapter must give the same
greedy answers. Needs peft and transformers; takes half a minute.
"""

import multiprocessing
import statistics
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dbuffer import WeightReceiver, WeightSender
from dbuffer.integrations.peft import merged_weights, save_adapter, send_adapter

VOCABULARY, ANSWER_TOKENS, NUM_STEPS = 512, 16, 20
LORA = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
)

_generator = torch.Generator().manual_seed(0)
PROMPTS = torch.randint(VOCABULARY, (8, 12), generator=_generator)
QUESTIONS = PROMPTS.repeat(8, 1)
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0


def main(directory: Path) -> bool:
    """Train; return whether the sampler followed."""
    torch.set_num_threads(1)
    base = make_model()
    base.save_pretrained(directory / "base")
    model: Any = get_peft_model(base, LORA)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    weights = merged_weights(model)  # merged at each send
    rewards = []
    # Forking a process that has used torch's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    sampler, theirs = context.Pipe()
    process = context.Process(target=sample_for_ever, args=(theirs, directory), daemon=True)
    process.start()
    theirs.close()
    with WeightSender(directory / "store") as sender:
        sender.send(weights)
        for step in range(1, NUM_STEPS + 1):
            sampler.send((QUESTIONS, True))
            answers = sampler.recv()
            reward = IS_REWARDED[answers].mean(dim=1)
            update(model, optimizer, answers, reward)
            sender.send(weights)
            rewards.append(reward.mean().item())
            print(f"step {step:2}: reward {rewards[-1]:.3f}", flush=True)
        sampler.send((PROMPTS, False))
        final = sampler.recv()
    sampler.close()
    process.join()
    is_equal = torch.equal(final, answers_with_adapter(model, directory))
    print(f"greedy answers of the sampler and the adapter: {'equal' if is_equal else 'differ'}")
    return is_equal and statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.1


def sample_for_ever(trainer: Connection, directory: Path) -> None:
    """Answer the trainer's prompts with the newest weights, in the sampler's process."""
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(directory / "base").eval()
    with WeightReceiver(directory / "store") as receiver:
        while True:
            try:
                prompts, is_random = trainer.recv()
            except EOFError:
                return
            receiver.load_into(model)
            trainer.send(generate(model, prompts, is_random=is_random))


def answers_with_adapter(model: PeftModel, directory: Path) -> torch.Tensor:
    """Publish the adapter, save it for peft, and sample with the base model and the adapter."""
    with WeightSender(directory / "adapters") as sender:
        publication = send_adapter(sender, model)
    with WeightReceiver(directory / "adapters") as receiver:
        saved = save_adapter(receiver, directory / "saved")
    print(f"the adapter alone: {publication.num_bytes / 1e6:.2f} MB in {saved.path.name}")
    merged = PeftModel.from_pretrained(make_model(), saved.path).merge_and_unload()
    return generate(merged.eval(), PROMPTS, is_random=False)


def make_model() -> Any:
    """Return a Qwen3 with 0.2 million random parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


@torch.inference_mode()
def generate(model: Any, prompts: torch.Tensor, *, is_random: bool) -> torch.Tensor:
    """Return one answer for each prompt: sampled at temperature 1, or greedy."""
    options = {"do_sample": True, "top_k": 0} if is_random else {"do_sample": False}
    output: torch.Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER_TOKENS,
        min_new_tokens=ANSWER_TOKENS,
        **options,
    )
    return output[:, prompts.shape[1] :].clone()


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, answers: torch.Tensor, reward: torch.Tensor
) -> None:
    """Take a step of REINFORCE, with the batch's mean as baseline."""
    advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
    logits = model(torch.cat([QUESTIONS, answers], dim=1)).logits
    chosen = logits[:, QUESTIONS.shape[1] - 1 : -1].log_softmax(-1).gather(-1, answers[:, :, None])
    optimizer.zero_grad()
    (-(advantages[:, None] * chosen[:, :, 0]).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        has_followed = main(Path(directory))
    sys.exit(None if has_followed else "the sampler did not follow its trainer")
