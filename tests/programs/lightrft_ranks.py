"""Program of `test_lightrft.py`: LightRFT's trainers and a vLLM engine on two ranks of torchrun.

The engine is in the trainer's processes, as LightRFT has it. Each rank asserts what it sees.
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

import pytest
from torch import distributed

import dbuffer
from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines import tiny_models
from tests.support.engines.in_workers import watch_loads
from tests.support.engines.vllm_engines import NUM_TOKENS, PROMPTS, engine_arguments, greedy
from tests.support.lightrft_parts import TRAINERS, Trainer, by_rank, expected_dtype, run_ranks
from tests.support.soak import is_soak
from tests.support.stores import SHARED_MEMORY, receiver_records
from tests.support.waiting import error_of

AFTER_TENSORS = 3
"""A rank fails here: parts of a layer's fused tensors have gone in, and others have not."""
LOAD_ERROR = "the disk of this rank is on fire"
WRITE_ERROR = "it went up in smoke"
FAMILY = "tied-qwen2"
SEEDS = (0, 1)
FAILURES: dict[str, tuple[type[dbuffer.DBufferError], str]] = {
    "write on rank 0": (dbuffer.RankFailedError, WRITE_ERROR),
    "load on rank 0": (dbuffer.EngineUpdateError, f"rank 0: RuntimeError: {LOAD_ERROR}"),
    "load on rank 1": (dbuffer.EngineUpdateError, f"rank 1: RuntimeError: {LOAD_ERROR}"),
    "asleep": (dbuffer.EngineBusyError, "wake the engine up"),
}
SOON_S = 60


class Program:
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

    def train(self, kind: str, seed: int) -> None:
        """The engine answers as transformers with the trainer's weights.

        Also where tensors are gathered, and where they are cast.
        """
        trainer = Trainer(kind, make_model(seed))
        trainer.step()
        before = greedy(self.llm)
        store = self.directory / f"store-{kind}"
        with BroadcastManager(
            trainer.actor, trainer.strategy, self.llm, store=store, delta=True
        ) as manager:
            for num_deltas in (0, 1):
                manager.broadcast_to_engine()
                assert len(list(store.glob("deltas/*"))) == num_deltas
                distributed.barrier()
            after = greedy(self.llm)
            with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
                dtypes = {tensor.dtype for tensor in snapshot.tensors.values()}
            assert dtypes == {expected_dtype(kind)}
            distributed.barrier()
        distributed.barrier()
        expected = make_model(0)
        expected.load_state_dict(trainer.whole_weights(), strict=False)  # without the tied head
        assert after == answers_of(expected) != before

    def fail(self) -> None:
        """An engine serves on after a failure on any rank, and the next broadcast succeeds.

        Two sets of weights come in turn.
        """
        trainer = Trainer("zero-1", make_model(SEEDS[1]))
        expected = [answers_of(make_model(seed)) for seed in SEEDS]
        with BroadcastManager(trainer.actor, trainer.strategy, self.llm) as manager:
            manager.broadcast_to_engine()
            for turn, (failure, (error, words)) in enumerate(FAILURES.items()):
                trainer.module.load_state_dict(make_model(SEEDS[turn % 2]).state_dict())
                before = greedy(self.llm)
                with self.fault(failure), pytest.raises(error, match=words) as raised:
                    manager.broadcast_to_engine()
                assert type(raised.value) is error
                if failure.startswith("load"):
                    assert f"rank {1 - int(failure[-1])}: " not in str(raised.value)
                assert greedy(self.llm) == before
                manager.broadcast_to_engine()
                assert greedy(self.llm) == expected[turn % 2] != before
            distributed.barrier()

    def manage_twice(self) -> Path:
        """A second manager of an engine is refused, until the first one is closed.

        Return the first one's store: by default one directory in shared memory.
        """
        trainer = Trainer("zero-1", make_model(SEEDS[0]))
        first = BroadcastManager(trainer.actor, trainer.strategy, self.llm)
        assert len(set(by_rank(first.store))) == 1
        assert first.store.parent == SHARED_MEMORY
        other = self.directory / "store-second"
        with pytest.raises(dbuffer.StoreBusyError, match="an engine has one follower"):
            BroadcastManager(trainer.actor, trainer.strategy, self.llm, store=other)
        first.close()
        with BroadcastManager(trainer.actor, trainer.strategy, self.llm, store=other) as second:
            second.broadcast_to_engine()
            assert greedy(self.llm) == answers_of(make_model(SEEDS[0]))
            distributed.barrier()
        return first.store

    def update_without_follower(self) -> None:
        """Ranks that call their own worker each, as vLLM has it under torchrun, are one engine."""
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
                assert f"rank 0: RuntimeError: {LOAD_ERROR}" in str(error_of(update))
            update()
            llm.reset_prefix_cache()
            assert greedy(llm) == answers_of(make_model(SEEDS[0]))
            engine, *ranks = sorted(receiver_records(store))
            assert ranks == [f"{engine}.rank-0", f"{engine}.rank-1"]
            distributed.barrier()

    def lose_rank(self) -> None:
        """One rank ends in its load, while the other waits to hear how that went."""
        trainer = Trainer("zero-1", make_model(SEEDS[1]))
        manager = BroadcastManager(trainer.actor, trainer.strategy, self.llm)
        if self.rank == 1:
            # Not with an error: torchrun would end the other rank at once.
            watch_model(self.llm, lambda handed_over: os._exit(0))
        started = time.monotonic()
        with pytest.raises(dbuffer.RankFailedError):
            manager.broadcast_to_engine()
        manager.close()
        assert time.monotonic() - started < SOON_S

    @contextmanager
    def fault(self, failure: str) -> Iterator[None]:
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
    write = dbuffer.publish.draft.Draft.write

    def fail(*_: Any) -> None:
        raise OSError(WRITE_ERROR)

    if enabled:
        dbuffer.publish.draft.Draft.write = fail
    yield
    dbuffer.publish.draft.Draft.write = write


@contextmanager
def failing_load(llm: Any, *, enabled: bool) -> Iterator[None]:
    """The next load fails in this rank, when a part of it has gone in; so do copies alone."""
    from dbuffer.engine.plan.prepared_switch import PreparedSwitch

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


def answers_of(model: Any) -> list[list[int]]:
    return tiny_models.transformers_greedy(model, PROMPTS, NUM_TOKENS)


def main(directory: Path) -> None:
    keep_apart(directory)
    program = Program(directory)
    kinds = TRAINERS if is_soak() else ("fsdp2 bf16", "zero-1 lora", "zero-3")
    for seed, kind in enumerate(kinds, start=10):
        program.train(kind, seed)
    program.fail()
    default_store = program.manage_twice()
    program.update_without_follower()
    program.lose_rank()
    (directory / "observed.json").write_text(json.dumps(str(default_store)))
    # A process group of which a rank is gone does not end well.
    os._exit(0)


if __name__ == "__main__":
    run_ranks(__file__, main)
