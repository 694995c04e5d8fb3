"""An engine of two ranks, of which one fails: both switch, or none does, and replies stay in order.

One program does everything, with two engines; the tests judge what it saw.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.store.buffer import DoubleBuffer
from tests.support.children import is_running
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    TIMEOUT_S,
    engine_arguments,
    environment,
    greedy,
    observe,
)
from tests.support.soak import is_soak
from tests.support.stores import SHARED_MEMORY, receiver_records
from tests.support.waiting import error_of

WAIT_S = 60.0
AFTER_TENSORS = 3
"""A rank fails here: q of a layer's fused q, k and v has gone in, and k and v have not."""
LOAD_ERROR = "the disk of this rank is on fire"
TIMED_OUT_ACKNOWLEDGEMENT = "WaitTimeoutError"

FILE_FAULTS = {
    # What only this rank sees, and what the error must say of it.
    "truncated": "StoreCorruptError",
    "flipped": "StoreCorruptError: .*model.embed_tokens.weight",
}
MISFITS = {
    "unknown tensor": "model.layers.0.bogus",
    "wrong shape": "model.norm.weight",
}
RANKS = (0, 1)
FAILING = RANKS if is_soak() else (1,)
ON_ONE_RANK = [f"{fault} on rank {rank}" for fault in (*FILE_FAULTS, "load") for rank in FAILING]
BY_EXTENSION = [f"load on rank {rank}, by extension" for rank in FAILING]
FOLLOWED_ANEW = "load on rank 1, followed anew"
BAD_REQUESTS = [f"bad request for rank {rank}" for rank in FAILING]
FAILURES = [
    *ON_ONE_RANK,
    *BY_EXTENSION,
    FOLLOWED_ANEW,
    *BAD_REQUESTS,
    *MISFITS,
    "version never published",
    "version gone",
]
SWITCHES = ["backend", "backend, followed", "extension, followed"]

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = environment(processes=True)
    directory = tmp_path_factory.mktemp("ranks")
    # Removed by this process: the program may be killed.
    with tempfile.TemporaryDirectory(prefix="dbuffer-test-", dir=SHARED_MEMORY) as scratch:
        return observe(__file__, directory, scratch, env=env)


@pytest.mark.parametrize("way", SWITCHES)
def test_switched_engine_answers_as_a_fresh_one(observed: Any, way: str) -> None:
    for old, new in zip(*observed["fresh"], strict=True):
        assert old != new, "the rest would hold with no weights moved at all"
    assert_serves(observed, observed["switches"][way], observed["switches"][way]["seed"])


@pytest.mark.parametrize("way", [way for way in SWITCHES if "followed" in way])
def test_followed_engine_reports_the_version(observed: Any, way: str) -> None:
    seen = observed["switches"][way]
    assert seen["reported"] == str(seen["version"])


@pytest.mark.parametrize("failure", FAILURES)
def test_engine_serves_on_unchanged_at_once(observed: Any, failure: str) -> None:
    seen = observed["failures"][failure]
    assert_serves(observed, seen["after"], seen["seed before"])


@pytest.mark.parametrize("failure", FAILURES)
def test_next_update_succeeds(observed: Any, failure: str) -> None:
    seen = observed["failures"][failure]
    assert seen["next error"] is None
    assert seen["seed before"] != seen["seed next"]
    assert_serves(observed, seen["next"], seen["seed next"])


@pytest.mark.parametrize("failure", [*ON_ONE_RANK, *BY_EXTENSION, FOLLOWED_ANEW, *BAD_REQUESTS])
def test_error_names_the_rank_that_failed_and_no_other(observed: Any, failure: str) -> None:
    error = observed["failures"][failure]["error"]
    rank = int(failure.partition("rank ")[2][0])
    assert f"rank {rank}: " in error
    assert f"rank {1 - rank}: " not in error


@pytest.mark.parametrize("fault", FILE_FAULTS)
@pytest.mark.parametrize("rank", FAILING)
def test_error_says_what_is_wrong_with_the_file(observed: Any, fault: str, rank: int) -> None:
    error = observed["failures"][f"{fault} on rank {rank}"]["error"]
    assert_matches(FILE_FAULTS[fault], error)
    assert "no rank was touched" in error


@pytest.mark.parametrize("misfit", MISFITS)
def test_error_names_the_tensor_that_does_not_fit(observed: Any, misfit: str) -> None:
    error = observed["failures"][misfit]["error"]
    for rank in RANKS:
        assert_matches(f"rank {rank}: WeightsMismatchError: .*{MISFITS[misfit]}", error)


def test_error_says_that_a_version_is_not_there(observed: Any) -> None:
    never, gone = (observed["failures"][f"version {what}"] for what in ("never published", "gone"))
    assert "VersionError: version 99 was not published" in never["error"]
    assert "versions never go back" in gone["error"]


@pytest.mark.parametrize("failure", [name for name in FAILURES if "load" in name])
def test_error_says_why_a_load_failed_and_what_the_engine_has(observed: Any, failure: str) -> None:
    seen = observed["failures"][failure]
    assert LOAD_ERROR in seen["error"]
    went_back = f"went back, and the engine serves on with version {seen['version before']}"
    assert went_back in seen["error"]


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_version_is_never_acknowledged(observed: Any, failure: str) -> None:
    seen = observed["failures"][failure]
    assert seen["after"]["applied"] == seen["version before"]
    assert seen["waited"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)


@pytest.mark.parametrize("failure", FAILURES)
def test_next_version_is_acknowledged_once_for_both_ranks(observed: Any, failure: str) -> None:
    seen = observed["failures"][failure]
    assert seen["next"]["applied"] == seen["version next"]
    assert seen["waited for one"] is None
    assert seen["waited for two"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)


def test_manifest_damaged_after_staging_fails_no_switch(observed: Any) -> None:
    seen = observed["manifest"]
    assert seen["error"] is None
    assert_serves(observed, seen, seen["seed"])
    assert seen["applied"] == seen["version"]


def test_rank_that_has_staged_what_was_replaced_takes_what_the_others_take(observed: Any) -> None:
    seen = observed["replaced"]
    assert seen["error"] is None
    assert_serves(observed, seen, 1)


def test_next_run_in_the_same_store_is_followed_whatever_its_numbers(observed: Any) -> None:
    seen = observed["replaced"]["again"]
    assert seen["error"] is None
    assert_serves(observed, seen, 0)


def test_next_run_in_the_same_store_is_refused_if_it_is_to_be(observed: Any) -> None:
    seen = observed["replaced"]["refused"]
    assert "VersionRegressedError: " in seen["error"]
    assert_serves(observed, seen, 0)


def test_broken_engine_that_is_followed_anew_is_made_whole_by_an_update(observed: Any) -> None:
    seen = observed["broken, followed anew"]
    assert "half-loaded weights" in seen["error"]
    assert "half-loaded weights" in seen["prepare error"]
    assert seen["next error"] is None
    assert_serves(observed, seen["next"], seen["seed next"])


def test_nothing_is_acknowledged_while_a_rank_still_loads(observed: Any) -> None:
    seen = observed["halted"]
    assert [record["staged_version"] for record in seen["ranks"]] == [seen["version"]] * 2
    assert [record["applied_version"] for record in seen["ranks"]] == [None] * 2
    assert seen["applied"] < seen["version"]
    assert seen["waited"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)


def test_buffer_that_is_taken_from_a_rank_in_its_load_stays_whole(observed: Any) -> None:
    seen = observed["halted"]
    assert seen["error"] is None
    assert seen["publish_s"] < WAIT_S / 2
    assert_serves(observed, seen["after"], seen["seed"])
    assert seen["after"]["applied"] == seen["version"]
    assert all(record["stats"]["evictions"] > 0 for record in seen["ranks after"])
    assert_serves(observed, seen["next"], seen["seed next"])


def test_engine_that_cannot_go_back_says_so_and_acknowledges_nothing(observed: Any) -> None:
    seen = observed["broken"]
    assert seen["error"].startswith("EngineBrokenError: ")
    assert "half-loaded weights" in seen["error"]
    assert f"could not go back to version {seen['version before']}: rank 0: " in seen["error"]
    assert "rank 1: " not in seen["error"]
    assert seen["applied"] == seen["version before"]
    assert_in_order(seen)


def test_update_before_any_request_makes_a_broken_engine_whole(observed: Any) -> None:
    seen = observed["broken"]
    assert seen["next error"] is None
    assert_serves(observed, seen["next"], seen["seed next"])


def test_two_engines_of_one_name_each_serve_what_they_say(observed: Any) -> None:
    seen = observed["namesake"]
    assert seen["tokens before"] == observed["fresh"][seen["seed before"]]
    assert seen["applied before"] is None, "what it has, it has from the other's record"
    assert seen["name"] == "stock", "each has a record of its own"
    for look in seen["looks"]:
        assert look["applied"] == look["version"]
        assert look["tokens"] == [observed["fresh"][look["seed"]]] * 2
        assert look["waited for two"] is None


def test_rank_that_is_stopped_is_named_and_the_engine_is_mended_by_an_update(observed: Any) -> None:
    seen = observed["stopped"]
    late = rf"rank 1 \(process {seen['pid']} on .*\) did not answer within 2 s: it is stopped"
    assert_matches(late, seen["problem"])
    assert seen["error"].startswith("EngineBrokenError: ")
    assert seen["next error"] is None
    assert_serves(observed, seen["next"], seen["seed next"])


def test_broken_engine_answers_no_request_and_dies_of_it(observed: Any) -> None:
    seen = observed["refused"]
    assert "half-loaded weights" in seen["error"]
    assert_dead(seen)


def test_killed_worker_ends_the_engine_and_nothing_hangs(observed: Any) -> None:
    seen = observed["killed"]
    assert seen["error"] is not None
    assert seen["error_s"] < WAIT_S
    assert_dead(seen)


@pytest.mark.parametrize("end", ["refused", "killed"])
def test_store_serves_on_when_the_engine_is_dead(observed: Any, end: str) -> None:
    seen = observed[end]
    assert seen["applied"] == seen["version before"]
    assert seen["waited"].startswith(TIMED_OUT_ACKNOWLEDGEMENT)
    assert seen["publish_s"] < 10
    assert seen["read"] == seen["published"]


def assert_serves(observed: Any, seen: Any, seed: int) -> None:
    assert seen["tokens"] == observed["fresh"][seed]
    assert_in_order(seen)


def assert_in_order(seen: Any) -> None:
    """Replies of all ranks to the last call are replies to that call, and not to one before."""
    assert seen["replies"] == [[rank, seen["question"]] for rank in RANKS]


def assert_dead(seen: Any) -> None:
    for answer in seen["answers"]:
        assert answer is not None, "it answered"
        assert answer.startswith("EngineDeadError: ")
    assert seen["workers gone"]


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


# From here on, the program that runs in the subprocess.


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
        from dbuffer.integrations.vllm import follow

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

    def publish_other(self) -> int:
        """Publish the weights that the engine does not have; the version."""
        return self.sender.send(model(1 - self.seed)).version

    def look(self) -> dict[str, Any]:
        """What it answers, to requests and to calls of its workers, and what it acknowledged."""
        return {"tokens": greedy(self.llm), "applied": self.applied, **self.ask()}

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
        threading.Thread(target=fulfil, args=(asked, greedy, self.llm), daemon=True).start()
        while not wait([asked], 1.0).done:
            if (
                self.llm.llm_engine.engine_core.resources.engine_dead
                and not wait([asked], 5.0).done
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


def fulfil(future: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)


@functools.cache
def model(seed: int) -> Any:
    from tests.support.engines.tiny_models import make_model

    return make_model("qwen3", seed)


def start_engine(directory: Path, name: str, seed: int, how: str) -> Engine:
    import vllm

    from tests.support.engines.tiny_models import save_model

    faults = {"worker_extension_cls": "tests.support.engines.faulty_worker.Faults"}
    arguments = engine_arguments(save_model("qwen3", seed, directory), tp=2, how=how) | faults
    return Engine(vllm.LLM(**arguments), directory, name, seed)


def observe_all(directory: Path) -> dict[str, Any]:
    stock = start_engine(directory, "stock", 0, "backend")
    extended = start_engine(directory, "extended", 1, "none")
    seen: dict[str, Any] = {
        "fresh": [greedy(stock.llm), greedy(extended.llm)],
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


def observe_extension(engine: Engine, seen: dict[str, Any]) -> None:
    engine.follow()
    observe_switch(engine, "extension, followed", seen)
    for rank in FAILING:
        name = f"load on rank {rank}, by extension"
        seen["failures"][name] = observe_failure(engine, fail_load(engine, rank))
    seen["broken"] = observe_broken(engine)


def observe_switch(engine: Engine, way: str, seen: dict[str, Any]) -> None:
    version = engine.publish_other()
    engine.switch()
    engine.seed = 1 - engine.seed
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
    seen["next error"] = error_of(engine.switch)
    engine.seed = seen["seed next"] = 1 - engine.seed
    seen["version next"] = newest = engine.newest()
    return seen | {
        "next": engine.look(),
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
    wait_until(lambda: all(r["staged_version"] == version for r in engine.rank_records()))
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
    seen["next error"] = error_of(engine.switch)
    engine.seed = seen["seed next"] = 1 - engine.seed
    return seen | {"next": engine.look()}


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
    wait_until(lambda: receiver_records(store).get(rank, {}).get("staged_version") == 1)
    shutil.rmtree(store)
    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send(model(1))
    engine.llm.collective_rpc("test_mend_file")

    def switch() -> dict[str, Any]:
        return {"error": error_of(engine.switch), "tokens": greedy(engine.llm), **engine.ask()}

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


def observe_eviction(engine: Engine, directory: Path) -> dict[str, Any]:
    """One rank stops in its load for so long that the sender takes both buffers."""
    seen: dict[str, Any] = {"version": halt_load(engine, directory)}

    def publish_meanwhile() -> None:
        wait_until((directory / "halted").exists)
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
    seen["next error"] = error_of(engine.switch)
    engine.seed = seen["seed next"] = 1 - engine.seed
    return seen | {"next": engine.look()}


def observe_namesake(engine: Engine, other: Engine) -> dict[str, Any]:
    """Another engine follows the same store under the same name, as replicas do."""
    from dbuffer.integrations.vllm import follow

    engine.publish_other()
    engine.switch()
    engine.seed = 1 - engine.seed
    if other.seed == engine.seed:  # what it has must not be right by chance
        other.publish_other()
        other.switch()
        other.seed = 1 - other.seed
    seen: dict[str, Any] = {"seed before": other.seed, "tokens before": greedy(other.llm)}
    with follow(other.llm, engine.store, engine_id=engine.name, timeout_s=WAIT_S) as follower:
        seen |= {"applied before": follower.applied, "name": follower.engine_id}
        seen["looks"] = []
        for _ in range(2):
            version = engine.newest()
            follower.sync()
            engine.switch()
            look = {"seed": engine.seed, "version": version, "applied": follower.applied}
            look |= {"tokens": [greedy(llm) for llm in (engine.llm, other.llm)]}
            look["waited for two"] = engine.wait_applied(version, receivers=2)
            seen["looks"].append(look)
            engine.publish_other()
            engine.seed = 1 - engine.seed
    engine.switch()
    other.follow()
    other.publish_other()
    other.switch()
    other.seed = 1 - other.seed
    return seen


def observe_stopped(engine: Engine, directory: Path) -> dict[str, Any]:
    """A worker is stopped in its load, and goes on when the other one has told of it."""
    seen: dict[str, Any] = {"pid": engine.pids[1]}
    engine.llm.collective_rpc("test_rank_timeout", args=(2.0,))
    halt_load(engine, directory)

    def stop_until_it_is_told() -> str:
        wait_until((directory / "halted").exists)
        os.kill(engine.pids[1], signal.SIGSTOP)
        try:
            wait_until(lambda: engine.record(engine.name)["problem"] is not None)
            return str(engine.record(engine.name)["problem"])
        finally:
            (directory / "go on").touch()
            os.kill(engine.pids[1], signal.SIGCONT)

    with ThreadPoolExecutor() as pool:
        told = pool.submit(stop_until_it_is_told)
        seen["error"] = error_of(engine.switch)
        seen["problem"] = told.result(WAIT_S)
    seen["next error"] = error_of(engine.switch)
    engine.seed = seen["seed next"] = 1 - engine.seed
    return seen | {"next": engine.look()}


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
        wait_until((directory / "halted").exists)
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
    gone = error_of(lambda: wait_until(lambda: not any(map(is_running, engine.pids)))) is None
    seen["workers gone"] = gone
    seen |= {"applied": engine.applied, "waited": engine.wait_applied(version)}
    started = time.monotonic()
    seen["published"] = engine.publish_other()
    seen["publish_s"] = time.monotonic() - started
    with dbuffer.WeightReceiver(engine.store, receiver_id="another", verify=True) as receiver:
        seen["read"] = receiver.load_into(dict(model(0).state_dict()))
    return seen


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited for {WAIT_S:g} s"
        time.sleep(0.005)


if __name__ == "__main__":
    target, scratch = map(Path, sys.argv[1:])
    (target / "observed.json").write_text(json.dumps(observe_all(scratch)))
