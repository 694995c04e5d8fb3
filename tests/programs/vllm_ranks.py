"""Program of `test_ranks.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import MOUNT_VARIABLE
from tests.support.children import is_running
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import engine_arguments, greedy
from tests.support.soak import is_soak
from tests.support.stores import receiver_records
from tests.support.waiting import error_of, until

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
MISFITS = {"unknown tensor": "model.layers.0.bogus", "wrong shape": "model.norm.weight"}
RANKS = (0, 1)
FAILING = RANKS if is_soak() else (1,)
FOLLOWED_ANEW = "load on rank 1, followed anew"


class Engine:
    """An engine of two ranks, the store that it follows, and the seed of the weights it has."""

    def __init__(self, llm: Any, directory: Path, name: str, seed: int) -> None:
        self.llm = llm
        self.name = name
        self.seed = seed
        self.store = directory / name
        self.directory = directory
        # Eviction comes soon: a test waits for it.
        self.sender = dbuffer.WeightSender(self.store, checksum=True, reader_timeout_s=0.3)
        self.switch: Callable[[], None] = self.switch_by_stock_calls
        self._questions = 0
        self.pids = llm.collective_rpc("test_pid")

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
        """From now on, switch through :func:`follow`."""
        store, options = self.store, self.options | {"verify": True}
        options.pop("store")
        self.switch = follow(self.llm, store, **options).sync

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

    def switch_to_next(self) -> dict[str, Any]:
        """Switch to the other weights, which have been published."""
        error = error_of(self.switch)
        self.seed = 1 - self.seed
        return {"next error": error, "seed next": self.seed, "next": self.look()}

    def publish_other(self) -> int:
        """Publish the weights that the engine does not have; the version."""
        return self.sender.send(model(1 - self.seed)).version

    def look(self) -> dict[str, Any]:
        """What it answers, to requests and to calls of its workers, and what it acknowledged."""
        return {"tokens": answers(self.llm), "applied": self.applied, **self.ask()}

    def ask(self) -> dict[str, Any]:
        self._questions += 1
        replies = self.llm.collective_rpc("test_echo", args=(self._questions,))
        return {"question": self._questions, "replies": replies}

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

    def newest(self) -> int | None:
        pointer = DoubleBuffer(self.store).pointer()
        return None if pointer is None else pointer.version

    @property
    def applied(self) -> int | None:
        return self.record(self.name)["applied_version"]

    def record(self, name: str) -> dict[str, Any]:
        return receiver_records(self.store)[name]

    def rank_records(self) -> list[dict[str, Any]]:
        return [self.record(f"{self.name}.rank-{rank}") for rank in RANKS]

    def wait_applied(self, version: int, receivers: int = 1) -> str | None:
        """What the sender says when asked whether it was applied; None: it was."""
        wait = functools.partial(self.sender.wait_applied, receivers=receivers, timeout_s=0.05)
        return error_of(lambda: wait(version))


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

    faults = {"worker_extension_cls": "tests.support.engines.faulty_worker.Faults"}
    arguments = engine_arguments(save_model("qwen3", seed, directory), tp=2, how=how) | faults
    return Engine(vllm.LLM(**arguments), directory, name, seed)


def observe_all(directory: Path) -> dict[str, Any]:
    stock = start_engine(directory, "stock", 0, "backend")
    extended = start_engine(directory, "extended", 1, "none")
    seen: dict[str, Any] = {
        "fresh": [answers(stock.llm), answers(extended.llm)],
        "failures": {},
        "switches": {},
    }
    observe_stock_calls(stock, seen)
    observe_extension(extended, seen)
    seen["namesake"] = observe_namesake(stock, extended)
    seen["stopped"] = observe_stopped(extended, directory / "stopped")
    seen["refused"] = observe_refusal(stock)
    seen["killed"] = observe_kill(extended, directory / "killed")
    return seen


def observe_stock_calls(engine: Engine, seen: dict[str, Any]) -> None:
    failures = seen["failures"]
    engine.init(timeout_s=1)
    observe_switch(engine, "backend", seen)
    failures["version never published"] = observe_failure(
        engine, engine.publish_other, attempt=lambda: engine.switch_by_stock_calls(version=99)
    )
    engine.follow()
    observe_switch(engine, "backend, followed", seen)
    engine.switch = engine.switch_by_stock_calls
    failures["version gone"] = observe_failure(
        engine, engine.publish_other, attempt=lambda: engine.switch_by_stock_calls(version=1)
    )
    for rank in FAILING:
        for kind in FILE_FAULTS:
            fault = damage_file(engine, rank, kind)
            failures[f"{kind} on rank {rank}"] = observe_failure(engine, **fault)
        failures[f"load on rank {rank}"] = observe_failure(engine, fail_load(engine, rank))
    for kind in MISFITS:
        failures[kind] = observe_failure(engine, **misfit(engine, kind))
    for rank in FAILING:
        failures[f"bad request for rank {rank}"] = observe_bad_request(engine, rank)
    engine.init()
    failures[FOLLOWED_ANEW] = observe_failure(engine, fail_load(engine, 1))
    seen["manifest"] = observe_damaged_manifest(engine)
    seen["halted"] = observe_eviction(engine, engine.directory / "evicted")
    seen["broken, followed anew"] = observe_broken_followed_anew(engine)
    seen["replaced"] = observe_replaced_store(engine, engine.directory / "replaced")
    seen["network"] = observe_network(engine, engine.directory / "network")


def observe_extension(engine: Engine, seen: dict[str, Any]) -> None:
    engine.follow()
    observe_switch(engine, "extension, followed", seen)
    for rank in FAILING:
        name = f"load on rank {rank}, by extension"
        seen["failures"][name] = observe_failure(engine, fail_load(engine, rank))
    seen["broken"] = observe_broken(engine)


def observe_switch(engine: Engine, way: str, seen: dict[str, Any]) -> None:
    version = engine.switch_to_other()
    reported = engine.llm.get_weight_version()
    seen["switches"][way] = engine.look() | {
        "seed": engine.seed,
        "version": version,
        "reported": reported,
    }


def observe_failure(
    engine: Engine,
    publish: Callable[[], int],
    *,
    attempt: Callable[[], object] | None = None,
    mend: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """A switch that must fail, and the next one, which must not."""
    seen: dict[str, Any] = {"seed before": engine.seed, "version before": engine.applied}
    version = publish()
    seen["error"] = error_of(attempt or engine.switch)
    seen["after"] = engine.look()
    seen["waited"] = engine.wait_applied(version)
    if mend is not None:
        mend()
    newest = engine.newest()
    return seen | {
        **engine.switch_to_next(),
        "version next": newest,
        "waited for one": engine.wait_applied(newest),
        "waited for two": engine.wait_applied(newest, receivers=2),
    }


def damage_file(engine: Engine, rank: int, kind: str) -> dict[str, Callable[[], Any]]:
    def publish() -> int:
        engine.llm.collective_rpc("test_damage_file", args=(rank, kind))
        return engine.publish_other()

    return {"publish": publish, "mend": lambda: engine.llm.collective_rpc("test_mend_file")}


def fail_load(engine: Engine, rank: int, times: int = 1) -> Callable[[], int]:
    def publish() -> int:
        args = (rank, times, AFTER_TENSORS, LOAD_ERROR)
        engine.llm.collective_rpc("test_fail_load", args=args)
        return engine.publish_other()

    return publish


def misfit(engine: Engine, kind: str) -> dict[str, Callable[[], Any]]:
    weights = dict(model(1 - engine.seed).state_dict())
    name = MISFITS[kind]
    weights[name] = weights["model.norm.weight"][:-1].clone()
    return {"publish": lambda: engine.sender.send(weights).version, "mend": engine.publish_other}


def observe_bad_request(engine: Engine, rank: int) -> dict[str, Any]:
    """vLLM lets each rank have a request of its own; one rank cannot read its."""
    requests: list[dict[str, Any]] = [{}, {}]
    requests[rank] = {"bogus": 1}
    return observe_failure(
        engine, engine.publish_other, attempt=lambda: engine.switch_by_stock_calls(requests)
    )


def observe_damaged_manifest(engine: Engine) -> dict[str, Any]:
    """A manifest that was read when its version was staged is damaged before the switch."""
    version = engine.publish_other()
    until(
        f"version {version} is staged",
        lambda: all(record["staged_version"] == version for record in engine.rank_records()),
        WAIT_S,
    )
    [newest] = [
        path
        for path in engine.store.glob("*/manifest.json")
        if json.loads(path.read_bytes())["version"] == version
    ]
    newest.write_bytes(b"{")
    error = error_of(engine.switch)
    engine.seed = 1 - engine.seed
    return {"error": error, "version": version, "seed": engine.seed} | engine.look()


def observe_broken_followed_anew(engine: Engine) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    fail_load(engine, 1, times=3)()
    seen["error"] = error_of(engine.switch)
    seen["prepare error"] = error_of(lambda: engine.switch_by_stock_calls(version=1))
    engine.init()
    return seen | engine.switch_to_next()


def observe_replaced_store(engine: Engine, store: Path) -> dict[str, Any]:
    """Rank 0 has staged version 1 of a store; rank 1 that of the store that took its place."""
    if engine.seed == 1:  # what it has must not be right by chance
        engine.publish_other()
        engine.switch()
    engine.init(store=str(store))
    engine.llm.collective_rpc("test_damage_file", args=(1, "truncated"))
    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send(model(0))
    rank = f"{engine.name}.rank-0"
    until(
        "version 1 is staged",
        lambda: receiver_records(store).get(rank, {}).get("staged_version") == 1,
        WAIT_S,
    )
    shutil.rmtree(store)
    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send(model(1))
    engine.llm.collective_rpc("test_mend_file")

    def switch() -> dict[str, Any]:
        return {"error": error_of(engine.switch), "tokens": answers(engine.llm), **engine.ask()}

    def begin_anew(seed: int) -> None:
        shutil.rmtree(store)
        with dbuffer.WeightSender(store, checksum=True) as sender:
            sender.send(model(seed))

    seen = switch()
    begin_anew(0)
    seen["again"] = switch()
    engine.init(store=str(store), new_history="refuse")
    begin_anew(1)
    seen["refused"] = switch()
    engine.seed = 0
    engine.init()
    return seen


def observe_network(engine: Engine, store: Path) -> dict[str, Any]:
    """The engine follows a store on what counts as a network mount, through three versions."""
    take_mounts_for(engine, "network")
    seen = follow_on_network(engine, store)
    take_mounts_for(engine, "auto")
    engine.init()
    return seen


def take_mounts_for(engine: Engine, kind: str) -> None:
    engine.llm.collective_rpc("test_mount", args=(kind,))
    os.environ[MOUNT_VARIABLE] = kind


def follow_on_network(engine: Engine, store: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"versions": []}
    with dbuffer.WeightSender(store) as sender:
        engine.init(store=str(store), verify="auto")
        for _ in range(3):
            engine.seed = 1 - engine.seed
            engine.llm.collective_rpc("test_bytes_read")
            published = sender.send(model(engine.seed))
            engine.switch()
            read = engine.llm.collective_rpc("test_bytes_read")
            look = {"tokens": answers(engine.llm), **engine.ask()}
            seen["versions"].append(look | {"seed": engine.seed, "read": sum(read)})
            seen["model bytes"] = published.num_bytes
    return seen


def observe_eviction(engine: Engine, directory: Path) -> dict[str, Any]:
    """One rank stops in its load for so long that the sender takes both buffers."""
    seen: dict[str, Any] = {"version": halt_load(engine, directory)}

    def publish_meanwhile() -> None:
        until("the load halts", (directory / "halted").exists, WAIT_S)
        seen["applied"] = engine.applied
        seen["ranks"] = engine.rank_records()
        seen["waited"] = engine.wait_applied(seen["version"])
        started = time.monotonic()
        for _ in range(2):
            engine.sender.send(model(engine.seed))
        seen["publish_s"] = time.monotonic() - started
        (directory / "go on").touch()

    with ThreadPoolExecutor() as pool:
        meanwhile = pool.submit(publish_meanwhile)
        seen["error"] = error_of(engine.switch)
        meanwhile.result(WAIT_S)
    seen |= {"after": engine.look(), "seed": 1 - engine.seed, "seed next": engine.seed}
    engine.switch()
    return seen | {"next": engine.look(), "ranks after": engine.rank_records()}


def halt_load(engine: Engine, directory: Path) -> int:
    """Let rank 1 stop in its next load; the version published for it."""
    directory.mkdir()
    args = (1, AFTER_TENSORS, str(directory))
    engine.llm.collective_rpc("test_halt_load", args=args)
    return engine.publish_other()


def observe_broken(engine: Engine) -> dict[str, Any]:
    """Both loads fail on a rank, that of the new version and that of the old one."""
    seen: dict[str, Any] = {"version before": engine.applied}
    fail_load(engine, 0, times=3)()
    seen["error"] = error_of(engine.switch)
    seen |= {"applied": engine.applied, **engine.ask()}
    return seen | engine.switch_to_next()


def observe_namesake(engine: Engine, other: Engine) -> dict[str, Any]:
    """Another engine follows the same store under the same name, as replicas do."""
    engine.switch_to_other()
    if other.seed == engine.seed:  # what it has must not be right by chance
        other.switch_to_other()
    seen: dict[str, Any] = {"seed before": other.seed, "tokens before": answers(other.llm)}
    with follow(other.llm, engine.store, engine_id=engine.name, timeout_s=WAIT_S) as follower:
        seen |= {"applied before": follower.applied, "name": follower.engine_id}
        seen["looks"] = []
        for _ in range(2):
            version = engine.newest()
            follower.sync()
            engine.switch()
            look = {"seed": engine.seed, "version": version, "applied": follower.applied}
            look |= {"tokens": [answers(llm) for llm in (engine.llm, other.llm)]}
            look["waited for two"] = engine.wait_applied(version, receivers=2)
            seen["looks"].append(look)
            engine.publish_other()
            engine.seed = 1 - engine.seed
    engine.switch()
    other.follow()
    other.switch_to_other()
    return seen


def observe_stopped(engine: Engine, directory: Path) -> dict[str, Any]:
    """A worker is stopped in its load, and goes on when the other one has told of it."""
    seen: dict[str, Any] = {"pid": engine.pids[1]}
    engine.llm.collective_rpc("test_rank_timeout", args=(2.0,))
    halt_load(engine, directory)

    def stop_until_it_is_told() -> str:
        until("the load halts", (directory / "halted").exists, WAIT_S)
        os.kill(engine.pids[1], signal.SIGSTOP)
        try:
            told = until("a problem", lambda: engine.record(engine.name)["problem"], WAIT_S)
            return str(told)
        finally:
            (directory / "go on").touch()
            os.kill(engine.pids[1], signal.SIGCONT)

    with ThreadPoolExecutor() as pool:
        told = pool.submit(stop_until_it_is_told)
        seen["error"] = error_of(engine.switch)
        seen["problem"] = told.result(WAIT_S)
    return seen | engine.switch_to_next()


def observe_refusal(engine: Engine) -> dict[str, Any]:
    """The same, and then a request."""
    before = engine.applied
    version = fail_load(engine, 1, times=3)()
    error = error_of(engine.switch)
    return {"error": error, "version before": before} | observe_death(engine, version)


def observe_kill(engine: Engine, directory: Path) -> dict[str, Any]:
    """A worker is killed in its load, while the other has loaded and waits for it."""
    seen: dict[str, Any] = {"version before": engine.applied}
    version = halt_load(engine, directory)

    def kill() -> float:
        until("the load halts", (directory / "halted").exists, WAIT_S)
        os.kill(engine.pids[1], signal.SIGKILL)
        return time.monotonic()

    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill)
        seen["error"] = error_of(engine.switch)
        seen["error_s"] = time.monotonic() - killed.result(WAIT_S)
    return seen | observe_death(engine, version)


def observe_death(engine: Engine, version: int) -> dict[str, Any]:
    """What becomes of requests, of the workers and of the store; ``version`` was not applied."""
    seen: dict[str, Any] = {"answers": [error_of(engine.ask_until_it_is_dead) for _ in range(2)]}
    until("all workers have ended", lambda: not any(map(is_running, engine.pids)), WAIT_S)
    seen |= {"applied": engine.applied, "waited": engine.wait_applied(version)}
    started = time.monotonic()
    seen["published"] = engine.publish_other()
    seen["publish_s"] = time.monotonic() - started
    with dbuffer.WeightReceiver(engine.store, receiver_id="another", verify=True) as receiver:
        seen["read"] = receiver.load_into(dict(model(0).state_dict()))
    return seen


if __name__ == "__main__":
    target, scratch = map(Path, sys.argv[1:])
    (target / "observed.json").write_text(json.dumps(observe_all(scratch)))
