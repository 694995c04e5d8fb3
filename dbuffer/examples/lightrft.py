"""LightRFT's loop on two ranks: a sharded actor, and vLLM engines that follow through a store.

``python -m dbuffer.examples.lightrft`` starts its own ranks by torchrun. The actor is a tiny Qwen3
that FSDP2 shards, or DeepSpeed's ZeRO-3 with ``--zero3``. Each rank has an engine in its process,
samples answers with it, and trains; then all call ``broadcast_to_engine()``. What stands for
LightRFT here is its strategy, of which dbuffer reads four values. With ``--broken-sync`` the
engines get nothing but the first weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from dbuffer.examples.common import are_equal, run_example, say
from dbuffer.integrations.lightrft import BroadcastManager
from dbuffer.tools.demo import policy
from dbuffer.tools.demo.engines import generate, start_llm

NUM_RANKS = 2
NUM_STEPS = 6


def run(directory: Path, *, broken_sync: bool, zero3: bool) -> bool:
    """Train; whether all engines came along."""
    distributed.init_process_group("gloo")
    rank, task, model = distributed.get_rank(), policy.Task(seed=0), policy.make_model(seed=0)
    engine = make_engine(model, directory / "initial")
    # As LightRFT has it: the actor's `model` is what is trained, sharded over all ranks.
    actor = SimpleNamespace(model=start_deepspeed(model) if zero3 else shard(model))
    learner = None if zero3 else policy.PolicyGradient(actor.model)
    arguments = SimpleNamespace(fsdp=not zero3, zero_stage=3, bf16=True)
    strategy = SimpleNamespace(engine_type="vllm", args=arguments)
    # LightRFT's class of this name takes the same line.
    manager = BroadcastManager(actor, strategy, engine)
    manager.broadcast_to_engine()
    for step in range(1, NUM_STEPS + 1):
        prompts = task.training_prompts
        answers = generate(engine, prompts, greedy=False)
        rewards = task.rewards(answers)
        if learner is not None:
            learner.update(prompts, answers, rewards)
        else:
            actor.model.backward(policy.policy_loss(actor.model, prompts, answers, rewards))
            actor.model.step()
        if not broken_sync:
            manager.broadcast_to_engine()
        say(f"rank {rank}, step {step}: reward {rewards.mean():.3f}, version {manager.version}")
    answers = generate(engine, task.prompts, greedy=True)
    manager.close()
    fresh = make_engine(whole_model(actor.model), directory / "final")
    expected = generate(fresh, task.prompts, greedy=True)
    is_same = are_equal(
        answers, expected, f"rank {rank}: the answers of its engine and a fresh one"
    )
    everywhere = [False] * NUM_RANKS
    # torchrun ends all ranks when the first fails: by then, all have said what they saw.
    distributed.all_gather_object(everywhere, is_same)
    return all(everywhere)


def make_engine(model: nn.Module, directory: Path) -> vllm.LLM:
    """This rank's own, started as LightRFT does: with one of two ranks, say 2 for both."""
    checkpoint = [policy.save_checkpoint(model, directory)]  # transformers saves it on rank 0 only
    distributed.broadcast_object_list(checkpoint)
    return start_llm(
        checkpoint[0],
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=1,
        seed=distributed.get_rank(),
    )


def shard(model: Any) -> Any:
    """FSDP2's way."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def start_deepspeed(model: nn.Module) -> Any:
    """DeepSpeed's engine around a model, with its parameters sharded."""
    import deepspeed

    # It would compile an operator for sums over shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": policy.LEARNING_RATE, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def whole_model(sharded: nn.Module) -> nn.Module:
    """A copy that is not sharded, to see what should have arrived."""
    module = getattr(sharded, "module", sharded)  # DeepSpeed's engine has it inside
    model = policy.make_model(seed=0).bfloat16()
    model.load_state_dict({name: whole(value) for name, value in module.named_parameters()})
    return model


def whole(parameter: Any) -> torch.Tensor:
    """A sharded parameter's values, on every rank."""
    if not hasattr(parameter, "ds_shape"):
        return parameter.detach().full_tensor()  # type: ignore[no-any-return]
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]


if __name__ == "__main__":
    # As LightRFT has them: engines in the trainer's processes.
    os.environ |= {"DS_ACCELERATOR": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "RANK" in os.environ or "--help" in sys.argv:
        run_example(__doc__, run, "--zero3")
    # Become torchrun, which starts this module again on every rank.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    program = ["-m", "dbuffer.examples.lightrft", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *torchrun, *program])  # noqa: S606 - no shell
