"""What a follower does of itself: over real stores, with an engine that is a dictionary of tensors.

The engine's one rank is a real `RankReceiver`; what is left out is vLLM and SGLang, whose own tests
have the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.errors import (
    EngineBrokenError,
    EngineBusyError,
    EngineEndedError,
    EngineUnreachableError,
    EngineUpdateError,
    OptionError,
    StoreAccessError,
    StoreBusyError,
    StoreFullError,
    UnsupportedError,
)
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.background import BackgroundFollower
from dbuffer.integrations.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.integrations.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.engine.messages import (
    RankAnswer,
    RankRequest,
    decode_answer,
    encode_answer,
)
from dbuffer.integrations.engine.plan.load_trace import LoadTrace
from dbuffer.integrations.engine.protocol import Engine, EngineFacts
from dbuffer.integrations.engine.rank_channel import RankChannel
from dbuffer.integrations.engine.rank_receiver import RankReceiver
from dbuffer.integrations.engine.version_id import UNKNOWN_VERSION
from dbuffer.integrations.vllm import FollowStore
from dbuffer.integrations.vllm.api_servers import SharedFollower
from dbuffer.integrations.vllm.facts import instance_of_api_servers
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from tests.support.children import Command
from tests.support.patterns import SMALL
from tests.support.waiting import until as until_within

WAIT_S = 60.0
ENGINE = "dbuffer.integrations.engine"
LOGS = {f"{ENGINE}.{module}" for module in ("background", "follower", "reporting", "store_view")}
"""Where all that a follower logs comes from."""

Pairs = Iterable[tuple[str, torch.Tensor]]


class OneRank(RankChannel):
    """An engine of one process."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None))


class Model:
    """Tensors that answer from themselves, and loads that fail when they are told to."""

    def __init__(self) -> None:
        self.tensors = SMALL.weights(0)
        self.failing_loads = 0
        self.refuses: str | None = None

    def load(self, tensors: Pairs, *, partial: bool = False) -> None:
        for name, tensor in tensors:
            self.tensors[name] = tensor.clone()
            if self.failing_loads:
                self.failing_loads -= 1
                raise RuntimeError("this load fails")

    def load_checkpoint(self) -> None:
        self.load(SMALL.weights(0).items())

    def refuse_to_serve(self, reason: str) -> None:
        self.refuses = reason

    def serve_again(self) -> None:
        self.refuses = None


class Rank:
    """What the receiver asks of a rank."""

    on_device = False
    instance_id = "one"
    module = torch.nn.Module()
    is_pipeline_stage = False
    not_weights = ()
    packing = wrapper = None
    replica = ""

    def __init__(self, model: Model) -> None:
        self.ranks = OneRank()
        self._model = model

    def engine_id(self, options: EngineOptions) -> str:
        return (options.engine_id or "engine") + self.replica

    def make_model(self, before: Any) -> Any:
        return before or self._model

    def make_check(self, *, partial: bool) -> Any:
        def check(specs: Sequence[TensorSpec], aliases: Any = None) -> LoadTrace:
            names = [spec.name for spec in specs]
            if names != SMALL.names:
                raise dbuffer.WeightsMismatchError(f"not this model's tensors: {names}")
            return LoadTrace({}, frozenset(names))

        return check


class LightEngine(Engine):
    """An engine in this process, that can be away, dead, or lose its answers."""

    def __init__(self, *, is_server: bool = False) -> None:
        self.is_server = is_server
        self.model = Model()
        self.label = "default"
        self.paused = False
        self.error: Callable[[], Exception] | None = None
        """What every call raises."""
        self.lost_answer: Exception | None = None
        """What the next update raises when it has been done."""
        self.failing_resumes = 0
        self.calls = 0
        self.endpoint = RankEndpoint()

    def _call(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error()

    def close(self) -> None:
        self.endpoint.end()

    def facts(self) -> EngineFacts:
        self._call()
        return EngineFacts(instance_id="one", name="engine", num_ranks=1)

    def call(self, request: RankRequest) -> list[RankAnswer]:
        self._call()
        request = RankRequest.parse(json.loads(json.dumps(request.as_json())))
        answer = capture_answer(lambda: self.endpoint.do(request, self.make_rank))
        if request.call == "update" and self.lost_answer is not None:
            error, self.lost_answer = self.lost_answer, None
            raise error
        return [decode_answer(json.loads(json.dumps(encode_answer(answer))))]

    def make_rank(self) -> Rank:
        return Rank(self.model)

    @property
    def receiver(self) -> RankReceiver:
        assert self.endpoint.receiver is not None
        return self.endpoint.receiver

    def is_paused(self) -> bool:
        self._call()
        return self.paused

    def pause(self, mode: str) -> None:
        self._call()
        self.paused = True

    def resume(self) -> None:
        self._call()
        if self.failing_resumes:
            self.failing_resumes -= 1
            raise EngineUpdateError("not now")
        self.paused = False

    def weight_version(self) -> str:
        self._call()
        return self.label

    def set_weight_version(self, version: str) -> None:
        self._call()
        self.label = version

    @property
    def version(self) -> int | None:
        """What its tensors are."""
        return SMALL.version_of(self.model.tensors)


until = functools.partial(until_within, timeout_s=WAIT_S)


def options(store: Path, engine_id: str = "engine", **more: Any) -> EngineOptions:
    defaults = {"poll_interval_s": 0.05, "timeout_s": 5, "plan": False}
    return EngineOptions(store=str(store), engine_id=engine_id, **defaults | more)


@contextlib.contextmanager
def background(
    engine: LightEngine, store: Path, engine_id: str, **more: Any
) -> Iterator[BackgroundFollower]:
    with BackgroundFollower(Follower(engine, options(store, engine_id, **more))) as follower:
        yield follower


@contextlib.contextmanager
def following(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, *, is_server: bool = False
) -> Iterator[tuple[LightEngine, BackgroundFollower]]:
    """An engine in the background that serves version 1."""
    sender.send(SMALL.weights(1))
    engine = LightEngine(is_server=is_server)
    with background(engine, store, engine_id) as follower:
        follower.wait_applied(1, WAIT_S)
        yield engine, follower


@contextlib.contextmanager
def about_to_switch(
    sender: dbuffer.WeightSender, store: Path, *, is_server: bool = False
) -> Iterator[tuple[LightEngine, Follower]]:
    """An engine that serves version 1, when version 2 is published."""
    engine = LightEngine(is_server=is_server)
    with Follower(engine, options(store)) as follower:
        sender.send(SMALL.weights(1))
        follower.sync()
        sender.send(SMALL.weights(2))
        yield engine, follower


def metrics(engine_id: str) -> dict[str, float]:
    """Ours of one engine, as /metrics shows them."""
    prometheus = pytest.importorskip("prometheus_client")
    return {
        sample.name.removeprefix("dbuffer_"): sample.value
        for family in prometheus.REGISTRY.collect()
        for sample in family.samples
        if sample.labels.get("engine") == engine_id
    }


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the follower has complained of."""
    return [r.getMessage() for r in caplog.records if r.name in LOGS and r.levelno > logging.INFO]


@pytest.mark.timing(rank_gone_s=0.1)
def test_server_that_ends_while_a_version_gets_ready_is_not_waited_for(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with about_to_switch(sender, store, is_server=True) as (engine, follower):
        records = {path: json.loads(path.read_text()) for path in store.glob("receivers/*.json")}
        engine.endpoint.end()
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        for path, record in records.items():
            path.write_text(json.dumps(record | {"pid": process.pid, "staged_version": 1}))
        with pytest.raises(EngineUnreachableError, match="ended before version 2"):
            follower.sync(timeout_s=WAIT_S)
        engine.endpoint = RankEndpoint()
        switch = follower.sync()
        assert switch is not None
        assert switch.version == engine.version == 2


# What happens to the store


def make_group_writable(store: Path) -> Callable[[], None]:
    store.chmod(0o770)
    return lambda: store.chmod(0o700)


def spoil_pointer(store: Path) -> Callable[[], None]:
    pointer = store / "CURRENT"
    whole = pointer.read_bytes()
    pointer.write_bytes(b"{")
    return lambda: (pointer.write_bytes(whole), None)[1]


def run_out_of_files(store: Path) -> Callable[[], None]:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Below what is open, and not 0: poll() of two files, in the watcher, is no invalid call.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("damage", [make_group_writable, spoil_pointer, run_out_of_files])
def test_trouble_of_a_moment_ends_and_following_goes_on(
    sender: dbuffer.WeightSender,
    store: Path,
    engine_id: str,
    damage: Callable[[Path], Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with following(sender, store, engine_id) as (engine, follower):
        until("it is known to follow", lambda: metrics(engine_id).get("following") == 1)
        failures = metrics(engine_id)["failures_total"]
        mend = damage(store)
        try:
            until("it is noticed", lambda: metrics(engine_id)["following"] == 0)
            until("it is tried again", lambda: metrics(engine_id)["retries_total"] >= 2)
            during = metrics(engine_id)
        finally:
            mend()
        sender.send(SMALL.weights(2))
        assert follower.wait_applied(2, WAIT_S) == 2
        until("it is over", lambda: any("works again" in line for line in lines(caplog)))
        after = metrics(engine_id)
    assert engine.version == 2
    # What is not known is not said, and what is known is true.
    assert not {"version_available", "lag_versions", "lag_seconds"} & set(during)
    assert during["version_applied"] == 1
    assert (after["following"], after["version_available"], after["lag_versions"]) == (1, 2, 0)
    # One incident, which began and ended.
    assert after["failures_total"] == failures + 1
    began, *more, ended = lines(caplog)
    assert "trying again" in began
    assert "works again" in ended
    assert len(more) <= 1  # its rank may find out a moment later that all is well


def test_store_that_is_begun_anew_and_refused_floods_nothing(
    store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with dbuffer.WeightSender(store) as sender:
        for version in (1, 2, 3):
            sender.send(SMALL.weights(version))
    engine = LightEngine()
    with background(engine, store, engine_id, new_history="refuse") as follower:
        follower.wait_applied(3, WAIT_S)
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(4))
            until("it is noticed", lambda: follower.error is not None)
            used, began = time.process_time(), time.monotonic()
            until("it is tried again", lambda: metrics(engine_id)["retries_total"] >= 3)
            busy = (time.process_time() - used) / (time.monotonic() - began)
    assert len(lines(caplog)) <= 3
    assert busy < 0.5


# What happens to the engine


def away() -> Exception:
    return EngineUnreachableError("http://localhost:1 does not answer: connection refused")


def test_server_that_dies_costs_a_look_a_second_and_one_line(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with following(sender, store, engine_id, is_server=True) as (engine, follower):
        engine.error = away
        until("it is noticed", lambda: isinstance(follower.error, EngineUnreachableError))
        calls, used, began = engine.calls, time.process_time(), time.monotonic()
        until("four retries", lambda: metrics(engine_id)["retries_total"] >= 4)
        busy = (time.process_time() - used) / (time.monotonic() - began)
        during = metrics(engine_id)
        assert engine.calls - calls <= 10
        assert busy < 0.5
        [line] = lines(caplog)
        assert "does not answer" in line
        engine.error = None
        sender.send(SMALL.weights(2))
        assert follower.wait_applied(2, WAIT_S) == 2
    assert engine.version == 2
    assert engine.label == "2"
    # Nobody knows what a server has that does not answer.
    assert during["following"] == 0
    assert not {"version_applied", "version_available", "lag_versions"} & set(during)


def test_server_that_starts_late_is_waited_for_in_one_line(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender.send(SMALL.weights(1))
    engine = LightEngine(is_server=True)
    engine.error = away
    with background(engine, store, engine_id) as follower:
        until("it is asked again", lambda: engine.calls >= 4)
        assert [r.levelname for r in caplog.records if r.name in LOGS] == ["WARNING"]
        engine.error = None
        assert follower.wait_applied(1, WAIT_S) == 1


def test_dead_engine_of_this_process_ends_following_and_is_told_once(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with following(sender, store, engine_id) as (engine, follower):
        engine.error = lambda: EngineEndedError("the engine is dead")
        sender.send(SMALL.weights(2))
        with pytest.raises(dbuffer.WaitTimeoutError, match="the engine is dead"):
            follower.wait_applied(2, WAIT_S)
    assert lines(caplog) == [f"{engine_id} is followed no longer: the engine is dead"]
    assert metrics(engine_id)["following"] == 0


def test_what_no_one_has_thought_of_does_not_end_following(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with following(sender, store, engine_id, is_server=True) as (engine, follower):
        engine.error = lambda: RuntimeError("a bug")
        until("it is noticed", lambda: isinstance(follower.error, RuntimeError))
        until("it is tried again", lambda: metrics(engine_id)["retries_total"] >= 2)
        engine.error = None
        sender.send(SMALL.weights(2))
        assert follower.wait_applied(2, WAIT_S) == 2
    assert [line for line in lines(caplog) if "RuntimeError: a bug" in line][1:] == []


def test_version_that_does_not_fit_is_told_once_and_the_next_one_is_taken(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with following(sender, store, engine_id) as (_, follower):
        sender.send({"another": torch.ones(3)})
        until("it is tried again", lambda: metrics(engine_id)["retries_total"] >= 2)
        during = metrics(engine_id)
        until("it could have been staged again", lambda: metrics(engine_id)["retries_total"] >= 3)
        rank = DoubleBuffer(store).receiver(f"{engine_id}.rank-0")
        sender.send(SMALL.weights(3))
        assert follower.wait_applied(3, WAIT_S) == 3
        until("no lag", lambda: metrics(engine_id)["lag_versions"] == 0)
        assert metrics(engine_id)["failures_total"] == 1
    assert (during["version_applied"], during["version_available"]) == (1, 2)
    assert during["failures_total"] == during["lag_versions"] == 1
    assert rank is not None
    assert rank.stats["failures"] == 1
    assert len([line for line in lines(caplog) if "not this model's tensors" in line]) == 1
    staging = [
        r for r in caplog.records if r.name == "dbuffer.receive.stager" and r.levelname == "ERROR"
    ]
    assert len(staging) == 1


def test_log_says_when_following_begins_and_what_a_switch_took(
    sender: dbuffer.WeightSender, store: Path, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ENGINE)
    sender.send(SMALL.weights(1))
    with Follower(LightEngine(), options(store, engine_id)) as follower:
        follower.sync()
    began, switched = [r.getMessage() for r in caplog.records if r.name in LOGS]
    weights = "weights that are no version of its store"
    assert began == f"{engine_id} follows {store}, and serves {weights}"
    assert switched.startswith(f"{engine_id} serves version 1: ready on all ranks after ")
    assert "staged in " in switched
    assert " ms), paused for " in switched


# Weights that something else wrote or discarded


def reload_another_checkpoint(engine: LightEngine) -> None:
    engine.model.tensors = SMALL.weights(0)
    engine.endpoint.note_foreign_load("reload_weights")


def sleep_and_lose_the_weights(engine: LightEngine) -> None:
    engine.endpoint.note_asleep(is_lost=True)
    engine.model.tensors = SMALL.weights(0)
    engine.endpoint.note_awake()


def write_unnoticed(engine: LightEngine) -> None:
    engine.model.tensors = SMALL.weights(0)


@contextlib.contextmanager
def serving_version_1(
    sender: dbuffer.WeightSender, store: Path
) -> Iterator[tuple[LightEngine, Follower]]:
    engine = LightEngine()
    sender.send(SMALL.weights(1))
    with Follower(engine, options(store)) as follower:
        follower.sync()
        yield engine, follower


@pytest.mark.parametrize("lose", [reload_another_checkpoint, sleep_and_lose_the_weights])
def test_lost_weights_are_unknown_until_a_sync_brings_the_version_again(
    sender: dbuffer.WeightSender, store: Path, lose: Callable[[LightEngine], None]
) -> None:
    with serving_version_1(sender, store) as (engine, follower):
        lose(engine)
        record = DoubleBuffer(store).receiver("engine")
        assert record is not None
        assert record.applied_version is None
        with about_no_version(engine) as labels:
            switch = follower.sync()
        assert switch is not None
        assert switch.version == engine.version == 1
        assert labels == [UNKNOWN_VERSION, "1"]
        assert follower.sync() is None
        sender.wait_applied(1, receivers=["engine"], timeout_s=WAIT_S)


@contextlib.contextmanager
def about_no_version(engine: LightEngine) -> Iterator[list[str]]:
    """Labels that an engine is given meanwhile."""
    labels: list[str] = []
    give = engine.set_weight_version

    def note(version: str) -> None:
        labels.append(version)
        give(version)

    engine.set_weight_version = note  # type: ignore[method-assign]
    yield labels
    del engine.set_weight_version  # type: ignore[method-assign]


def test_forced_sync_brings_the_version_again(sender: dbuffer.WeightSender, store: Path) -> None:
    with serving_version_1(sender, store) as (engine, follower):
        write_unnoticed(engine)
        assert follower.sync() is None
        switch = follower.sync(force=True)
        assert switch is not None
        assert (switch.version, engine.version, engine.label) == (1, 1, "1")


def test_forced_sync_with_an_empty_store_does_nothing(store: Path) -> None:
    engine = LightEngine()
    with Follower(engine, options(store)) as follower:
        assert follower.sync(force=True) is None
        assert engine.label == "default"


def test_sleeping_engine_is_busy_and_untouched(sender: dbuffer.WeightSender, store: Path) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        engine.endpoint.note_asleep(is_lost=False)
        for _ in range(2):
            with pytest.raises(EngineBusyError, match="wake it up first"):
                follower.sync()
        assert (engine.version, engine.label) == (1, "1")
        engine.endpoint.note_awake()
        assert follower.sync() is not None
        assert (engine.version, engine.label) == (2, "2")


def test_engine_that_falls_asleep_in_a_switch_is_not_resumed(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        pause = engine.pause

        def pause_and_fall_asleep(mode: str) -> None:
            pause(mode)
            engine.endpoint.note_asleep(is_lost=False)

        engine.pause = pause_and_fall_asleep  # type: ignore[method-assign]
        with pytest.raises(EngineBusyError):
            follower.sync()
        assert engine.paused, "its weights may be gone: whoever wakes it resumes it"


def test_sleeping_server_is_not_resumed_when_following_begins(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    engine = LightEngine(is_server=True)
    engine.may_be_left_paused = engine.paused = True  # as one that sleeps says
    engine.endpoint.note_asleep(is_lost=False)
    sender.send(SMALL.weights(1))
    with Follower(engine, options(store)) as follower:
        with pytest.raises(EngineBusyError):
            follower.sync()
        assert engine.paused
        engine.endpoint.note_awake()
        assert follower.sync() is not None
        assert engine.paused, "whoever wakes it resumes it"


def test_lost_weights_are_brought_again_in_the_background(
    sender: dbuffer.WeightSender, store: Path, engine_id: str
) -> None:
    with following(sender, store, engine_id) as (engine, _):
        reload_another_checkpoint(engine)
        until("the version is there again", lambda: (engine.version, engine.label) == (1, "1"))


def test_lost_layers_that_no_version_has_come_from_the_checkpoint(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    engine = LightEngine()
    sender.send(SMALL.weights(1))
    with Follower(engine, options(store, partial=True)) as follower:
        follower.sync()
        loaded = []
        engine.model.load_checkpoint = lambda: loaded.append("checkpoint")  # type: ignore[method-assign]
        reload_another_checkpoint(engine)
        assert follower.sync() is not None
        assert (engine.version, engine.label, loaded) == (1, "1", ["checkpoint"])


def test_store_that_is_begun_anew_while_the_engine_sleeps_is_followed(
    shm_path: Path,
) -> None:
    store = shm_path / "store"
    engine = LightEngine()
    with dbuffer.WeightSender(store) as sender:
        for version in (1, 2, 3):
            sender.send(SMALL.weights(version))
        follower = Follower(engine, options(store))
        follower.sync()
    engine.endpoint.note_asleep(is_lost=False)
    shutil.rmtree(store)
    with dbuffer.WeightSender(store) as sender, follower:
        sender.send(SMALL.weights(4))
        staged = DoubleBuffer(store)
        until(
            "it is staged",
            lambda: (record := staged.receiver("engine.rank-0")) and record.staged_version,
        )
        engine.endpoint.note_awake()
        assert follower.sync() is not None
        assert (engine.version, engine.label) == (4, "1")


def test_failed_load_after_lost_weights_goes_back_to_nothing_else(
    sender: dbuffer.WeightSender, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_version_1(sender, store) as (engine, follower):
        reload_another_checkpoint(engine)
        engine.model.failing_loads = 1
        assert follower.sync() is not None
        assert (engine.version, engine.label) == (1, "1")
    assert "going back" not in caplog.text
    assert "loading version 1 once more" in caplog.text


# What is refused at once


def test_version_above_the_newest_is_refused_at_once(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with serving_version_1(sender, store) as (engine, _):
        started = time.monotonic()
        with pytest.raises(EngineUpdateError, match=r"version 99 was not published .* newest is 1"):
            engine.do(RankRequest("update", update=UpdateRequest(version=99)))
        assert time.monotonic() - started < 2
        assert (engine.version, engine.label) == (1, "1")


def test_second_follower_of_an_engine_and_a_store_is_refused(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with serving_version_1(sender, store) as (engine, follower):
        second = Follower(engine, options(store))
        for begin in (second.require_followable, second.sync):
            with pytest.raises(StoreBusyError, match="another follower in this process"):
                begin()
        sender.send(SMALL.weights(2))
        assert follower.sync() is not None
        assert (engine.version, engine.label) == (2, "2")
    engine = LightEngine()
    with Follower(engine, options(store)) as third:  # the first is closed
        third.sync()
        assert engine.version == 2


def test_switch_by_another_process_is_learned(sender: dbuffer.WeightSender, store: Path) -> None:
    """A server may have two followers that do not know of each other."""
    with about_to_switch(sender, store) as (engine, follower):
        until("it is ready", follower.is_ready)
        engine.do(RankRequest("update", update=UpdateRequest(at_least=2)))
        assert follower.sync() is None
        assert (follower.applied, engine.label) == (2, "2")


def test_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("store", "local_store"):
        with pytest.raises(OptionError, match=f"invalid {name} .*path of"):
            EngineOptions(**{"store": str(tmp_path), name: str(tmp_path / "file")})


# How a switch ended: never by what a message says


def test_failed_load_that_was_taken_back_leaves_the_label(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        engine.model.failing_loads = 1
        with pytest.raises(EngineUpdateError, match="serves on with version 1"):
            follower.sync()
        assert (engine.label, engine.version, engine.paused) == ("1", 1, False)
        assert follower.sync() is not None
        assert (engine.label, engine.version) == ("2", 2)


def test_broken_engine_is_told_by_its_record(sender: dbuffer.WeightSender, store: Path) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        engine.model.failing_loads = 3
        with pytest.raises(EngineBrokenError):
            follower.sync()
        assert engine.model.refuses is not None
        assert engine.label == UNKNOWN_VERSION
        assert follower.sync() is not None
        assert (engine.label, engine.version, engine.model.refuses) == ("2", 2, None)


@pytest.mark.parametrize(
    "error",
    [
        # As from another process: only a message, and one that says what is not so.
        RuntimeError("a proxy says: the engine serves on with version 1"),
        EngineUpdateError("half-loaded weights are not what this is about"),
    ],
    ids=repr,
)
def test_lost_answer_is_not_believed_whatever_it_says(
    sender: dbuffer.WeightSender, store: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's record tells how an attempt ended; an answer only says when to read it."""
    with about_to_switch(sender, store) as (engine, follower):
        engine.lost_answer = error
        switch = follower.sync()
        assert switch is not None
        assert switch.version == engine.version == follower.applied == 2
        assert (engine.label, engine.paused) == ("2", False)
        assert [str(error) in line for line in lines(caplog)] == [True]
        assert follower.sync() is None


def test_engine_without_a_record_of_the_attempt_is_of_no_version_until_it_is_asked(
    sender: dbuffer.WeightSender, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        until("it is ready", follower.is_ready)
        engine.lost_answer = RuntimeError("a proxy says: the engine serves on with version 1")
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "replace_file", full)
            with pytest.raises(EngineUpdateError, match="a proxy says"):
                follower.sync()
        assert (engine.label, engine.version, engine.paused) == (UNKNOWN_VERSION, 2, False)
        assert follower.sync() is None
        assert (engine.label, follower.applied) == ("2", 2)


def full(*_: object, **__: object) -> None:
    raise StoreFullError("no room")


def test_engine_that_takes_no_label_is_not_resumed_under_that_of_other_weights(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        engine.set_weight_version = fail_to_label  # type: ignore[method-assign]
        with pytest.raises(EngineUpdateError, match="no label"):
            follower.sync()
        assert (engine.label, engine.version, engine.paused) == ("1", 2, True)
        del engine.set_weight_version  # type: ignore[method-assign]
        assert follower.sync() is None
        assert (engine.label, engine.paused) == ("2", False)


def fail_to_label(version: str) -> None:
    raise EngineUpdateError("no label")


def test_word_of_an_earlier_attempt_is_not_taken_for_this_one(
    sender: dbuffer.WeightSender, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with about_to_switch(sender, store) as (engine, follower):
        until("it is ready", follower.is_ready)
        # The record goes on saying that version 1 is served, of the attempt before.
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "replace_file", full)
            with pytest.raises(EngineUpdateError, match="did not acknowledge version 2"):
                follower.sync()
        assert (engine.label, engine.version) == (UNKNOWN_VERSION, 2)


# A pause that could not be ended


def test_pause_that_could_not_be_ended_is_ended_by_the_next_sync(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    with left_paused(sender, store) as (engine, follower):
        engine.error = away
        with pytest.raises(EngineUnreachableError):
            follower.sync()
        assert engine.paused
        engine.error = None
        assert follower.sync() is None
        assert (engine.label, engine.paused) == ("2", False)
        engine.error = away
        with pytest.raises(EngineUnreachableError):
            follower.sync()
        engine.error = None
        follower.start()
        assert (engine.label, follower.applied) == ("2", 2)


@contextlib.contextmanager
def left_paused(
    sender: dbuffer.WeightSender, store: Path
) -> Iterator[tuple[LightEngine, Follower]]:
    """An engine that could not be resumed after a switch."""
    with about_to_switch(sender, store, is_server=True) as (engine, follower):
        engine.failing_resumes = 1
        with pytest.raises(EngineUpdateError, match="not now"):
            follower.sync()
        assert engine.paused
        yield engine, follower


def test_follower_that_ends_ends_its_pause(store: Path, sender: dbuffer.WeightSender) -> None:
    with left_paused(sender, store) as (engine, _):
        pass
    assert not engine.paused
    assert (engine.label, engine.version) == ("2", 2)


def test_pause_that_cannot_be_ended_at_the_end_is_logged(
    store: Path, sender: dbuffer.WeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    with left_paused(sender, store) as (engine, _):
        engine.failing_resumes = 1
    assert "engine is left paused: not now" in caplog.text


def test_an_engine_that_has_ended_is_not_left_paused(
    store: Path, sender: dbuffer.WeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is stopped in a switch takes its engine down first."""
    with left_paused(sender, store) as (engine, _):
        engine.error = lambda: EngineEndedError("the engine is dead")
    assert "left paused" not in caplog.text


def test_engine_is_resumed_while_its_store_cannot_be_followed(
    store: Path, sender: dbuffer.WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise StoreAccessError("the mount is away")

    with left_paused(sender, store) as (engine, follower):
        engine.error = away
        with pytest.raises(EngineUnreachableError):
            follower.sync()
        assert engine.paused
        engine.error = None
        with monkeypatch.context() as patch:
            patch.setattr(Rank, "make_check", fail)
            with pytest.raises(EngineUpdateError, match="the mount is away"):
                follower.sync()
        assert not engine.paused
        assert engine.label == UNKNOWN_VERSION, "nobody has asked it what it has"
        follower.sync()
        assert engine.label == "2"


def test_pause_for_another_store_is_ended_by_the_next_sync(
    store: Path, sender: dbuffer.WeightSender, shm_path: Path
) -> None:
    engine = LightEngine()
    follower = Follower(engine, options(store))
    sender.send(SMALL.weights(1))
    follower.sync()
    with dbuffer.WeightSender(shm_path / "other") as other:
        other.send(SMALL.weights(7))
        engine.failing_resumes = 1
        with pytest.raises(EngineUpdateError, match="not now"):
            follower.apply_once(str(shm_path / "other"))
    assert engine.paused
    follower.sync()
    assert not engine.paused
    follower.close()


def test_other_store_that_is_empty_changes_nothing(
    sender: dbuffer.WeightSender, store: Path, shm_path: Path
) -> None:
    with serving_version_1(sender, store) as (engine, follower):
        follower.apply_once(str(shm_path / "empty"))
        assert (engine.version, engine.label, follower.applied) == (1, "1", 1)
        assert follower.sync() is None


def test_version_of_another_store_is_none_of_this_one(
    sender: dbuffer.WeightSender, store: Path, shm_path: Path
) -> None:
    with serving_version_1(sender, store) as (engine, follower):
        with dbuffer.WeightSender(shm_path / "other") as other:
            other.send(SMALL.weights(7))
            follower.apply_once(str(shm_path / "other"))
        assert (engine.version, engine.label, follower.applied) == (7, UNKNOWN_VERSION, None)
        assert follower.sync() is not None
        assert (engine.version, engine.label, follower.applied) == (1, "1", 1)


def test_what_no_waiting_mends_is_raised_at_once(store: Path) -> None:
    engine = LightEngine()
    with pytest.raises(OptionError, match="no store given"):
        Follower(engine).require_followable()
    engine.error = lambda: UnsupportedError("no loader")
    with pytest.raises(UnsupportedError):
        Follower(engine, options(store)).require_followable()
    engine.error = away
    Follower(engine, options(store)).require_followable()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, UnsupportedError, "has no /server_info: .*; give its address without /v1"),
        (401, OptionError, r"refuses /server_info with this API key \(401\)"),
    ],
)
def test_server_that_waiting_does_not_change_is_refused_at_once(
    store: Path, kind: str, status: int, error: type[Exception], message: str
) -> None:
    pytest.importorskip("httpx")

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    follow = importlib.import_module(f"dbuffer.integrations.{kind}").follow
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(error, match=message):
                follow(f"http://127.0.0.1:{server.server_port}/v1", store)
        finally:
            server.shutdown()
            thread.join()


# The command line


def test_follow_command_survives_trouble_of_a_moment(
    sender: dbuffer.WeightSender, store: Path, tmp_path: Path
) -> None:
    with Command(tmp_path, "follow", store, "--json", "--count", 2) as follower:
        sender.send(SMALL.weights(1))
        assert '"version": 1' in follower.line(0)
        mend = make_group_writable(store)
        assert follower.line_of_errors(0)
        mend()
        sender.send(SMALL.weights(2))
        assert '"version": 2' in follower.line(1)
        assert follower.wait(WAIT_S) == 0
        assert "works again" in " ".join(follower.errors().split())


def test_follow_command_names_what_is_wrong_from_the_start(
    sender: dbuffer.WeightSender, store: Path, tmp_path: Path
) -> None:
    sender.send(SMALL.weights(1))
    mend = make_group_writable(store)
    with Command(tmp_path, "follow", store) as follower:
        code, _, errors = follower.communicate(WAIT_S)
    mend()
    assert code == 1
    assert "others can write to" in " ".join(errors.split())


def test_follow_command_waits_for_a_server_in_one_line(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    url = ["http://127.0.0.1:9", "--timeout-s", "3"]
    with Command(tmp_path, "follow-server", store, *url) as follower:
        code, _, errors = follower.communicate(WAIT_S)
    assert code == 3
    assert errors.count("trying again") == 1
    assert "ERROR" not in errors


# The middleware: what it answers a server that starts, or ends


class Lifespan:
    """A server's side of the protocol, with the application that does nothing."""

    def __init__(self, engine_client: Any) -> None:
        state = SimpleNamespace(engine_client=engine_client)
        self._scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._task = asyncio.create_task(
            FollowStore(self._app)(self._scope, self._to_app.get, self.answers.put)  # type: ignore[arg-type]
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        for step in ("startup", "shutdown"):
            assert await receive() == {"type": f"lifespan.{step}"}
            await send({"type": f"lifespan.{step}.complete"})

    async def tell(self, step: str) -> None:
        await self._to_app.put({"type": f"lifespan.{step}"})

    async def do(self, step: str) -> dict[str, Any]:
        await self.tell(step)
        return await asyncio.wait_for(self.answers.get(), WAIT_S)

    async def end(self) -> None:
        """What it raises, if it raises."""
        await asyncio.wait_for(self._task, WAIT_S)


@pytest.fixture
def following_with(monkeypatch: pytest.MonkeyPatch, store: Path) -> Callable[..., SimpleNamespace]:
    """What vLLM's server has of an engine, with an engine of ours to be followed in its place."""

    def make(
        engine: LightEngine, *, load_format: str = "auto", servers: int = 1
    ) -> SimpleNamespace:
        settings = {"store": str(store), "timeout_s": 1, "poll_interval_s": 0.05, "plan": False}
        given = EngineOptions.parse(settings)
        monkeypatch.setattr(
            "dbuffer.integrations.vllm.middleware.follow",
            lambda *_, **__: BackgroundFollower(Follower(engine, given)),
        )
        return SimpleNamespace(
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(_api_process_count=servers),
                load_config=SimpleNamespace(load_format=load_format),
                additional_config={"dbuffer": settings},
            )
        )

    return make


async def refusal(engine_client: Any) -> str:
    lifespan = Lifespan(engine_client)
    answer = await lifespan.do("startup")
    await lifespan.end()
    assert answer["type"] == "lifespan.startup.failed"
    message: str = answer["message"]
    assert "\n" not in message
    return message


def test_server_does_not_start_from_an_insecure_store(
    sender: dbuffer.WeightSender, store: Path, following_with: Any
) -> None:
    sender.send(SMALL.weights(1))
    client = following_with(LightEngine())
    mend = make_group_writable(store)
    try:
        assert "others can write to" in asyncio.run(refusal(client))
    finally:
        mend()


def test_server_does_not_start_whatever_goes_wrong(following_with: Any) -> None:
    engine = LightEngine()
    engine.error = lambda: RuntimeError("a bug\nin two lines")
    assert "RuntimeError: a bug in two lines" in asyncio.run(refusal(following_with(engine)))


def test_dummys_weights_are_not_served_when_no_version_comes_in_time(
    following_with: Any, store: Path
) -> None:
    client = following_with(LightEngine(), load_format="dummy")
    message = asyncio.run(refusal(client))
    assert f"there is nothing to serve before there is a version in {store}" in message
    assert "within 1 s" in message


def test_engine_with_weights_of_its_own_is_ready_with_an_empty_store(following_with: Any) -> None:
    async def run() -> None:
        lifespan = Lifespan(following_with(LightEngine()))
        assert await lifespan.do("startup") == {"type": "lifespan.startup.complete"}
        assert await lifespan.do("shutdown") == {"type": "lifespan.shutdown.complete"}
        await lifespan.end()

    asyncio.run(run())


def test_following_ends_before_the_server_does_and_raises_nothing(
    sender: dbuffer.WeightSender, following_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send(SMALL.weights(1))
    engine = LightEngine()

    def close() -> None:
        engine.error = away
        raise StoreAccessError("the network is gone")

    async def run() -> None:
        lifespan = Lifespan(following_with(engine))
        await lifespan.do("startup")
        assert engine.label == "1"
        monkeypatch.setattr(engine, "close", close)
        assert await lifespan.do("shutdown") == {"type": "lifespan.shutdown.complete"}
        assert engine.error is away
        await lifespan.end()

    asyncio.run(run())
    monkeypatch.undo()
    engine.close()


# Several API servers of one engine


def test_one_api_server_follows_and_the_next_one_when_it_ends(
    sender: dbuffer.WeightSender, store: Path, following_with: Any
) -> None:
    sender.send(SMALL.weights(1))
    engine = LightEngine()
    client = following_with(engine, servers=2)

    async def run() -> None:
        first, second = Lifespan(client), Lifespan(client)
        for lifespan in (first, second):
            assert await lifespan.do("startup") == {"type": "lifespan.startup.complete"}
        assert engine.label == "1"
        await first.do("shutdown")
        sender.send(SMALL.weights(2))
        async with asyncio.timeout(WAIT_S):
            while engine.label != "2":
                await asyncio.sleep(0.01)
        await second.do("shutdown")
        await first.end()
        await second.end()
        # The name is free again.
        third = SharedFollower(instance_of_api_servers(), lambda: pytest.fail("it follows"))
        assert not third.is_led()
        assert third.try_lead()
        await third.aclose()

    asyncio.run(run())
    engine.close()


def test_api_server_that_stands_by_asks_the_engine_nothing(
    sender: dbuffer.WeightSender, following_with: Any
) -> None:
    sender.send(SMALL.weights(1))
    engine = LightEngine()
    client = following_with(engine, servers=2)

    async def run() -> None:
        first, second = Lifespan(client), Lifespan(client)
        await first.do("startup")
        calls = engine.calls
        await second.do("startup")
        await asyncio.sleep(2.5 * TIMING.api_server_look_s)
        assert engine.calls == calls
        for lifespan in (second, first):
            await lifespan.do("shutdown")
            await lifespan.end()

    asyncio.run(run())
    engine.close()


def test_no_api_server_is_ready_before_the_engine_is(
    sender: dbuffer.WeightSender, following_with: Any
) -> None:
    engine = LightEngine()
    client = following_with(engine, load_format="dummy", servers=2)

    async def run() -> None:
        lifespans = [Lifespan(client), Lifespan(client)]
        for lifespan in lifespans:
            await lifespan.tell("startup")
        await asyncio.sleep(2.5 * TIMING.api_server_look_s)
        assert all(lifespan.answers.empty() for lifespan in lifespans)
        sender.send(SMALL.weights(1))
        for lifespan in lifespans:
            answer = await asyncio.wait_for(lifespan.answers.get(), WAIT_S)
            assert answer == {"type": "lifespan.startup.complete"}
        for lifespan in lifespans:
            await lifespan.do("shutdown")
            await lifespan.end()

    asyncio.run(run())
    engine.close()


def test_no_api_server_starts_where_none_can_follow(
    sender: dbuffer.WeightSender, store: Path, following_with: Any
) -> None:
    sender.send(SMALL.weights(1))
    client = following_with(LightEngine(), servers=2)
    mend = make_group_writable(store)

    async def run() -> None:
        for refused in await asyncio.gather(refusal(client), refusal(client)):
            assert "others can write to" in refused

    try:
        asyncio.run(run())
    finally:
        mend()


# Replicas


class Replica(LightEngine):
    """One of several that step each by itself."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._replica = name

    def facts(self) -> EngineFacts:
        return replace(super().facts(), replica=self._replica)

    def make_rank(self) -> Rank:
        rank = super().make_rank()
        rank.replica = self._replica
        return rank


@pytest.fixture
def replicas(store: Path) -> Iterator[tuple[list[Replica], BackgroundFollower]]:
    engines = [Replica(""), Replica(".dp-1")]
    followers = [Follower(engine, options(store, "several")) for engine in engines]
    with BackgroundFollower(*followers) as follower:
        yield engines, follower


def test_replicas_have_a_version_when_all_of_them_do(
    sender: dbuffer.WeightSender, replicas: tuple[list[Replica], BackgroundFollower]
) -> None:
    engines, follower = replicas
    assert follower.applied is None
    sender.send(SMALL.weights(1))
    assert follower.wait_applied(1, WAIT_S) == follower.applied == 1
    mend = fail_to_take(engines[1])
    sender.send(SMALL.weights(2))
    until("the first replica has it", lambda: follower.replicas[0].applied == 2)
    with pytest.raises(dbuffer.WaitTimeoutError, match=r"several\.dp-1 has version 1.*2 within"):
        follower.wait_applied(2, 0.2)
    assert follower.applied == 1
    assert [engine.label for engine in engines] == ["2", "1"]
    mend()
    assert follower.wait_applied(2, WAIT_S) == 2
    assert follower.error is None
    sender.wait_applied(2, receivers=["several", "several.dp-1"], timeout_s=WAIT_S)


def fail_to_take(engine: LightEngine) -> Callable[[], None]:
    """Let an engine refuse every version, until it is mended."""
    stager = engine.receiver._stager

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not now")

    stager.take = fail  # type: ignore[method-assign]
    return lambda: delattr(stager, "take")


def test_replicas_that_cannot_be_followed_are_refused_before_one_is(store: Path) -> None:
    engines = [Replica(""), Replica(".dp-1")]
    engines[1].error = lambda: UnsupportedError("not this one")
    with pytest.raises(UnsupportedError, match="not this one"):
        BackgroundFollower(*(Follower(engine, options(store)) for engine in engines))
    assert not [thread for thread in threading.enumerate() if thread.name == "dbuffer-follower"]


class MeetsInSteps(LightEngine):
    """One whose ranks can tell each other something only while it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.began_paused: list[bool] = []

    def facts(self) -> EngineFacts:
        return replace(super().facts(), begins_paused=True)

    def call(self, request: RankRequest) -> list[RankAnswer]:
        if request.call == "begin":
            self.began_paused.append(self.paused)
        return super().call(request)


def test_ranks_that_meet_in_each_step_begin_in_a_pause(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    sender.send(SMALL.weights(1))
    engine = MeetsInSteps()
    with Follower(engine, options(store)) as follower:
        follower.sync()
        assert engine.began_paused == [True]
        assert not engine.paused
        assert engine.label == "1"


def test_pause_for_a_beginning_that_fails_is_ended(
    sender: dbuffer.WeightSender, store: Path
) -> None:
    sender.send(SMALL.weights(1))
    engine = MeetsInSteps()
    engine.failing_resumes = 1
    mend = make_group_writable(store)
    with Follower(engine, options(store)) as follower:
        with pytest.raises(EngineUpdateError):
            follower.sync()  # the first resume fails, the second is ours as well
        assert not engine.paused
        mend()
        follower.sync()
        assert engine.began_paused == [True, True]
        assert not engine.paused


# The middleware, in a real uvicorn


TINY_SERVER = """
import sys
from types import SimpleNamespace

import uvicorn
from starlette.applications import Starlette

from dbuffer.integrations.vllm import FollowStore

engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
app = Starlette()
app.add_middleware(FollowStore)
app.state.engine_client = {
    "no store": engine,
    "not vLLM": None,
}[sys.argv[1]]
uvicorn.run(app, port=0)
"""

REFUSALS = {
    "no store": "FollowStore needs a store",
    "not vLLM": "FollowStore is for vLLM's API server",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_server_that_cannot_follow_does_not_start_and_says_why_in_one_line(case: str) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    with subprocess.Popen(
        [sys.executable, "-c", TINY_SERVER, case], stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(WAIT_S, process.kill)
        timer.start()
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "Uvicorn running" in line:
                process.send_signal(signal.SIGINT)
        timer.cancel()
        code = process.wait(WAIT_S)
    assert code not in (0, -signal.SIGINT), log
    assert not any("startup complete" in line for line in log)
    [reason] = [line for line in log if REFUSALS[case] in line]
    assert "this server does not start, because it cannot follow: " in reason
    assert not any("Traceback" in line for line in log)
    assert os.path.exists("/nowhere") is False  # noqa: PTH110
