"""LightRFT's BroadcastManager: real trainers of two ranks, and a real vLLM engine of two ranks.

One program, started by torchrun, does everything, with the engine in the trainer's processes as
LightRFT has it; the tests judge what it saw.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    TIMEOUT_S,
    engine_arguments,
    environment,
    greedy,
    observe,
)
from tests.support.lightrft_parts import TRAINERS, Trainer, by_rank, expected_dtype, run_ranks
from tests.support.stores import SHARED_MEMORY, receiver_records
from tests.support.waiting import error_of

RANKS = (0, 1)
AFTER_TENSORS = 3
"""A rank fails here: parts of a layer's fused tensors have gone in, and others have not."""
LOAD_ERROR = "the disk of this rank is on fire"
WRITE_ERROR = "it went up in smoke"
FAMILY = "tied-qwen2"
"""One tensor is its embedding and its head; without that tie, `test_lightrft_engines` has one."""
SEEDS = (0, 1)
FAILURES = {
    "write on rank 0": "RankFailedError",
    "load on rank 0": "EngineUpdateError",
    "load on rank 1": "EngineUpdateError",
    "asleep": "EngineBusyError",
}

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    env = environment(processes=False)
    directory = tmp_path_factory.mktemp("lightrft")
    seen = observe(__file__, directory, env=env)
    yield seen
    shutil.rmtree(seen["two managers"][0]["first store"])
    for path in SHARED_MEMORY.glob(f"{shared_memory_name(directory)}*"):
        path.unlink()  # of ranks that were killed


@pytest.mark.parametrize("trainer", TRAINERS)
def test_engine_answers_as_a_fresh_one_with_the_trainers_weights(
    observed: Any, trainer: str
) -> None:
    for seen in observed["trainers"][trainer]:
        assert seen["before"] != seen["fresh"], "the rest would hold with no weights moved at all"
        assert seen["after"] == seen["fresh"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_second_version_is_a_delta(observed: Any, trainer: str) -> None:
    """Also where tensors are gathered, and where they are cast."""
    for seen in observed["trainers"][trainer]:
        assert seen["deltas"] == [0, 1]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_weights_are_published_in_the_dtype_of_lightrft(observed: Any, trainer: str) -> None:
    for seen in observed["trainers"][trainer]:
        assert seen["dtypes"] == [str(expected_dtype(trainer))]


def test_default_store_is_one_directory_in_shared_memory(observed: Any) -> None:
    first, second = observed["two managers"]
    assert first["first store"] == second["first store"]
    assert Path(first["first store"]).parent == SHARED_MEMORY


@pytest.mark.parametrize("failure", FAILURES)
def test_engine_serves_on_unchanged_after_a_failure(observed: Any, failure: str) -> None:
    for seen in observed["failures"][failure]:
        assert seen["after"] == seen["before"]


@pytest.mark.parametrize("failure", FAILURES)
def test_next_broadcast_succeeds(observed: Any, failure: str) -> None:
    for seen in observed["failures"][failure]:
        assert seen["next"] == seen["fresh"]
        assert seen["next"] != seen["before"]


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_raises_on_all_ranks(observed: Any, failure: str) -> None:
    for seen in observed["failures"][failure]:
        assert seen["error"].startswith(f"{FAILURES[failure]}: ")


@pytest.mark.parametrize("rank", RANKS)
def test_error_names_the_rank_whose_load_failed(observed: Any, rank: int) -> None:
    for seen in observed["failures"][f"load on rank {rank}"]:
        assert f"rank {rank}: RuntimeError: {LOAD_ERROR}" in seen["error"]
        assert f"rank {1 - rank}: " not in seen["error"]


def test_error_says_that_the_engine_sleeps(observed: Any) -> None:
    assert "wake it up first" in observed["failures"]["asleep"][0]["error"]


def test_first_of_two_managers_of_an_engine_hears_of_the_second_at_once(observed: Any) -> None:
    for seen in observed["two managers"]:
        assert seen["error"].startswith("EngineUpdateError: ")
        assert "another follower let the engine follow another store" in seen["error"]
        assert seen["first store"] in seen["error"]
        assert seen["error_s"] < 60, "its time-out is ten minutes"


def test_second_of_two_managers_of_an_engine_goes_on(observed: Any) -> None:
    for seen in observed["two managers"]:
        assert seen["after"] == seen["fresh"]


def test_ranks_without_a_follower_are_one_engine(observed: Any) -> None:
    """Each calls its own worker, as vLLM has it where torchrun started the ranks."""
    first, second = observed["without a follower"]
    assert first["receivers"] == [first["engine"] + end for end in ("", ".rank-0", ".rank-1")]
    assert first["after"] == second["after"] == first["fresh"]


def test_all_ranks_without_a_follower_hear_of_a_failure(observed: Any) -> None:
    for seen in observed["without a follower"]:
        assert f"rank 0: RuntimeError: {LOAD_ERROR}" in seen["error"]


def test_rank_that_ends_in_its_load_leaves_nobody_waiting(observed: Any) -> None:
    seen = observed["rank lost"]
    assert seen["error"].startswith("RankFailedError: ")
    assert seen["error_s"] < 60


# From here on, the program that runs in the ranks.


class Program:
    """One rank: its part of the engine, and of one trainer after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rank = distributed.get_rank()
        self._engines: list[Any] = []
        initial = self.save(make_model(SEEDS[0]).state_dict(), "initial")
        self.llm = self.start_engine(initial)
        self.fresh_answers = greedy(self.llm)

    def save(self, weights: dict[str, torch.Tensor], name: str) -> Path:
        """Save a checkpoint, once for all ranks."""
        path = self.directory / name
        if self.rank == 0:
            model = make_model(0)
            dtype = next(iter(weights.values())).dtype
            model.to(dtype).load_state_dict(weights, strict=False)  # without the tied head
            model.save_pretrained(path)
        distributed.barrier()
        return path

    def start_engine(self, checkpoint: Path, how: str = "none") -> Any:
        import vllm

        launched = {"distributed_executor_backend": "external_launcher", "seed": 0}
        llm = vllm.LLM(**engine_arguments(checkpoint, tp=2, how=how), **launched)
        self._engines.append(llm)  # the first that goes takes torch.distributed with it
        return llm

    def fresh(self, trainer: Trainer, name: str) -> list[list[int]]:
        """What a new engine answers, on the weights that the trainer has now."""
        return greedy(self.start_engine(self.save(trainer.whole_weights(), name)))

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
        return seen | {"fresh": self.fresh(trainer, f"after {kind}")}

    def observe_failures(self) -> dict[str, Any]:
        """Two sets of weights in turn, of which it is known what an engine answers with them."""
        trainer = Trainer("zero-1", make_model(SEEDS[1]))
        fresh = [self.fresh_answers, self.fresh(trainer, "seed 1")]
        seen = {}
        with BroadcastManager(trainer.actor, trainer.strategy, self.llm) as manager:
            manager.broadcast_to_engine()
            for turn, failure in enumerate(FAILURES):
                trainer.module.load_state_dict(make_model(SEEDS[turn % 2]).state_dict())
                seen[failure] = self.observe_failure(manager, failure)
                seen[failure]["fresh"] = fresh[turn % 2]
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
        return seen | {"after": after, "fresh": self.fresh_answers}

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
        return found | {"error": error, "after": after, "fresh": self.fresh_answers}

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
    from dbuffer.integrations.engine.plan.copy_plan import PreparedSwitch

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
    from tests.support.engines import tiny_models

    return tiny_models.make_model(FAMILY, seed)


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
