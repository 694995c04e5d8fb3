"""LightRFT's trainers and a vLLM engine on two ranks, started by torchrun.

The engine is in the trainer's processes, as LightRFT has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import dbuffer
from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines import tiny_models
from tests.support.engines.vllm_engines import NUM_TOKENS, PROMPTS, engine_arguments, greedy
from tests.support.lightrft_parts import TRAINERS, Trainer, by_rank, run_ranks
from tests.support.stores import receiver_records
from tests.support.waiting import error_of

AFTER_TENSORS = 3
"""A rank fails here: parts of a layer's fused tensors have gone in, and others have not."""
LOAD_ERROR = "the disk of this rank is on fire"
WRITE_ERROR = "it went up in smoke"
FAMILY = "tied-qwen2"
"""One tensor is its embedding and its head; without that tie, `lightrft_engines` has one."""
SEEDS = (0, 1)
FAILURES = {
    "write on rank 0": "RankFailedError",
    "load on rank 0": "EngineUpdateError",
    "load on rank 1": "EngineUpdateError",
    "asleep": "EngineBusyError",
}
"""What fails, and the error that all ranks raise."""


class Program:
    """One rank: its part of the engine, and of one trainer after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rank = distributed.get_rank()
        self._engines: list[Any] = []
        if self.rank == 0:
            make_model(SEEDS[0]).save_pretrained(directory / "initial")
        distributed.barrier()
        self.llm = self.start_engine(directory / "initial")

    def start_engine(self, checkpoint: Path, how: str = "none") -> Any:
        import vllm

        launched = {"distributed_executor_backend": "external_launcher", "seed": 0}
        llm = vllm.LLM(**engine_arguments(checkpoint, tp=2, how=how), **launched)
        self._engines.append(llm)  # the first that goes takes torch.distributed with it
        return llm

    def observe_trainer(self, kind: str, seed: int) -> dict[str, Any]:
        trainer = Trainer(kind, make_model(seed))
        trainer.step()
        seen: dict[str, Any] = {"before": greedy(self.llm)}
        store = self.directory / f"store-{kind}"
        with BroadcastManager(
            trainer.actor, trainer.strategy, self.llm, store=store, delta=True
        ) as manager:
            manager.broadcast_to_engine()
            seen["deltas"] = [len(list(manager.store.glob("deltas/*")))]
            distributed.barrier()
            manager.broadcast_to_engine()
            seen["deltas"].append(len(list(manager.store.glob("deltas/*"))))
            seen["after"] = greedy(self.llm)
            seen["dtypes"] = dtypes_in(manager.store)
            distributed.barrier()
        distributed.barrier()
        return seen | {"expected": answers_with(trainer.whole_weights())}

    def observe_failures(self) -> dict[str, Any]:
        """Two sets of weights in turn, of which it is known what an engine answers with them."""
        trainer = Trainer("zero-1", make_model(SEEDS[1]))
        expected = [answers_of(make_model(seed)) for seed in SEEDS]
        seen = {}
        with BroadcastManager(trainer.actor, trainer.strategy, self.llm) as manager:
            manager.broadcast_to_engine()
            for turn, failure in enumerate(FAILURES):
                trainer.module.load_state_dict(make_model(SEEDS[turn % 2]).state_dict())
                seen[failure] = self.observe_failure(manager, failure)
                seen[failure]["expected"] = expected[turn % 2]
            distributed.barrier()
        return seen

    def observe_failure(self, manager: BroadcastManager, failure: str) -> dict[str, Any]:
        seen: dict[str, Any] = {"before": greedy(self.llm)}
        with self.fault(failure):
            seen["error"] = error_of(manager.broadcast_to_engine)
        seen["after"] = greedy(self.llm)
        manager.broadcast_to_engine()
        return seen | {"next": greedy(self.llm)}

    def observe_two_managers(self) -> dict[str, Any]:
        """A second one for an engine that has one."""
        trainer = Trainer("zero-1", make_model(SEEDS[0]))
        first = BroadcastManager(trainer.actor, trainer.strategy, self.llm)
        other = self.directory / "store-second"
        with BroadcastManager(trainer.actor, trainer.strategy, self.llm, store=other) as second:
            started = time.monotonic()
            error = error_of(first.broadcast_to_engine)
            error_s = time.monotonic() - started
            second.broadcast_to_engine()
            after = greedy(self.llm)
            distributed.barrier()
        first.close()
        seen = {"error": error, "error_s": error_s, "first store": str(first.store)}
        return seen | {"after": after, "expected": answers_of(make_model(SEEDS[0]))}

    def observe_without_follower(self) -> dict[str, Any]:
        """Workers that are told by vLLM's own calls, once on each rank."""
        store = self.directory / "store"
        llm = self.start_engine(self.directory / "initial", how="backend")

        def update() -> None:
            llm.start_weight_update()
            llm.update_weights({"update_info": {}})
            llm.finish_weight_update()

        trainer = Trainer("zero-1", make_model(SEEDS[0]))
        with dbuffer.ShardedWeightSender(store) as sender:
            sender.send(trainer.module)
            llm.init_weight_transfer_engine({"init_info": {"store": str(store)}})
            with failing_load(llm, enabled=self.rank == 0):
                error = error_of(update)
            update()
            llm.reset_prefix_cache()
            after = greedy(llm)
            receivers = sorted(receiver_records(store))
            distributed.barrier()
        found = {"receivers": receivers, "engine": receivers[0]}
        return found | {
            "error": error,
            "after": after,
            "expected": answers_of(make_model(SEEDS[0])),
        }

    def observe_lost_rank(self) -> dict[str, Any]:
        """One rank ends in its load, while the other waits to hear how that went."""
        trainer = Trainer("zero-1", make_model(SEEDS[1]))
        manager = BroadcastManager(trainer.actor, trainer.strategy, self.llm)
        if self.rank == 1:
            # Not with an error: torchrun would end the other rank at once.
            watch_model(self.llm, lambda handed_over: os._exit(0))
        started = time.monotonic()
        error = error_of(manager.broadcast_to_engine)
        manager.close()
        return {"error": error, "error_s": time.monotonic() - started}

    @contextmanager
    def fault(self, failure: str) -> Iterator[None]:
        """Let a broadcast fail, in this rank or in both."""
        what, _, rank = failure.partition(" on rank ")
        if what == "asleep":
            self.llm.sleep()
            yield
            self.llm.wake_up()
        elif what == "load":
            with failing_load(self.llm, enabled=int(rank) == self.rank):
                yield
        else:
            with failing_write(enabled=int(rank) == self.rank):
                yield


@contextmanager
def failing_write(*, enabled: bool) -> Iterator[None]:
    write = dbuffer.publish.shard_writer.SharedFileWriter.write

    def fail(*_: Any) -> None:
        raise OSError(WRITE_ERROR)

    if enabled:
        dbuffer.publish.shard_writer.SharedFileWriter.write = fail
    yield
    dbuffer.publish.shard_writer.SharedFileWriter.write = write


@contextmanager
def failing_load(llm: Any, *, enabled: bool) -> Iterator[None]:
    """The next load fails in this rank, when a part of it has gone in; so do copies alone."""
    from dbuffer.integrations.engine.plan.prepared_switch import PreparedSwitch

    left = int(enabled)
    apply: Any = PreparedSwitch.apply

    def fail() -> None:
        nonlocal left
        left -= 1
        raise RuntimeError(LOAD_ERROR)

    def fail_to_reload(handed_over: int) -> None:
        if left and handed_over == AFTER_TENSORS:
            fail()

    def fail_to_copy(switch: PreparedSwitch, *how: Any) -> None:
        if left:
            for target, source in next(iter(switch.copies.values())):
                target.copy_(source)
            fail()
        apply(switch, *how)

    watch_model(llm, fail_to_reload)
    PreparedSwitch.apply = fail_to_copy
    yield
    PreparedSwitch.apply = apply
    assert not left


def watch_model(llm: Any, watch: Callable[[int], None]) -> None:
    from tests.support.engines.faulty_worker import watch_loads

    watch_loads(llm.llm_engine.model_executor.driver_worker.worker.get_model(), watch)


def shared_memory_name(directory: Path) -> str:
    return "dbuffer-test-" + hashlib.sha256(bytes(directory)).hexdigest()[:16]


def keep_apart(directory: Path) -> None:
    """Let vLLM's CPU build name its shared memory after this run.

    Where torchrun started the ranks, it has the same name in all jobs of a machine, and an engine
    does not start if it finds that of one that was killed.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    manager = cpu_communicator._CPUSHMDistributed
    name_of = manager.make_group_name
    ours = shared_memory_name(directory)
    manager.make_group_name = staticmethod(lambda group: ours + name_of(group).lstrip("/"))


def make_model(seed: int) -> Any:
    return tiny_models.make_model(FAMILY, seed)


def answers_with(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the answers of transformers with these weights, in the engine's dtype."""
    model = make_model(0)
    model.load_state_dict(weights, strict=False)  # without the tied head
    return answers_of(model)


def answers_of(model: Any) -> list[list[int]]:
    return tiny_models.transformers_greedy(model, PROMPTS, NUM_TOKENS)


def dtypes_in(store: Path) -> list[str]:
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        return sorted({str(tensor.dtype) for tensor in snapshot.tensors.values()})


def main(directory: Path) -> None:
    keep_apart(directory)
    program = Program(directory)
    trainers = {
        kind: by_rank(program.observe_trainer(kind, seed))
        for seed, kind in enumerate(TRAINERS, start=10)
    }
    failures = by_rank(program.observe_failures())
    seen = {
        "trainers": trainers,
        "failures": {name: [of_rank[name] for of_rank in failures] for name in FAILURES},
        "two managers": by_rank(program.observe_two_managers()),
        "without a follower": by_rank(program.observe_without_follower()),
    }
    seen["rank lost"] = program.observe_lost_rank()
    (directory / "observed.json").write_text(json.dumps(seen))
    # A process group of which a rank is gone does not end well.
    os._exit(0)


if __name__ == "__main__":
    run_ranks(__file__, main)
