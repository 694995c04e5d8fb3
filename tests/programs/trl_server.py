"""Program of `test_trl.py`: TRL's trainers over a store, and a vLLM server that follows it.

What the trainer computes of each token is compared with what the server sampled it with: they
differ where the server had other weights.
"""

from __future__ import annotations

import copy
import inspect
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import distributed
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

import dbuffer
from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.integrations.trl import StoreWeightTransfer, over_store
from tests.support.engines.tiny_models import SHAPE, save_tokenizer
from tests.support.engines.vllm_engines import TIMEOUT_S, greedy_answers, judge, start_llm
from tests.support.engines.vllm_servers import BACKEND_FLAGS, Server, question
from tests.support.lightrft_parts import by_rank, run_ranks
from tests.support.ports import free_port
from tests.support.soak import is_soak
from tests.support.zero3 import compile_nothing
from tests.support.zero3 import configuration as configuration_of_deepspeed

NUM_STEPS = 12
"""After eight the reward had once gained 0.18, and not 0.2: one step's is a matter of luck."""
RESTART_AT = 3
KINDS = ["full", "lora"]
NUM_RANK_STEPS = 3
MAX_DIFFERENCE = 1e-3
"""Of log-probabilities of one token under the same weights, in float32: computed twice."""
VOCABULARY, ANSWER_TOKENS, GROUP_SIZE = SHAPE["vocab_size"], 16, 8
LORA = LoraConfig(r=16, lora_alpha=64, target_modules="all-linear")

_generator = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=_generator).tolist()
    for length in (4, 7, 12, 20, 31, 33, 48, 70)  # below and above vLLM's cache block
]
DATASET = Dataset.from_dict(
    {"prompt": [" ".join(f"word{token}" for token in prompt) for prompt in PROMPTS]}
)
"""The prompts as text, of which the tokenizer makes the same tokens."""
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0


def rewards_of(answers: list[list[int]]) -> list[float]:
    """Return the share of each answer's tokens that are in a secret set, a quarter of all."""
    return IS_REWARDED[torch.tensor(answers)].mean(dim=1).tolist()


def configuration(directory: Path, **options: Any) -> GRPOConfig:
    """Return a configuration with a server, and all prompts in a batch."""
    chosen: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "output_dir": str(directory / "trainer"),
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": GROUP_SIZE * len(PROMPTS),
        "num_generations": GROUP_SIZE,
        "max_completion_length": ANSWER_TOKENS,
        "generation_kwargs": {"ignore_eos": True},
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    return GRPOConfig(**chosen | options)


def first_model(*, lora: bool) -> Any:
    """Return the model that is trained, or that the adapter is trained on."""
    torch.manual_seed(0)
    shape = SHAPE | {"initializer_range": 0.02}
    # The smallest head that vLLM's CPU attention takes.
    config = Qwen3Config(**shape, num_attention_heads=4, head_dim=32, tie_word_embeddings=False)
    model: Any = Qwen3ForCausalLM(config)
    if lora:  # TRL trains no adapter of the head, and the others reach the tokens only through it
        with torch.no_grad():
            model.lm_head.weight.mul_(10)
    return model


def save(model: Any, directory: Path) -> Path:
    """Save a checkpoint with a tokenizer, which TRL and its engine ask for."""
    save_tokenizer(directory)
    model.save_pretrained(directory)
    return directory


def answers_afresh(model: Any, directory: Path) -> list[list[int]]:
    """Return the answers of an engine that is started with a model."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return greedy_answers(start_llm(save(model, directory), how="none"), prompts, ANSWER_TOKENS)


def signature_of(function: Callable[..., Any]) -> list[list[str]]:
    parameters = inspect.signature(function).parameters.values()
    return [[parameter.name, str(parameter.kind)] for parameter in parameters]


class Program:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "store"
        self.checkpoints = {
            kind: save(first_model(lora=kind == "lora"), directory / f"first-{kind}")
            for kind in KINDS
        }
        self.port = free_port()
        self.server = self.start()

    def start(self) -> Server:
        return Server(
            self.checkpoints["full"],
            self.directory,
            *BACKEND_FLAGS,
            *("--logprobs-mode", "processed_logprobs", "--max-num-seqs", "64"),
            port=self.port,
            development=True,
            store=self.store,
        )

    def run(self) -> None:
        with pytest.raises(OptionError, match="set use_vllm=True, vllm_mode"):
            self.trainer("full", use_vllm=False)
        self.server.wait_ready()
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
            train_dataset=DATASET,
            peft_config=LORA if kind == "lora" else None,
        )

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = rewards_of(completion_ids)
        self.rewards.append(statistics.fmean(rewards))
        self.on_step(len(self.rewards))
        return rewards

    def train(self, kind: str, *, kill: bool = False) -> None:
        """Train as a script of TRL's does; see by tokens and rewards which weights sampled them."""
        killed: list[int] = []

        def kill_server(step: int) -> None:
            if kill and step == RESTART_AT:
                self.server.kill()
                killed.append(step)
                self.server = self.start()

        before, version = self.answers(), self.newest_version()
        trainer = self.trainer(kind)
        self.on_step = kill_server
        trainer.train()
        trainer.vllm_generation.sync_weights()
        differences, answers = differences_in(trainer), self.answers()
        assert len(differences) == NUM_STEPS
        assert max(differences) < MAX_DIFFERENCE
        assert self.rewards[-1] - self.rewards[0] >= 0.2
        assert bool(killed) == kill, "training goes on with the next server"
        # Versions go on from run to run, and say their step.
        assert trainer.weight_sync.version == version + NUM_STEPS + 1
        trainer.weight_sync.close()
        with dbuffer.WeightReceiver(self.store) as receiver, receiver.open() as snapshot:
            assert snapshot.metadata == {"step": NUM_STEPS}
        model = copy.deepcopy(trainer.model)
        model = model.merge_and_unload() if kind == "lora" else model
        assert answers == answers_afresh(model, self.directory / f"last-{kind}") != before

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
        assert answers == answers_afresh(model, self.directory / "asynchronous") != before
        transfer.destroy()

    def answers(self) -> list[list[int]]:
        asked = question(1) | {"prompt": PROMPTS, "max_tokens": ANSWER_TOKENS}
        response = self.server.client.post("/v1/completions", json=asked).raise_for_status()
        return [choice["token_ids"] for choice in response.json()["choices"]]


def train_as_rank(directory: Path) -> None:
    kind, store, url = sys.argv[2:]
    torch.set_num_threads(1)
    compile_nothing()
    has_adapter = kind.endswith("lora")
    checkpoint = directory / "first"
    if distributed.get_rank() == 0:
        save(first_model(lora=has_adapter), checkpoint)
    distributed.barrier()
    config = configuration(
        directory,
        per_device_train_batch_size=32,
        max_steps=NUM_RANK_STEPS,
        deepspeed=configuration_of_deepspeed(
            int(kind[5]),
            train_micro_batch_size_per_gpu="auto",
            gradient_accumulation_steps="auto",
        ),
        vllm_server_base_url=url,
    )
    trainer: Any = over_store(GRPOTrainer, store, timeout_s=300)(
        model=str(checkpoint),
        reward_funcs=lambda completion_ids, **_: rewards_of(completion_ids),
        args=config,
        train_dataset=DATASET,
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
    distributed.barrier()
    os._exit(0)


def differences_in(trainer: Any) -> list[float]:
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(directory: Path, role: str, *_: str) -> None:
    if role != "server":
        run_ranks(__file__, train_as_rank)
        return
    torch.set_num_threads(1)
    program = Program(directory)
    try:
        program.run()
    finally:
        program.server.kill()


if __name__ == "__main__":
    judge(run)
