"""Policy gradient on a tiny Qwen3 whose answers a vLLM engine samples, following through a store.

The reward is the share of an answer's tokens that are in a secret set. It only climbs if the
weights reach the engine, and at the end the engine's greedy answers must equal those of a fresh
engine that was started from the final checkpoint.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
import vllm
from safetensors.torch import save_file
from torch import nn

from dbuffer.integrations.vllm import follow
from dbuffer.publish.sender import WeightSender
from dbuffer.tools.terminal import print_line, progress

Answers: TypeAlias = list[list[int]]
"""Token ids, a row for each prompt."""

_MEMORY = Path("/dev/shm")  # noqa: S108
_NUM_STEPS = 40
_AVERAGED_STEPS = 5
_MIN_CLIMB = 0.1
"""Gain of a reward that climbs: 16 times the noise of an average of five steps."""
_VOCABULARY = 512
_ANSWER_TOKENS = 16
_SAMPLES_PER_PROMPT = 8
_PROMPT_TOKENS = (4, 7, 12, 20, 31, 33, 48, 70)
"""Some prompts are longer than vLLM's cache block: a stale prefix cache shows only in those."""
_BLOCK_TOKENS = 32


def run_demo() -> bool:
    """Train, with a line for each step; return whether the engine followed its trainer."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the model is too small for more, and the engine needs the others
    trainer, rewards = _Trainer(), []
    memory = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="dbuffer-demo-", dir=memory) as scratch:
        print_line("starting a vLLM engine")
        with progress("the engine starts"):
            engine = _start_engine(trainer.model, Path(scratch, "initial"))
        first = _generate(engine, trainer.prompts, temperature=0.0)
        store = Path(scratch, "store")
        print_line("step  version  reward  publish ms  stage ms  pause ms")
        with WeightSender(store) as sender, follow(engine, store) as follower:
            for step in range(1, _NUM_STEPS + 1):
                answers = _generate(engine, trainer.batch, temperature=1.0)
                rewards.append(trainer.update(answers))
                publication = sender.send(trainer.model, metadata={"step": step})
                switch = follower.sync()
                if switch is None:
                    raise RuntimeError(f"the engine does not switch to {publication.version}")
                print_line(
                    f"{step:4}  {switch.version:7}  {rewards[-1]:6.3f}  "
                    f"{1e3 * publication.duration_s:10.1f}  {1e3 * switch.stage_s:8.1f}  "
                    f"{1e3 * switch.pause_s:8.1f}"
                )
        last = _generate(engine, trainer.prompts, temperature=0.0)
        engine.llm_engine.engine_core.shutdown()
        print_line("starting a fresh engine from the final checkpoint")
        with progress("the engine starts"):
            fresh = _start_engine(trainer.model, Path(scratch, "final"))
        expected = _generate(fresh, trainer.prompts, temperature=0.0)
        fresh.llm_engine.engine_core.shutdown()
    before = statistics.fmean(rewards[:_AVERAGED_STEPS])
    after = statistics.fmean(rewards[-_AVERAGED_STEPS:])
    print_line(f"reward: {before:.3f} to {after:.3f}")
    outcome = "equal" if last == expected else "different"
    print_line(f"greedy answers to {len(last)} prompts, engine and fresh engine: {outcome}")
    return after - before >= _MIN_CLIMB and last == expected != first


class _Trainer:
    """A tiny model trained with REINFORCE and Adam, its prompts and its reward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.prompts = [torch.randint(_VOCABULARY, (length,)).tolist() for length in _PROMPT_TOKENS]
        self.batch = self.prompts * _SAMPLES_PER_PROMPT
        self._is_rewarded = torch.zeros(_VOCABULARY)
        self._is_rewarded[torch.randperm(_VOCABULARY)[: _VOCABULARY // 4]] = 1.0
        config = transformers.Qwen3Config(
            vocab_size=_VOCABULARY,
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
        positions = starts + torch.arange(_ANSWER_TOKENS)
        logits = logits.gather(1, positions[:, :, None].expand(-1, -1, _VOCABULARY))
        log_probs = logits.log_softmax(-1).gather(-1, chosen[:, :, None])[:, :, 0]
        self._optimizer.zero_grad()
        (-(advantages[:, None] * log_probs).mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return rewards.mean().item()


def _start_engine(model: nn.Module, checkpoint: Path) -> vllm.LLM:
    # Not `model.save_pretrained`: it imports DeepSpeed, if it is installed, which prints a warning.
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
        block_size=_BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )


def _generate(engine: vllm.LLM, prompts: Answers, temperature: float) -> Answers:
    sampling = vllm.SamplingParams(
        temperature=temperature, max_tokens=_ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    questions = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(questions, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
