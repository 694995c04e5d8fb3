"""Policy gradient on a tiny Qwen3: a vLLM engine samples, and follows the trainer through a store.

    python examples/demo.py    # or python3 dev.py demo: one to three minutes

The reward is the share of an answer's tokens that are in a secret set. It climbs only if the
weights reach the engine. At the end the engine and a fresh one on the final checkpoint must give
the same greedy answers; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TypeAlias

# torch and vLLM read these when they are imported, here and in the engine's process.
os.environ |= {
    # On 2 cores, a second thread raised the median pause from 18 to 62 ms: the model is too small.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # No logs between the demo's lines.
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "VLLM_LOGGING_LEVEL": "ERROR",
} | os.environ
warnings.simplefilter("ignore")

import torch
import transformers
import vllm
from safetensors.torch import save_file
from torch import nn

import dbuffer
from dbuffer.integrations.vllm import follow

Answers: TypeAlias = list[list[int]]
"""Token ids, a row for each prompt."""

MEMORY = Path("/dev/shm")
NUM_STEPS = 40
AVERAGED_STEPS = 5
MIN_CLIMB = 0.1
"""Smallest gain of the reward that counts: 16 times the noise of an average of five steps."""
VOCABULARY = 512
ANSWER_TOKENS = 16
SAMPLES_PER_PROMPT = 8
PROMPT_TOKENS = (4, 7, 12, 20, 31, 33, 48, 70)
"""Some prompts are longer than vLLM's cache block: a stale prefix cache shows only in those."""
BLOCK_TOKENS = 32


def main() -> None:
    """Train, with a line for each step."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the model is small, and the engine needs the other cores
    trainer, rewards = Trainer(), []
    memory = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="dbuffer-demo-", dir=memory) as scratch:
        print("starting a vLLM engine, which takes a minute on two cores")
        engine = start_engine(trainer.model, Path(scratch, "initial"))
        first = generate(engine, trainer.prompts, temperature=0.0)
        store = Path(scratch, "store")
        print("step  version  reward  publish ms  stage ms  pause ms")
        with dbuffer.WeightSender(store) as sender, follow(engine, store) as follower:
            for step in range(1, NUM_STEPS + 1):
                answers = generate(engine, trainer.batch, temperature=1.0)
                rewards.append(trainer.update(answers))
                publication = sender.send(trainer.model, metadata={"step": step})
                switch = follower.sync()
                if switch is None:
                    raise RuntimeError(f"the engine did not load version {publication.version}")
                print(
                    f"{step:4}  {switch.version:7}  {rewards[-1]:6.3f}  "
                    f"{1e3 * publication.duration_s:10.1f}  {1e3 * switch.stage_s:8.1f}  "
                    f"{1e3 * switch.pause_s:8.1f}"
                )
        last = generate(engine, trainer.prompts, temperature=0.0)
        engine.llm_engine.engine_core.shutdown()
        print("starting a fresh engine from the final checkpoint")
        fresh = start_engine(trainer.model, Path(scratch, "final"))
        expected = generate(fresh, trainer.prompts, temperature=0.0)
        fresh.llm_engine.engine_core.shutdown()
    before = statistics.fmean(rewards[:AVERAGED_STEPS])
    after = statistics.fmean(rewards[-AVERAGED_STEPS:])
    print(f"reward: {before:.3f} to {after:.3f}")
    outcome = "equal" if last == expected else "different"
    print(f"greedy answers to {len(last)} prompts, engine and fresh engine: {outcome}")
    if after - before < MIN_CLIMB or last != expected or last == first:
        sys.exit("the engine did not follow its trainer")
    print("success: the engine followed its trainer")


class Trainer:
    """A tiny model trained with REINFORCE and Adam, its prompts and its reward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in PROMPT_TOKENS]
        self.batch = self.prompts * SAMPLES_PER_PROMPT
        self._is_rewarded = torch.zeros(VOCABULARY)
        self._is_rewarded[torch.randperm(VOCABULARY)[: VOCABULARY // 4]] = 1.0
        config = transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the smallest that vLLM's CPU attention takes
            tie_word_embeddings=False,
            architectures=[transformers.Qwen3ForCausalLM.__name__],
        )
        self.model: nn.Module = transformers.Qwen3ForCausalLM(config)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def update(self, answers: Answers) -> float:
        """Take a step on the engine's answers to ``batch``; return their mean reward."""
        chosen = torch.tensor(answers)
        rewards = self._is_rewarded[chosen].mean(dim=1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        rows = [torch.tensor(p + a) for p, a in zip(self.batch, answers, strict=True)]
        # Attention is causal: padding at the end needs no mask.
        logits = self.model(nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
        starts = torch.tensor([len(prompt) for prompt in self.batch])[:, None] - 1
        positions = starts + torch.arange(ANSWER_TOKENS)
        logits = logits.gather(1, positions[:, :, None].expand(-1, -1, VOCABULARY))
        log_probs = logits.log_softmax(-1).gather(-1, chosen[:, :, None])[:, :, 0]
        self._optimizer.zero_grad()
        (-(advantages[:, None] * log_probs).mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return rewards.mean().item()


def start_engine(model: nn.Module, checkpoint: Path) -> vllm.LLM:
    """Start an engine from a checkpoint of the model."""
    # Don't use `model.save_pretrained`: it imports DeepSpeed, if installed, which prints a warning.
    model.config.save_pretrained(checkpoint)  # type: ignore[operator,union-attr]
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    return vllm.LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        # vLLM's fastest attention kernels of a GPU take no float32.
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=256,
        max_num_seqs=64,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )


def generate(engine: vllm.LLM, prompts: Answers, temperature: float) -> Answers:
    """Return the engine's answer to each prompt."""
    sampling = vllm.SamplingParams(
        temperature=temperature, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    questions = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(questions, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    main()
