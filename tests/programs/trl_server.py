"""Program of `test_trl.py`: TRL's trainers over a store, and a vLLM server that follows it.

What the trainer computes of each token is compared with what the server sampled it with: they
differ where the server had other weights.
"""

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

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.errors import OptionError, WaitTimeoutError
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
MAX_DIFFERENCE = 1e-3
"""Of log-probabilities of one token under the same weights, in float32: computed twice."""


def signature_of(function: Callable[..., Any]) -> list[list[str]]:
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

    def run(self) -> None:
        from trl.generation.vllm_client import VLLMClient

        with pytest.raises(OptionError, match="set use_vllm=True, vllm_mode"):
            self.trainer("full", use_vllm=False)
        self.server.wait_ready()
        if is_soak():
            self.train("full", held_back=True)
        self.train_elsewhere()
        self.train("full")
        if is_soak():
            self.train("lora", kill=True)
            for kind in ("zero-3", "zero-2 lora"):
                self.train_on_ranks(kind)
        self.send_asynchronously()
        theirs = "trl.generation.vllm_client"
        assert VLLMClient.init_communicator.__module__ == theirs, "TRL has its own client again"

    def trainer(self, kind: str, *, store: Path | None = None, **options: Any) -> Any:
        from trl import GRPOTrainer

        from dbuffer.integrations.trl import over_store
        from tests.support.trl_parts import LORA, configuration, make_dataset

        self.rewards: list[float] = []
        self.on_step: Callable[[int], None] = lambda _: None
        config = configuration(
            self.directory,
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

    def train(self, kind: str, *, held_back: bool = False, kill: bool = False) -> None:
        """Train as a script of TRL's does; see by tokens and rewards which weights sampled them."""
        from tests.support.trl_parts import ask_fresh_engine, merged, save

        killed: list[int] = []

        def kill_server(step: int) -> None:
            if kill and step == RESTART_AT:
                self.server.kill()
                killed.append(step)
                self.server = self.start()

        before, version = self.answers(), self.newest_version()
        trainer = self.trainer(kind)
        self.on_step = kill_server
        if held_back:
            trainer.vllm_generation.sync_weights = lambda: None
        trainer.train()
        trainer.vllm_generation.sync_weights()
        differences, answers = differences_in(trainer), self.answers()
        if held_back:
            assert max(self.rewards) - self.rewards[0] < 0.1
            assert differences[0] < MAX_DIFFERENCE < min(differences[1:])
            assert answers == before
            trainer.weight_sync.close()
            return
        assert len(differences) == NUM_STEPS
        assert max(differences) < MAX_DIFFERENCE
        assert self.rewards[-1] - self.rewards[0] >= 0.2
        assert bool(killed) == kill, "training goes on with the next server"
        # Versions go on from run to run, and say their step.
        assert trainer.weight_sync.version == version + NUM_STEPS + 1
        trainer.weight_sync.close()
        with dbuffer.WeightReceiver(self.store) as receiver, receiver.open() as snapshot:
            assert snapshot.metadata == {"step": NUM_STEPS}
        last = save(merged(trainer.model), self.directory / f"last-{kind}")
        assert answers == ask_fresh_engine(last) != before

    def newest_version(self) -> int:
        with dbuffer.WeightReceiver(self.store) as receiver:
            return receiver.wait_for_version(timeout_s=0) or 0

    def train_elsewhere(self) -> None:
        trainer = self.trainer("full", store=self.directory / "elsewhere")
        with pytest.raises(WaitTimeoutError, match="0 of 1 receivers applied version 1") as failure:
            trainer.train()
        assert "--middleware dbuffer.integrations.vllm.FollowStore" in str(failure.value)
        trainer.weight_sync.close()

    def train_on_ranks(self, kind: str) -> None:
        directory = self.directory / kind
        directory.mkdir()
        command = [sys.executable, __file__, str(directory), kind, str(self.store), self.server.url]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)

    def send_asynchronously(self) -> None:
        """Let TRL's own code bring new weights to the server, which answers on meanwhile.

        Its trainer cannot be made without a GPU: it asks for the GPU's name, and for a kernel. So
        one that was not initialised has just what the method looks at.
        """
        from accelerate import Accelerator
        from trl.experimental.async_grpo.async_grpo_trainer import (
            AsyncGRPOTrainer,
            WeightTransferProtocol,
        )

        from tests.support.trl_parts import ask_fresh_engine, first_model, save

        calls = ("init_weight_transfer", "pause", "send_weights", "resume", "destroy")
        assert calls == tuple(
            name
            for name, call in vars(WeightTransferProtocol).items()
            if inspect.isfunction(call) and not name.startswith("_")
        )
        for name in calls:
            theirs = signature_of(getattr(WeightTransferProtocol, name))
            assert signature_of(getattr(StoreWeightTransfer, name)) == theirs
        model = first_model(lora=True)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        transfer = StoreWeightTransfer(self.store, timeout_s=300)
        trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
        trainer.accelerator, trainer.model = Accelerator(cpu=True), model
        trainer.weight_transfer, trainer.rollout_worker = transfer, None
        trainer.model_version, trainer._lora_sync = 0, False
        before, num_tensors = self.answers(), 0
        streamed = trainer._streaming_iter

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_tensors
            for pair in streamed():
                assert not self.server.is_paused()
                assert self.answers() == before
                num_tensors += 1
                yield pair

        trainer._streaming_iter = watched
        transfer.init_weight_transfer()
        trainer._sync_weight_merged(0.0)
        assert trainer.model_version == 1
        assert num_tensors == len(list(model.parameters())) > 1
        # First: it acknowledges in its pause, and an answer comes when that is over.
        answers = self.answers()
        assert self.server.version() == str(transfer.version)
        assert answers == ask_fresh_engine(save(model, self.directory / "asynchronous")) != before
        transfer.destroy()

    def answers(self) -> Any:
        from tests.support.trl_parts import ask_server

        return ask_server(self.server.client)


def train_as_rank(directory: Path) -> None:
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

    kind, store, url = sys.argv[2:]
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
        vllm_server_base_url=url,
    )
    trainer: Any = over_store(GRPOTrainer, store, timeout_s=300)(
        model=str(checkpoint),
        reward_funcs=lambda completion_ids, **_: rewards_of(completion_ids),
        args=config,
        train_dataset=make_dataset(),
        peft_config=LORA if has_adapter else None,
    )
    trainer.train()
    trainer.vllm_generation.sync_weights()
    differences = differences_in(trainer)
    assert len(differences) == NUM_RANK_STEPS
    assert max(differences) < MAX_DIFFERENCE
    if kind == "zero-3":
        assert isinstance(trainer.weight_sync.sender, dbuffer.ShardedWeightSender)
        assert any(parameter.numel() == 0 for parameter in trainer.model.parameters())
    assert len(set(by_rank(trainer.weight_sync.version))) == 1
    if distributed.get_rank() == 0:
        leave(directory, None)
    os._exit(0)


def deepspeed_configuration(kind: str) -> dict[str, Any]:
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
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def main(directory: Path) -> None:
    if sys.argv[2] != "server":
        run_ranks(__file__, train_as_rank)
        return
    torch.set_num_threads(1)
    program = Program(directory)
    try:
        program.run()
    except Exception:
        print(f"the server's log: {program.server.log()[-10_000:]}", flush=True)
        raise
    finally:
        program.server.kill()
    leave(directory, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
