"""LightRFT's loop on two ranks: a sharded actor, and vLLM engines that follow through a store.

``python -m dbuffer.examples.lightrft`` starts its own ranks by torchrun. The actor is a tiny Qwen3
that FSDP2 shards, or DeepSpeed's ZeRO-3 with ``--zero3``. Each rank has an engine in its process,
samples answers with it, and trains; then all call ``broadcast_to_engine()``. What stands for
LightRFT here is its strategy, of which dbuffer reads four values. With ``--broken-sync`` the
engines get nothing but the first weights.
"""
# ruff: noqa: E402 - what is imported reads the environment

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dbuffer.examples.common import run_example, say, set_environment, start_engine

# As LightRFT has them: engines in the trainer's processes.
set_environment(DS_ACCELERATOR="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0")

NUM_RANKS = 2
NUM_STEPS = 6
LEARNING_RATE = 1e-2
SAMPLES_PER_PROMPT = 8

if __name__ == "__main__" and "RANK" not in os.environ and "--help" not in sys.argv:
    # Become torchrun, which starts this module again on every rank.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    program = ["-m", "dbuffer.examples.lightrft", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *torchrun, *program])  # noqa: S606 - no shell

import torch
import vllm
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from dbuffer.integrations.lightrft import BroadcastManager
from dbuffer.tools.demo.policy import COMPLETION_TOKENS, Task, make_model, save_checkpoint


class Actor(nn.Module):
    """A policy, sharded over all ranks, in the form in which LightRFT has it."""

    def __init__(self, model: Any, *, zero3: bool) -> None:
        super().__init__()
        self.zero3 = zero3
        if zero3:
            self.model = start_deepspeed(model)
            return
        for layer in model.model.layers:
            fully_shard(layer)
        self.model = fully_shard(model)
        self._optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)

    def learn(self, rows: list[list[int]], advantages: torch.Tensor) -> None:
        """Make answers more likely, or less. Each row is a prompt with its answer behind it."""
        loss = torch.zeros(())
        for first in range(0, len(rows), SAMPLES_PER_PROMPT):  # of one prompt, so of one length
            of_prompt = slice(first, first + SAMPLES_PER_PROMPT)
            tokens = torch.tensor(rows[of_prompt])
            log_probs = self.model(tokens[:, :-1]).logits.log_softmax(-1)
            chosen = log_probs.gather(-1, tokens[:, 1:, None])[:, -COMPLETION_TOKENS:, 0]
            loss = loss - (advantages[of_prompt, None] * chosen).sum() / chosen.shape[1] / len(rows)
        if self.zero3:
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()

    def whole_model(self) -> nn.Module:
        """A copy that is not sharded, to see what should have arrived."""
        module = self.model.module if self.zero3 else self.model
        weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
        model = make_model(0).bfloat16()
        model.load_state_dict(weights)
        return model


def start_deepspeed(model: nn.Module) -> Any:
    """DeepSpeed's engine around a model, with its parameters sharded."""
    import deepspeed

    # It would compile an operator for sums over shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def whole(parameter: Any) -> torch.Tensor:
    """A sharded parameter's values, on every rank."""
    gathered: Any = nullcontext()
    if hasattr(parameter, "ds_shape"):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters([parameter])
    with gathered:
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.to(torch.bfloat16, copy=True)  # type: ignore[no-any-return]


def make_engine(model: nn.Module, directory: Path) -> vllm.LLM:
    """This rank's own, started as LightRFT does: with one of two ranks, say 2 for both."""
    checkpoint = [save_checkpoint(model, directory)]  # transformers saves it on rank 0 only
    distributed.broadcast_object_list(checkpoint)
    return start_engine(
        checkpoint[0],
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=1,
        seed=distributed.get_rank(),
        max_num_seqs=64,
    )


def answers(engine: vllm.LLM, task: Task, num_samples: int, temperature: float) -> list[list[int]]:
    """Prompts with answers behind them."""
    parameters = vllm.SamplingParams(
        n=num_samples,
        temperature=temperature,
        max_tokens=COMPLETION_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in task.prompts]
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    return [
        [*prompt, *one.token_ids]
        for prompt, output in zip(task.prompts, outputs, strict=True)
        for one in output.outputs
    ]


def run(directory: Path, arguments: argparse.Namespace) -> bool:
    """Train; whether all engines came along."""
    distributed.init_process_group("gloo")
    rank, task, model = distributed.get_rank(), Task(0), make_model(0)
    engine = make_engine(model, directory / "initial")
    actor = Actor(model, zero3=arguments.zero3)
    strategy = SimpleNamespace(
        engine_type="vllm", args=SimpleNamespace(fsdp=not arguments.zero3, zero_stage=3, bf16=True)
    )
    # LightRFT's class of this name takes the same line.
    manager = BroadcastManager(actor, strategy, engine)
    manager.broadcast_to_engine()
    for step in range(1, NUM_STEPS + 1):
        rows = answers(engine, task, SAMPLES_PER_PROMPT, temperature=1.0)
        rewards = task.rewards(tuple(tuple(row[-COMPLETION_TOKENS:]) for row in rows))
        actor.learn(rows, (rewards - rewards.mean()) / (rewards.std() + 1e-6))
        if not arguments.broken_sync:
            manager.broadcast_to_engine()
        say(f"rank {rank}, step {step}: reward {rewards.mean():.3f}, version {manager.version}")
    tokens = answers(engine, task, 1, temperature=0.0)
    manager.close()
    fresh = make_engine(actor.whole_model(), directory / "final")
    is_equal = tokens == answers(fresh, task, 1, temperature=0.0)
    outcome = "are equal" if is_equal else "differ"
    say(f"rank {rank}: the answers of its engine and of a fresh one {outcome}")
    everywhere = [False] * NUM_RANKS
    # torchrun ends all ranks when the first fails: by then, all have said what they saw.
    distributed.all_gather_object(everywhere, is_equal)
    return all(everywhere)


if __name__ == "__main__":
    zero3 = {"action": "store_true", "help": "DeepSpeed's ZeRO-3, not FSDP2"}
    sys.exit(run_example("lightrft", __doc__, run, zero3=zero3))
