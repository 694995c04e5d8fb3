"""LightRFT's loop on two ranks: a sharded actor, and vLLM engines that follow through a store.

``python -m dbuffer.examples.lightrft`` starts its own ranks by torchrun. The actor is a tiny Qwen3
that FSDP2 shards, or DeepSpeed's ZeRO-3 with ``--zero3``. Each rank has an engine in its process,
samples answers with it, and trains; then all call ``broadcast_to_engine()``. What stands for
LightRFT here is its strategy, of which dbuffer reads four values. With ``--broken-sync`` nothing
is brought to the engines but the first weights.
"""
# ruff: noqa: E402 - what is imported reads the environment

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # a core for each rank
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # As LightRFT has them: engines in the trainer's processes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

NUM_RANKS = 2
NUM_STEPS = 6
LEARNING_RATE = 1e-2
SAMPLES_PER_PROMPT = 8


def start_ranks(arguments: list[str]) -> None:
    """Become torchrun, which starts this module again on every rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    program = ["-m", "dbuffer.examples.lightrft", *arguments]
    os.execv(sys.executable, [sys.executable, *torchrun, *program])  # noqa: S606 - no shell


if __name__ == "__main__" and "RANK" not in os.environ and "--help" not in sys.argv:
    start_ranks(sys.argv[1:])

import torch
import vllm
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from dbuffer.demo.policy import COMPLETION_TOKENS, Task, make_model, save_checkpoint
from dbuffer.integrations.lightrft import BroadcastManager


class Actor(nn.Module):
    """A policy, sharded over all ranks, in the form in which LightRFT has it."""

    def __init__(self, model: Any, *, zero3: bool) -> None:
        super().__init__()
        self.zero3 = zero3
        if zero3:
            self.model = _start_deepspeed(model)
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
        weights = {name: _whole(parameter) for name, parameter in module.named_parameters()}
        model = make_model(0).bfloat16()
        model.load_state_dict(weights)
        return model


def _start_deepspeed(model: nn.Module) -> Any:
    import deepspeed

    # It would compile a way of its own to add up over shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def _whole(parameter: Any) -> torch.Tensor:
    gathered: Any = nullcontext()
    if hasattr(parameter, "ds_shape"):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters([parameter])
    with gathered:
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        return whole.to(torch.bfloat16, copy=True)  # type: ignore[no-any-return]


def make_engine(checkpoint: Path) -> vllm.LLM:
    """This rank's own, started as LightRFT does: with one of two ranks, say 2 for both."""
    return vllm.LLM(
        model=str(checkpoint),
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=1,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        dtype="float32",
        seed=distributed.get_rank(),
        max_model_len=256,
        max_num_seqs=64,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
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
    return [
        [*prompt["prompt_token_ids"], *one.token_ids]
        for prompt, output in zip(
            prompts, engine.generate(prompts, parameters, use_tqdm=False), strict=True
        )
        for one in output.outputs
    ]


def shared_checkpoint(model: nn.Module, directory: Path) -> Path:
    """Save a model once for all ranks; where."""
    paths = [save_checkpoint(model, directory)]  # transformers does it on rank 0 only
    distributed.broadcast_object_list(paths)
    return paths[0]


def say(text: str) -> None:
    """Print a line in one piece: ranks share the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(directory: Path, *, zero3: bool, broken_sync: bool) -> bool:
    """Train, print how it goes, and return whether all engines came along."""
    rank, task, model = distributed.get_rank(), Task(0), make_model(0)
    engine = make_engine(shared_checkpoint(model, directory / "initial"))
    actor = Actor(model, zero3=zero3)
    strategy = SimpleNamespace(
        engine_type="vllm", args=SimpleNamespace(fsdp=not zero3, zero_stage=3, bf16=True)
    )
    # LightRFT's class of this name takes the same line.
    manager = BroadcastManager(actor, strategy, engine)
    manager.broadcast_to_engine()
    for step in range(1, NUM_STEPS + 1):
        rows = answers(engine, task, SAMPLES_PER_PROMPT, temperature=1.0)
        rewards = task.rewards(tuple(tuple(row[-COMPLETION_TOKENS:]) for row in rows))
        actor.learn(rows, (rewards - rewards.mean()) / (rewards.std() + 1e-6))
        if not broken_sync:
            manager.broadcast_to_engine()
        say(f"rank {rank}, step {step}: reward {rewards.mean():.3f}, version {manager.version}")
    tokens = answers(engine, task, 1, temperature=0.0)
    manager.close()
    fresh = make_engine(shared_checkpoint(actor.whole_model(), directory / "final"))
    is_equal = tokens == answers(fresh, task, 1, temperature=0.0)
    outcome = "are equal" if is_equal else "differ"
    say(f"rank {rank}: the answers of its engine and of a fresh one {outcome}")
    everywhere = [False] * NUM_RANKS
    distributed.all_gather_object(everywhere, is_equal)
    return all(everywhere)


def main() -> int:
    """Run with the command line's options; whether it worked, as an exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dbuffer.examples.lightrft", description=__doc__
    )
    parser.add_argument("--zero3", action="store_true", help="DeepSpeed's ZeRO-3, not FSDP2")
    parser.add_argument("--broken-sync", action="store_true", help="bring no new weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="dbuffer-lightrft-") as directory:
        is_equal = run(Path(directory), zero3=arguments.zero3, broken_sync=arguments.broken_sync)
    # torchrun ends all ranks when the first fails: by then, all have said what they saw.
    outcome = "success" if is_equal else "failed"
    say(f"rank {distributed.get_rank()}: {outcome} in {time.monotonic() - started:.0f} s")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
