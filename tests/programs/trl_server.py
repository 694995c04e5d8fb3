"""TRL's trainers over a store, and a vLLM server that follows it."""

from __future__ import annotations

import inspect
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import dbuffer
from dbuffer.integrations.trl import StoreWeightTransfer
from tests.support.engines.vllm_engines import TIMEOUT_S, leave
from tests.support.engines.vllm_servers import BACKEND_FLAGS, Server
from tests.support.lightrft_parts import by_rank, run_ranks
from tests.support.ports import free_port
from tests.support.soak import is_soak

NUM_STEPS = 12
"""After eight the reward had once gained 0.18, and not 0.2: one step's is a matter of luck."""
RESTART_AT = 3
KINDS = ["full", "lora"]
NUM_RANK_STEPS = 3


def signature_of(function: Callable[..., Any]) -> list[list[str]]:
    """What may be passed to it, and how."""
    parameters = inspect.signature(function).parameters.values()
    return [[parameter.name, str(parameter.kind)] for parameter in parameters]


class Program:
    def __init__(self, directory: Path) -> None:
        from tests.support.trl_parts import first_model, save

        self.directory = directory
        self.store = directory / "store"
        self.checkpoints = {
            kind: save(first_model(lora=kind == "lora"), directory / f"first-{kind}")
            for kind in KINDS
        }
        self.port = free_port()
        self.server = self.start()

    def start(self) -> Server:
        """The same command each time."""
        settings = {"dbuffer": {"store": str(self.store)}}
        number = len(list(self.directory.glob("server-*.log")))
        return Server(
            self.checkpoints["full"],
            self.directory / f"server-{number}.log",
            *BACKEND_FLAGS,
            *("--additional-config", json.dumps(settings)),
            *("--middleware", "dbuffer.integrations.vllm.FollowStore"),
            *("--logprobs-mode", "processed_logprobs", "--max-num-seqs", "64"),
            port=self.port,
            development=True,
        )

    def observe(self) -> dict[str, Any]:
        from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
        from trl.generation import vllm_generation

        seen: dict[str, Any] = {
            "protocol": {
                name: signature_of(call)
                for name, call in vars(WeightTransferProtocol).items()
                if inspect.isfunction(call) and not name.startswith("_")
            },
            "without vLLM": self.error_of(lambda: self.trainer("full", use_vllm=False)),
        }
        self.server.wait_ready()
        if is_soak():
            seen["held back"] = self.train("full", held_back=True)
        seen["not followed"] = self.error_of(self.train_elsewhere)
        seen["full"] = self.train("full")
        if is_soak():
            seen["lora"] = self.train("lora", kill=True)
            for kind in ("zero-3", "zero-2 lora"):
                seen[kind] = self.train_on_ranks(kind)
        seen["asynchronous"] = self.send_asynchronously()
        seen["client"] = vllm_generation.VLLMClient.__module__
        return seen

    def trainer(self, kind: str, *, store: Path | None = None, **options: Any) -> Any:
        from trl import GRPOTrainer

        from dbuffer.integrations.trl import over_store
        from tests.support.trl_parts import LORA, configuration, make_dataset

        self.rewards: list[float] = []
        self.on_step: Callable[[int], None] = lambda _: None
        config = configuration(
            self.directory,
            vllm_mode="server",
            vllm_server_base_url=self.server.url,
            max_steps=NUM_STEPS,
            **options,
        )
        timeout_s = 300.0 if store is None else 0.5
        more: dict[str, Any] = {"checksum": True, "reader_timeout_s": 30.0}
        return over_store(GRPOTrainer, store or self.store, timeout_s=timeout_s, **more)(
            model=str(self.checkpoints[kind]),
            reward_funcs=self.reward,
            args=config,
            train_dataset=make_dataset(),
            peft_config=LORA if kind == "lora" else None,
        )

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        from tests.support.trl_parts import rewards_of

        rewards = rewards_of(completion_ids)
        self.rewards.append(statistics.fmean(rewards))
        self.on_step(len(self.rewards))
        return rewards

    def train(self, kind: str, *, held_back: bool = False, kill: bool = False) -> dict[str, Any]:
        """A whole run, as a script of TRL's has it."""
        from tests.support.trl_parts import ask_fresh_engine, merged, save

        killed: list[int] = []

        def kill_server(step: int) -> None:
            if kill and step == RESTART_AT:
                self.server.kill()
                killed.append(step)
                self.server = self.start()

        before = self.answers()
        trainer = self.trainer(kind)
        self.on_step = kill_server
        if held_back:
            trainer.vllm_generation.sync_weights = lambda: None
        trainer.train()
        trainer.vllm_generation.sync_weights()
        seen = {
            "rewards": self.rewards,
            "differences": differences_in(trainer),
            "was killed": bool(killed),
            "answers before": before,
            "answers": self.answers(),
            "version": trainer.weight_sync.version,
        }
        trainer.weight_sync.close()
        if not held_back:
            last = save(merged(trainer.model), self.directory / f"last-{kind}")
            seen |= {"expected": ask_fresh_engine(last), **self.newest()}
        return seen

    def newest(self) -> dict[str, Any]:
        """Of the version that is in the store."""
        with dbuffer.WeightReceiver(self.store) as receiver, receiver.open() as snapshot:
            return {"metadata": snapshot.metadata, "has checksums": snapshot.has_checksums}

    def train_elsewhere(self) -> None:
        """In a store that no server follows."""
        trainer = self.trainer("full", store=self.directory / "elsewhere")
        try:
            trainer.train()
        finally:
            trainer.weight_sync.close()

    def train_on_ranks(self, kind: str) -> Any:
        directory = self.directory / kind
        directory.mkdir()
        command = [sys.executable, __file__, str(directory), kind, str(self.store), self.server.url]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        return json.loads((directory / "observed.json").read_text())

    def send_asynchronously(self) -> dict[str, Any]:
        """Let TRL's own code bring new weights to the server.

        Its trainer cannot be made without a GPU: it asks for the GPU's name, and for a kernel. So
        one that was not initialised has just what the method looks at.
        """
        from accelerate import Accelerator
        from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

        from tests.support.trl_parts import ask_fresh_engine, first_model, save

        model = first_model(lora=True)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        transfer = StoreWeightTransfer(self.store, timeout_s=300)
        trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
        trainer.accelerator, trainer.model = Accelerator(cpu=True), model
        trainer.weight_transfer, trainer.rollout_worker = transfer, None
        trainer.model_version, trainer._lora_sync = 0, False
        paused, meanwhile = [], []
        streamed = trainer._streaming_iter

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in streamed():
                paused.append(self.server.is_paused())
                meanwhile.append(self.answers())
                yield pair

        trainer._streaming_iter = watched
        before = self.answers()
        transfer.init_weight_transfer()
        trainer._sync_weight_merged(0.0)
        seen = {
            "counted": trainer.model_version,
            "version": transfer.version,
            # First: it acknowledges in its pause, and an answer comes when that is over.
            "answers": self.answers(),
            "serves": self.server.version(),
            "answers before": before,
            "expected": ask_fresh_engine(save(model, self.directory / "asynchronous")),
            "paused": paused,
            "meanwhile": meanwhile,
            "tensors": len(list(model.parameters())),
        }
        transfer.destroy()
        return seen

    def answers(self) -> Any:
        """The server's, greedy."""
        from tests.support.trl_parts import ask_server

        return ask_server(self.server.client)

    def error_of(self, action: Callable[[], Any]) -> list[str]:
        try:
            action()
        except dbuffer.DBufferError as error:
            return [type(error).__name__, str(error)]
        return []


def train_as_rank(directory: Path) -> None:
    """One rank of a trainer that torchrun started; the first leaves what all of them saw."""
    from trl import GRPOTrainer

    from dbuffer.integrations.trl import over_store
    from tests.support.trl_parts import (
        LORA,
        configuration,
        first_model,
        make_dataset,
        rewards_of,
        save,
    )

    kind, *server = sys.argv[2:]
    torch.set_num_threads(1)
    has_adapter = kind.endswith("lora")
    checkpoint = directory / "first"
    if distributed.get_rank() == 0:
        save(first_model(lora=has_adapter), checkpoint)
    distributed.barrier()
    config = configuration(
        directory,
        per_device_train_batch_size=32,
        max_steps=NUM_RANK_STEPS,
        deepspeed=deepspeed_configuration(kind),
        **({"vllm_mode": "server", "vllm_server_base_url": server[1]} if server else {}),
    )
    store = server[0] if server else directory / "store"
    trainer: Any = over_store(GRPOTrainer, store, timeout_s=300)(
        model=str(checkpoint),
        reward_funcs=lambda completion_ids, **_: rewards_of(completion_ids),
        args=config,
        train_dataset=make_dataset(),
        peft_config=LORA if has_adapter else None,
    )
    trainer.train()
    trainer.vllm_generation.sync_weights()
    seen = by_rank(
        {
            "sender": type(trainer.weight_sync.sender).__name__,
            "version": trainer.weight_sync.version,
            "partitioned": sum(p.numel() == 0 for p in trainer.model.parameters()),
            "differences": differences_in(trainer),
        }
    )
    if distributed.get_rank() == 0:
        leave(directory, seen)
    os._exit(0)


def deepspeed_configuration(kind: str) -> dict[str, Any] | None:
    """For a kind such as "zero-3 lora"."""
    if not kind.startswith("zero-"):
        return None
    import deepspeed

    # It would compile a way of its own to add up over shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        # The latter so that it really partitions parameters as small as these.
        "zero_optimization": {"stage": int(kind[5]), "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }


def differences_in(trainer: Any) -> list[float]:
    """The largest of each step: of log-probabilities that trainer and sampler have of a token."""
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def main(directory: Path) -> None:
    if sys.argv[2] != "server":
        run_ranks(__file__, train_as_rank)
        return
    torch.set_num_threads(1)
    program = Program(directory)
    try:
        seen = program.observe()
    except Exception:
        print(f"the server's log: {program.server.log()[-10_000:]}", flush=True)
        raise
    finally:
        program.server.kill()
    leave(directory, seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
