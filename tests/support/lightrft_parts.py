"""LightRFT's side of its integration: strategies that look like LightRFT's, and real trainers."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from tests.support.engines import preforked
from tests.support.zero3 import configuration, start_deepspeed

TRAINERS = ("fsdp2 bf16", "fsdp2", "zero-1", "zero-1 lora", "zero-2 bf16", "zero-3")


class Actor(nn.Module):
    """What LightRFT wraps round a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def strategy_for(trainer: str, engine_type: str = "vllm") -> Any:
    """What is read of a strategy of LightRFT's."""
    kind, _, precision = trainer.partition(" ")
    stage = 0 if kind == "fsdp2" else int(kind[-1])
    args = SimpleNamespace(fsdp=kind == "fsdp2", zero_stage=stage, bf16=precision == "bf16")
    return SimpleNamespace(args=args, engine_type=engine_type)


def expected_dtype(trainer: str) -> torch.dtype:
    """As LightRFT sends it."""
    if trainer.endswith("bf16"):
        return torch.bfloat16
    return torch.float16 if trainer.startswith("fsdp2") else torch.float32


class Trainer:
    """A real trainer of a model, of all ranks of torch.distributed."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind = kind
        self.strategy = strategy_for(kind)
        self._engine: Any = None
        if kind.endswith("lora"):
            model = with_adapters(model)
        if kind.startswith("fsdp2"):
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            self.actor = Actor(model)
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            self._engine = start_engine(model, self.strategy.args)
            self.actor = Actor(self._engine)

    @property
    def module(self) -> Any:
        """The model itself."""
        return self.actor.model if self._engine is None else self._engine.module

    def step(self) -> None:
        """Train on tokens of this rank's own."""
        torch.manual_seed(distributed.get_rank())
        tokens = torch.randint(0, self.module.config.vocab_size, (2, 16))
        loss = self.actor.model(input_ids=tokens, labels=tokens).loss
        if self._engine is not None:
            self._engine.backward(loss)
            self._engine.step()
            return
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """All weights as they are to arrive, put together by torch, DeepSpeed and peft."""
        if self.kind.endswith("lora"):
            return dict(copy.deepcopy(self.module).merge_and_unload().state_dict())
        weights = {}
        for name, parameter in self.module.named_parameters():
            with _gathered(parameter):
                whole = parameter.detach()
                whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
                weights[name] = whole.to(expected_dtype(self.kind), copy=True)
        return weights


def with_adapters(model: Any) -> Any:
    """A model with LoRA in it, that makes it answer otherwise."""
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=64, target_modules=layers, init_lora_weights=False)
    return get_peft_model(model, config)


def _gathered(parameter: Any) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_shape"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def start_engine(model: Any, args: Any) -> Any:
    """Return an engine of DeepSpeed's."""
    start_deepspeed(distributed.get_rank())
    import deepspeed

    config = configuration(args.zero_stage, bf16={"enabled": args.bf16})
    return deepspeed.initialize(model=model, config=config)[0]


def run_ranks(program: str, main: Callable[[Path], None]) -> None:
    """Be torchrun, which starts this program on two ranks; or be one of those, and run it."""
    if "RANK" not in os.environ:
        from torch.distributed.elastic.multiprocessing import subprocess_handler
        from torch.distributed.run import main as torchrun

        if preforked.is_fork():
            subprocess_handler.SubprocessHandler._popen = _fork_rank
        torchrun(["--standalone", "--nproc-per-node=2", program, *sys.argv[1:]])
        return
    # torchrun starts ranks in sessions of their own: they would outlive it, if it were killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    distributed.init_process_group("gloo")
    main(Path(sys.argv[1]))


def _fork_rank(_: Any, command: tuple[str, ...], env: dict[str, str]) -> preforked.Process:
    """Start a rank as torchrun does, without another import of vLLM."""
    arguments = list(command[command.index("-u") + 1 :])
    return preforked.start(arguments, env=env, new_session=True)


def by_rank(seen: Any) -> list[Any]:
    """What each rank saw."""
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, seen)
    return answers
