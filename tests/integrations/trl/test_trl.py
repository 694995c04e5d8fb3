"""TRL's trainers over a store: real ones, on a real vLLM server that follows by itself.

One program trains a whole model, and lets TRL's asynchronous trainer's code send; in soaks also
with the weights held back, an adapter, in whose training the server is killed and started again,
and a sharded model, on two ranks of torchrun. What the trainer computes of each token is compared
with what the server sampled it with: they differ where the server had other weights. The tests
judge what the program saw. (One engine in the trainer's process: ``test_examples``.)
"""

from __future__ import annotations

import importlib.util
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
from dbuffer.errors import NotReadyError, OptionError, WaitTimeoutError
from dbuffer.integrations.trl import StoreWeightTransfer
from tests.support.children import free_port
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, leave, observe
from tests.support.engines.vllm_servers import BACKEND_FLAGS, Server
from tests.support.lightrft_parts import by_rank, run_ranks
from tests.support.soak import IN_SOAKS_ALONE, in_soaks_alone, is_soak

NEEDS_TRL = [
    *NEEDS_VLLM,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]

NUM_STEPS = 12
"""After eight the reward had once gained 0.18, and not 0.2: one step's is a matter of luck."""
RESTART_AT = 3
MAX_DIFFERENCE = 1e-3
"""Of log-probabilities of one token under the same weights, in float32: computed twice."""
MAX_DIFFERENCE_BF16 = 0.2
KINDS = ["full", "lora"]
EACH_KIND = pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=IN_SOAKS_ALONE)])
NUM_RANK_STEPS = 3


def run(role: str, directory: Path) -> Any:
    more = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    # Only the server has processes of its own.
    env = environment(processes=False, **more)
    return observe(__file__, directory, role, env=env)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("server", tmp_path_factory.mktemp("trl"))


class TestSynchronous:
    pytestmark = NEEDS_TRL

    @EACH_KIND
    def test_every_token_is_sampled_with_the_weights_that_are_trained(
        self, observed: Any, kind: str
    ) -> None:
        differences = observed[kind]["differences"]
        assert len(differences) == NUM_STEPS
        assert max(differences) < MAX_DIFFERENCE

    @EACH_KIND
    def test_the_reward_climbs(self, observed: Any, kind: str) -> None:
        first, *_, last = observed[kind]["rewards"]
        assert last - first >= 0.2

    @EACH_KIND
    def test_the_server_ends_as_a_fresh_engine_begins(self, observed: Any, kind: str) -> None:
        seen = observed[kind]
        assert seen["answers"] == seen["expected"]
        assert seen["answers"] != seen["answers before"]

    @EACH_KIND
    def test_versions_go_on_from_run_to_run_and_say_their_step(
        self, observed: Any, kind: str
    ) -> None:
        first = 1 if kind == "full" else NUM_STEPS + 2
        assert observed[kind]["version"] == first + NUM_STEPS
        assert observed[kind]["metadata"] == {"step": NUM_STEPS}

    @in_soaks_alone
    def test_weights_that_are_held_back_are_seen(self, observed: Any) -> None:
        seen = observed["held back"]
        assert max(seen["rewards"]) - seen["rewards"][0] < 0.1
        assert seen["differences"][0] < MAX_DIFFERENCE < min(seen["differences"][1:])
        assert seen["answers"] == seen["answers before"]

    @in_soaks_alone
    def test_training_goes_on_when_the_server_was_killed_and_started_again(
        self, observed: Any
    ) -> None:
        assert observed["lora"]["was killed"]
        assert not observed["full"]["was killed"]

    def test_a_server_that_does_not_follow_is_an_error_that_says_so(self, observed: Any) -> None:
        kind, text = observed["not followed"]
        assert kind == "WaitTimeoutError"
        assert "0 of 1 receivers applied version 1" in text
        assert "--middleware dbuffer.integrations.vllm.FollowStore" in text

    def test_a_trainer_without_vllm_is_refused(self, observed: Any) -> None:
        kind, text = observed["without vLLM"]
        assert kind == "OptionError"
        assert "set use_vllm=True" in text

    def test_trl_has_its_own_client_again(self, observed: Any) -> None:
        assert observed["client"] == "trl.generation.vllm_client"


class TestRanks:
    pytestmark = NEEDS_TRL

    @in_soaks_alone
    def test_each_rank_publishes_its_part_to_the_server(self, observed: Any) -> None:
        for seen in observed["zero-3"]:
            assert seen["sender"] == "ShardedWeightSender"
            assert seen["partitioned"] > 0
            assert len(seen["differences"]) == NUM_RANK_STEPS
            assert max(seen["differences"]) < MAX_DIFFERENCE
        assert len({seen["version"] for seen in observed["zero-3"]}) == 1

    @in_soaks_alone
    def test_adapters_of_ranks_that_hold_all_are_merged(self, observed: Any) -> None:
        for seen in observed["zero-2 lora"]:
            assert len(seen["differences"]) == NUM_RANK_STEPS
            assert max(seen["differences"]) < MAX_DIFFERENCE

    @in_soaks_alone
    @pytest.mark.parametrize("kind", ["colocate", "colocate lora"])
    def test_each_rank_switches_the_engine_in_its_process(self, tmp_path: Path, kind: str) -> None:
        for seen in run(kind, tmp_path):
            assert seen["version"] == NUM_RANK_STEPS + 1
            assert len(seen["differences"]) == NUM_RANK_STEPS
            assert max(seen["differences"]) < MAX_DIFFERENCE_BF16


class TestAsynchronous:
    pytestmark = NEEDS_TRL

    def test_it_has_the_calls_of_trls_protocol(self, observed: Any) -> None:
        wanted = observed["protocol"]
        assert set(wanted) == {
            "init_weight_transfer",
            "pause",
            "send_weights",
            "resume",
            "destroy",
        }
        ours = {name: signature_of(getattr(StoreWeightTransfer, name)) for name in wanted}
        assert ours == wanted

    def test_the_server_has_a_version_when_trl_counts_it(self, observed: Any) -> None:
        seen = observed["asynchronous"]
        assert seen["counted"] == 1
        assert seen["serves"] == str(seen["version"])
        assert seen["answers"] == seen["expected"] != seen["answers before"]

    def test_the_server_answers_on_while_weights_are_published(self, observed: Any) -> None:
        seen = observed["asynchronous"]
        assert len(seen["paused"]) == seen["tensors"] > 1
        assert not any(seen["paused"])
        assert all(answers == seen["answers before"] for answers in seen["meanwhile"])


# What needs neither TRL nor an engine.


def pairs(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((3,), float(version))
    yield "b", torch.full((2, 2), float(version))


def test_pairs_are_published_and_waited_for(store: Path) -> None:
    transfer = StoreWeightTransfer(store, timeout_s=0.01)
    assert not store.exists()  # a rank that publishes nothing makes no store
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(pairs(1))
    with pytest.raises(WaitTimeoutError, match="0 of 1 receivers"):
        transfer.resume()
    target = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    with dbuffer.WeightReceiver(store) as receiver:
        assert receiver.load_into(target) == transfer.version == 1
        transfer.resume()
    assert target["a"].unique().tolist() == [1.0]
    transfer.destroy()
    transfer.destroy()


def test_a_second_run_goes_on_in_the_same_store(store: Path) -> None:
    transfer = StoreWeightTransfer(store, receivers=0, dtype=torch.bfloat16)
    for run in (1, 2):
        transfer.init_weight_transfer()
        transfer.resume()  # TRL may have had nothing to send
        transfer.send_weights(pairs(run))
        transfer.resume()
        assert transfer.version == run
        transfer.destroy()
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert snapshot.tensors["a"].dtype == torch.bfloat16


def test_weights_before_the_store_is_open_are_refused(store: Path) -> None:
    transfer = StoreWeightTransfer(store)
    with pytest.raises(NotReadyError, match=r"call init_weight_transfer\(\) first"):
        transfer.send_weights(pairs(1))
    with pytest.raises(NotReadyError):
        transfer.resume()
    transfer.destroy()


@pytest.mark.parametrize(
    "options", [{"receivers": -1}, {"receivers": 1.5}, {"timeout_s": 0}, {"store": 3}]
)
def test_invalid_options_are_refused(store: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        StoreWeightTransfer(**{"store": store, **options})
    assert not store.exists()


def signature_of(function: Callable[..., Any]) -> list[list[str]]:
    """What may be passed to it, and how."""
    parameters = inspect.signature(function).parameters.values()
    return [[parameter.name, str(parameter.kind)] for parameter in parameters]


# From here on, the program.


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
        return over_store(GRPOTrainer, store or self.store, timeout_s=timeout_s)(
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
            seen |= {"expected": ask_fresh_engine(last), "metadata": self.metadata()}
        return seen

    def metadata(self) -> Any:
        """Of the version that is in the store."""
        with dbuffer.WeightReceiver(self.store) as receiver:
            with receiver.open() as snapshot:
                return snapshot.metadata

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
