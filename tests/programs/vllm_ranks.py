"""An engine of two ranks, of which one fails: both switch, or none does, and replies stay in order.

One program does everything, with two engines. After each failure the engine answers as a fresh one
on the weights that it had, acknowledges nothing, and takes the next update.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.testing.waiting import until
from tests.support.children import is_running
from tests.support.engines import in_workers
from tests.support.engines.in_workers import (
    damage_files,
    echo,
    fail_loads,
    mend_files,
    process_id,
)
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import IS_BEFORE_0_32, engine_arguments, greedy, judge
from tests.support.soak import is_soak
from tests.support.stores import newest_version, number_in, receiver_records, remove_store
from tests.support.waiting import error_of

WAIT_S = 60.0
AFTER_TENSORS = 3
"""A rank fails here: q of a layer's fused q, k and v has gone in, and k and v have not."""
NUM_TOKENS = 16 if is_soak() else 4
LOAD_ERROR = "the disk of this rank is on fire"

FILE_FAULTS = {
    # What only this rank sees, and what the error must say of it.
    "truncated": "StoreCorruptError",
    "flipped": "StoreCorruptError: .*model.embed_tokens.weight",
}
RANKS = (0, 1)
FAILING = RANKS if is_soak() else (1,)


class Engine:
    def __init__(self, llm: Any, directory: Path, name: str, seed: int) -> None:
        self.llm = llm
        self.name = name
        self.seed = seed
        self.store = directory / name
        self.directory = directory
        # Eviction comes soon: a test waits for it.
        self.sender = dbuffer.WeightSender(self.store, checksum=True, reader_timeout_s=0.3)
        self.switch: Callable[[], None] = self.switch_by_stock_calls
        self.fresh: list[Any] = []
        self._questions = 0
        self.pids = llm.collective_rpc(process_id)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "store": str(self.store),
            "engine_id": self.name,
            "timeout_s": WAIT_S,
            "images": False,  # what fails here, fails in a reload
        }

    def init(self, **more: Any) -> None:
        info = self.options | {"verify": True} | more
        self.llm.init_weight_transfer_engine({"init_info": info})

    def follow(self) -> None:
        store, options = self.store, self.options | {"verify": True}
        options.pop("store")
        self.follower = follow(self.llm, store, **options)
        self.switch = self.follower.sync

    def switch_by_stock_calls(self, for_ranks: Any = None, **info: Any) -> None:
        self.llm.start_weight_update()
        try:
            self.llm.update_weights({"update_info": for_ranks or info})
        except Exception:
            # Ends the session on the rank that had no reason to raise.
            with contextlib.suppress(Exception):
                self.llm.finish_weight_update()
            raise
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()

    def switch_to_other(self) -> int:
        """Publish the weights that the engine does not have, and switch to them; the version."""
        version = self.publish_other()
        self.switch()
        self.seed = 1 - self.seed
        return version

    def switch_to_published(self) -> None:
        self.switch()
        self.seed = 1 - self.seed
        self.require_served()
        self.require_applied(newest_version(self.store))

    def publish_other(self) -> int:
        """Publish the weights that the engine does not have; the version."""
        return self.sender.send(model(1 - self.seed)).version

    def require_served(self, seed: int | None = None) -> None:
        assert answers(self.llm) == self.fresh[self.seed if seed is None else seed]
        self.require_in_order()

    def require_in_order(self) -> None:
        """Require that replies of all ranks are to the last call, and not to one before."""
        self._questions += 1
        replies = self.llm.collective_rpc(echo, args=(self._questions,))
        assert replies == [[rank, self._questions] for rank in RANKS]

    def ask_until_it_is_dead(self) -> list[list[int]]:
        """What it answers requests with.

        vLLM lets a request wait for ever if it hears that the process of the engine has ended
        before it hears from that process why.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        asked: Future[list[list[int]]] = Future()
        # A daemon: what waits for ever does not keep this program from ending.
        threading.Thread(target=fulfil, args=(asked, answers, self.llm), daemon=True).start()
        while not wait([asked], 0.2).done:
            if (
                self.llm.llm_engine.engine_core.resources.engine_dead
                and not wait([asked], 1.0).done
            ):
                raise EngineDeadError
        return asked.result()

    @property
    def applied(self) -> int | None:
        return number_in(self.record(self.name), "applied")

    def record(self, name: str) -> dict[str, Any]:
        return receiver_records(self.store)[name]

    def rank_records(self) -> list[dict[str, Any]]:
        return [self.record(f"{self.name}.rank-{rank}") for rank in RANKS]

    def require_applied(self, version: int) -> None:
        """Require that a version is acknowledged, once for both ranks."""
        self.sender.wait_applied(version, receivers=1, timeout_s=WAIT_S)
        assert self.applied == version
        self.require_not_applied(version, receivers=2)

    def require_not_applied(self, version: int, receivers: int = 1) -> None:
        with pytest.raises(dbuffer.WaitTimeoutError):
            self.sender.wait_applied(version, receivers=receivers, timeout_s=0.05)


def answers(llm: Any) -> list[list[int]]:
    return greedy(llm, NUM_TOKENS)


def fulfil(future: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)


@functools.cache
def model(seed: int) -> Any:
    return make_model("qwen3", seed)


def start_engine(directory: Path, name: str, seed: int, how: str) -> Engine:
    import vllm

    arguments = engine_arguments(save_model("qwen3", seed, directory), tp=2, how=how)
    return Engine(vllm.LLM(**arguments), directory, name, seed)


def run(directory: Path) -> None:
    stock = start_engine(directory, "stock", 0, "backend")
    extended = start_engine(directory, "extended", 1, "extension")
    fresh = [answers(stock.llm), answers(extended.llm)]
    assert all(one != other for one, other in zip(*fresh, strict=True))
    stock.fresh = extended.fresh = fresh
    drive_by_stock_calls(stock)
    drive_by_extension(extended)
    ask_a_broken_engine(stock)
    kill_a_worker(extended, directory / "killed")


def drive_by_stock_calls(engine: Engine) -> None:
    engine.init()
    switch_once(engine)
    with failing(engine) as fails:
        engine.publish_other()
        fails(lambda: engine.switch_by_stock_calls(version=99))
    assert "VersionError: version 99 was not published" in fails.error
    engine.follow()
    version = switch_once(engine)
    assert engine.llm.get_weight_version() == str(version)
    engine.switch = engine.switch_by_stock_calls
    with failing(engine) as fails:
        engine.publish_other()
        fails(lambda: engine.switch_by_stock_calls(version=1))
    assert "versions never go back" in fails.error
    for rank in FAILING:
        for kind, words in FILE_FAULTS.items():
            with failing(engine) as fails:
                engine.llm.collective_rpc(damage_files, args=(rank, kind))
                engine.publish_other()
                fails(engine.switch)
                engine.llm.collective_rpc(mend_files)
            fails.on_rank(rank)
            assert re.search(words, fails.error)
            assert "no rank was touched" in fails.error
        fail_in_load(engine, rank)
    for rank in () if IS_BEFORE_0_32 else FAILING:
        # From 0.32 on, vLLM lets each rank have a request of its own; one rank cannot read its.
        requests: list[dict[str, Any]] = [{}, {}]
        requests[rank] = {"bogus": 1}
        with failing(engine) as fails:
            engine.publish_other()
            fails(lambda: engine.switch_by_stock_calls(requests))  # noqa: B023
        fails.on_rank(rank)
    engine.init()
    fail_in_load(engine, 1)  # followed anew
    take_the_buffer_from_a_rank(engine, engine.directory / "evicted")
    follow_anew_when_broken(engine)
    replace_the_store(engine, engine.directory / "replaced")


def drive_by_extension(engine: Engine) -> None:
    engine.follow()
    version = switch_once(engine)
    assert engine.llm.get_weight_version() == str(version)
    for rank in FAILING:
        fail_in_load(engine, rank)
    break_and_update(engine)


def switch_once(engine: Engine) -> int:
    version = engine.switch_to_other()
    engine.require_served()
    engine.require_applied(version)
    return version


class Failure:
    error = ""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, attempt: Callable[[], object]) -> None:
        """Fail, which leaves the engine on the weights that it had, and acknowledges nothing."""
        engine, before = self._engine, self._engine.applied
        newest = newest_version(engine.store)
        self.error = str(error_of(attempt))
        engine.require_served()
        assert engine.applied == before
        engine.require_not_applied(newest)

    def on_rank(self, rank: int) -> None:
        assert f"rank {rank}: " in self.error
        assert f"rank {1 - rank}: " not in self.error


@contextlib.contextmanager
def failing(engine: Engine) -> Iterator[Failure]:
    """Let the block publish, and an attempt fail; the next update must succeed."""
    yield Failure(engine)
    engine.switch_to_published()


def fail_in_load(engine: Engine, rank: int) -> None:
    before = engine.applied
    with failing(engine) as fails:
        fail_next_loads(engine, rank)
        fails(engine.switch)
    fails.on_rank(rank)
    assert LOAD_ERROR in fails.error
    assert f"went back, and the engine serves on with version {before}" in fails.error


def fail_next_loads(engine: Engine, rank: int, times: int = 1) -> int:
    args = (rank, times, AFTER_TENSORS, LOAD_ERROR)
    engine.llm.collective_rpc(fail_loads, args=args)
    return engine.publish_other()


def follow_anew_when_broken(engine: Engine) -> None:
    fail_next_loads(engine, 1, times=3)
    for attempt in (engine.switch, lambda: engine.switch_by_stock_calls(version=1)):
        assert "half-loaded weights" in str(error_of(attempt))
    engine.init()
    engine.switch_to_published()


def replace_the_store(engine: Engine, store: Path) -> None:
    """Rank 0 has staged version 1 of a store; rank 1 that of the store that took its place."""
    if engine.seed == 1:  # what it has must not be right by chance
        engine.switch_to_other()
    engine.init(store=str(store))
    engine.llm.collective_rpc(damage_files, args=(1, "truncated"))
    begin_anew(store, 0)
    rank = f"{engine.name}.rank-0"
    until(
        "version 1 is staged",
        lambda: number_in(receiver_records(store).get(rank, {}), "staged") == 1,
        WAIT_S,
    )
    begin_anew(store, 1)
    engine.llm.collective_rpc(mend_files)
    engine.switch()
    engine.require_served(1)
    begin_anew(store, 0)  # whatever its numbers, it is followed
    engine.switch()
    engine.require_served(0)
    engine.init(store=str(store), forked="refuse")
    begin_anew(store, 1)
    assert "VersionRegressedError: " in str(error_of(engine.switch))
    engine.require_served(0)
    engine.seed = 0
    engine.init()


def begin_anew(store: Path, seed: int) -> None:
    """Publish version 1 of a store in the place of another."""
    remove_store(store)
    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send(model(seed))


def take_the_buffer_from_a_rank(engine: Engine, directory: Path) -> None:
    """Stop one rank in its load for so long that the sender takes both buffers."""
    version = halt_load(engine, directory)

    def publish_meanwhile() -> None:
        until("the load halts", (directory / "halted").exists, WAIT_S)
        # Nothing is acknowledged while a rank still loads.

        def staged() -> list[int | None]:
            return [number_in(record, "staged") for record in engine.rank_records()]

        # A rank takes what it has staged, and writes its record a moment later.
        until("both ranks say that they have staged it", lambda: staged() == [version] * 2, WAIT_S)
        records = engine.rank_records()
        assert [record["applied"] for record in records] == [None] * 2
        assert engine.applied < version
        engine.require_not_applied(version)
        started = time.monotonic()
        for _ in range(2):
            engine.sender.send(model(engine.seed))
        assert time.monotonic() - started < WAIT_S / 2
        (directory / "go on").touch()

    with ThreadPoolExecutor() as pool:
        meanwhile = pool.submit(publish_meanwhile)
        engine.switch()
        meanwhile.result(WAIT_S)
    engine.require_served(1 - engine.seed)
    engine.require_applied(version)
    engine.switch()
    engine.require_served()

    def evictions() -> list[float]:
        return [record["stats"]["evictions"] for record in engine.rank_records()]

    until("both ranks have let go of what was evicted", lambda: all(evictions()), WAIT_S)


def halt_load(engine: Engine, directory: Path) -> int:
    """Let rank 1 stop in its next load; the version published for it."""
    directory.mkdir()
    args = (1, AFTER_TENSORS, str(directory))
    engine.llm.collective_rpc(in_workers.halt_load, args=args)
    return engine.publish_other()


def break_and_update(engine: Engine) -> None:
    """Both loads fail on a rank; an update before any request makes the engine whole."""
    before = engine.applied
    fail_next_loads(engine, 0, times=3)
    error = str(error_of(engine.switch))
    assert error.startswith("EngineBrokenError: ")
    assert "half-loaded weights" in error
    assert f"could not go back to version {before}: rank 0: " in error
    assert "rank 1: " not in error
    assert engine.applied == before
    engine.require_in_order()
    engine.switch_to_published()


def ask_a_broken_engine(engine: Engine) -> None:
    """It answers no request, and dies of it."""
    before = engine.applied
    version = fail_next_loads(engine, 1, times=3)
    assert "half-loaded weights" in str(error_of(engine.switch))
    require_dead(engine, version, before)


def kill_a_worker(engine: Engine, directory: Path) -> None:
    """Kill a worker in its load, while the other has loaded and waits for it."""
    before = engine.applied
    version = halt_load(engine, directory)

    def kill() -> float:
        until("the load halts", (directory / "halted").exists, WAIT_S)
        os.kill(engine.pids[1], signal.SIGKILL)
        return time.monotonic()

    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill)
        assert error_of(engine.switch) is not None
        assert time.monotonic() - killed.result(WAIT_S) < WAIT_S
    require_dead(engine, version, before)


def require_dead(engine: Engine, version: int, before: int | None) -> None:
    """Requests end, and so do the workers; the store serves on. The version was not applied."""
    for _ in range(2):
        assert str(error_of(engine.ask_until_it_is_dead)).startswith("EngineDeadError: ")
    until("all workers have ended", lambda: not any(map(is_running, engine.pids)), WAIT_S)
    assert engine.applied == before
    engine.require_not_applied(version)
    started = time.monotonic()
    published = engine.publish_other()
    assert time.monotonic() - started < 10
    with dbuffer.WeightReceiver(engine.store, receiver_id="another", verify=True) as receiver:
        assert receiver.load_into(dict(model(0).state_dict())) == published


if __name__ == "__main__":
    judge(run)
