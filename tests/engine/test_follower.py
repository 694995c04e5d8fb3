"""A follower by itself: over real stores, with an engine that is a dictionary of tensors.

The engine's one rank is a real `RankReceiver`; what is left out is vLLM and SGLang, whose own tests
have the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.engine import background
from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import (
    UNKNOWN_VERSION,
    EngineFacts,
    RankAnswer,
    RankRequest,
    WeightLabel,
)
from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.engine.follower import Follower
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.mirror.mirror import Mirror
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import PublishedRecord
from dbuffer.testing import waiting
from dbuffer.testing.engines import FakeEngine, FakeRank
from tests.support.light_engines import WAIT_S, Scene, nearly_idle, options
from tests.support.patterns import SMALL

pytestmark = pytest.mark.timing(retry_min_s=0.05)

until = functools.partial(waiting.until, timeout_s=WAIT_S)

NOT_IN_VAIN_S = 0.3
"""Wait for what must not come."""


@pytest.fixture
def other_store(shm_path: Path) -> str:
    """A store that holds version 1, of value 7."""
    with dbuffer.WeightSender(shm_path / "other") as other:
        other.send(SMALL.weights(7))
    return str(shm_path / "other")


def test_first_version_of_a_store_that_comes_later_does_not_fit(store, engine_id, caplog):
    """When the engine began, there was no store to write its record into."""
    with Scene(store, engine_id, caplog).background(), dbuffer.WeightSender(store) as sender:
        sender.send({"another": torch.ones(3)})
        with pytest.raises(dbuffer.ReceiverFailedError, match="not this model's tensors"):
            sender.wait_applied(1, receivers=[engine_id], timeout_s=WAIT_S)
        because = f"{engine_id} is at no version, because of: .*not this model's tensors"
        with pytest.raises(dbuffer.WaitTimeoutError, match=because):
            sender.wait_applied(1, receivers=1, timeout_s=0)


@pytest.mark.timing(rank_gone_s=0.1)
def test_server_that_ends_while_a_version_gets_ready_is_not_waited_for(scene):
    engine = scene.engine
    with scene.about_to_switch(is_server=True) as follower:
        records = scene.store.glob("receivers/*.json")
        records = {path: json.loads(path.read_text()) for path in records}
        first = DoubleBuffer(scene.store).pointer().lineage.at(1)
        engine.endpoint.end()
        process = subprocess.Popen(["true"])
        process.wait()
        for path, record in records.items():
            path.write_text(json.dumps(record | {"pid": process.pid, "staged": first}))
        with pytest.raises(dbuffer.EngineUnreachableError, match="version 2"):
            follower.sync(timeout_s=WAIT_S)
        engine.endpoint = RankEndpoint()
        assert follower.sync().version == engine.version == 2


# What happens to the store


@contextlib.contextmanager
def group_writable(store: Path) -> Iterator[None]:
    store.chmod(0o770)
    yield
    store.chmod(0o700)


@contextlib.contextmanager
def spoiled_pointer(store: Path) -> Iterator[None]:
    whole = (store / "CURRENT").read_bytes()
    (store / "CURRENT").write_bytes(b"{")
    yield
    (store / "CURRENT").write_bytes(whole)


@contextlib.contextmanager
def no_descriptors(store: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Below what is open, and not 0: poll() of two files, in the watcher, is no invalid call.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("damage", [group_writable, spoiled_pointer, no_descriptors])
def test_trouble_of_a_moment_ends_and_following_goes_on(scene, damage):
    with scene.following() as follower:
        until("it is known to follow", lambda: scene.metrics().get("following") == 1)
        with damage(scene.store):
            until("it is noticed", lambda: scene.metrics()["following"] == 0)
            until("it is tried again", lambda: scene.metrics()["failures_total"] >= 3)
            during = scene.metrics()
        scene.publish(2)
        assert follower.wait_applied(2, WAIT_S) == 2
        until("it is over", lambda: any("recovered" in line for line in scene.lines()))
        after = scene.metrics()
    assert scene.engine.version == 2
    # What is not known is not said, and what is known is true.
    assert not {"version_available", "lag_versions", "lag_seconds"} & set(during)
    assert during["version_applied"] == 1
    assert (after["following"], after["version_available"], after["lag_versions"]) == (1, 2, 0)
    # One incident, which began and ended.
    began, *more, ended = scene.lines()
    assert "trying again" in began
    assert "recovered" in ended
    assert len(more) <= 1  # its rank may find out a moment later that all is well


# What happens to the engine


def away() -> Exception:
    return dbuffer.EngineUnreachableError("http://localhost:1 does not answer: connection refused")


def dead() -> Exception:
    return dbuffer.EngineEndedError("the engine is dead")


def test_server_that_dies_costs_a_look_a_retry_and_one_line(scene):
    engine = scene.engine
    with scene.following(is_server=True) as follower:
        engine.error = away
        until("it is noticed", lambda: isinstance(follower.error, dbuffer.EngineUnreachableError))
        calls = engine.calls
        with nearly_idle():
            until("four retries", lambda: scene.metrics()["failures_total"] >= 5, every_s=0.02)
        calls = engine.calls - calls
        during = scene.metrics()  # with the failures up to these calls, or more
        assert calls <= 2 * during["failures_total"]
        [line] = scene.lines()
        assert str(away()) in line
        engine.error = None
        scene.publish(2)
        assert follower.wait_applied(2, WAIT_S) == 2
    assert engine.serves == (2, "2")
    # Nobody knows what a server has that does not answer.
    assert during["following"] == during["run"] == 0
    assert not {"version_applied", "version_available", "lag_versions"} & set(during)


def test_signal_is_handled_while_a_follower_waits_for_its_switch(scene):
    """A signal that comes just before the main thread waits does not end the wait.

    Here another thread gets the signal, since the main thread blocks it.
    """
    began, closes, handled = threading.Event(), threading.Event(), threading.Event()
    in_time = []

    def send_signal() -> None:
        began.set()
        closes.wait(WAIT_S)
        time.sleep(NOT_IN_VAIN_S)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGINT)
        in_time.append(handled.wait(10 * NOT_IN_VAIN_S))

    before = signal.signal(signal.SIGINT, lambda *_: handled.set())
    try:
        with scene.following() as follower:
            scene.engine.rank.on_load = send_signal
            scene.publish(2)
            assert began.wait(WAIT_S)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            closes.set()
            follower.close()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
    assert in_time == [True]


def test_server_that_hangs_in_a_switch_does_not_keep_its_follower_from_closing(scene, monkeypatch):
    monkeypatch.setattr(background, "_SERVER_CLOSE_S", 0.1)
    engine, goes_on, began = scene.engine, threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        goes_on.wait(WAIT_S)

    with scene.following(is_server=True) as follower:
        engine.rank.on_load = hang
        scene.publish(2)
        assert began.wait(WAIT_S)
        started = time.monotonic()
        follower.close()
        assert time.monotonic() - started < WAIT_S / 2
        assert any("may be left paused" in line for line in scene.lines())
        goes_on.set()
        until("it is resumed all the same", lambda: engine.serves == (2, "2") and not engine.paused)
        for thread in follower._threads:
            thread.join(WAIT_S)


def test_engine_whose_program_is_busy_elsewhere_is_waited_for_without_a_failure(scene):
    engine, is_idle = scene.engine, [False]
    engine.is_idle = lambda: is_idle[0]
    with scene.following() as follower:
        is_idle[0] = True
        engine.error = lambda: dbuffer.EngineUnreachableError("its event loop is not running")
        scene.publish(2)
        with pytest.raises(dbuffer.WaitTimeoutError):
            follower.wait_applied(2, 0.5)
        engine.error, is_idle[0] = None, False
        assert follower.wait_applied(2, WAIT_S) == 2
        is_idle[0] = True
        scene.publish(3)
        until("it waits", lambda: scene.metrics()["lag_versions"] == 1)
    assert scene.metrics()["failures_total"] == 0
    assert scene.lines() == []


def test_mirror_that_ended_is_told(scene, shm_path, monkeypatch):
    def fail(*_: object) -> Any:
        raise dbuffer.OptionError("another store's versions")

    scene.publish(1)
    with scene.follower(local_store=str(shm_path / "local")) as follower:
        until("it came", lambda: follower.sync() is not None)
        monkeypatch.setattr(Mirror, "_copy_newest", fail)
        scene.publish(2)
        told = "gets no more versions of .*: OptionError: another store's versions"
        until("it has ended", lambda: follower._view._mirror.error is not None)
        with pytest.raises(dbuffer.EngineUpdateError, match=told):
            follower.sync()
        assert scene.engine.serves == (1, "1")


def test_versions_that_do_not_fit_are_told_once_and_the_next_one_is_taken(scene, sender, caplog):
    with scene.following() as follower:
        sender.send({"another": torch.ones(3)})
        until("it is tried again", lambda: scene.metrics()["failures_total"] >= 3)
        during = scene.metrics()
        until("it could have been staged again", lambda: scene.metrics()["failures_total"] >= 4)
        rank = DoubleBuffer(scene.store).receiver(f"{scene.engine_id}.rank-0")
        sender.send({"a third": torch.ones(3)})
        until("it is another incident", lambda: scene.metrics()["version_available"] == 3)
        scene.publish(4)
        assert follower.wait_applied(4, WAIT_S) == 4
        until("no lag", lambda: scene.metrics()["lag_versions"] == 0)
    assert (during["version_applied"], during["version_available"]) == (1, 2)
    assert during["lag_versions"] == 1
    assert rank.stats["failures"] == 1
    assert len([line for line in scene.lines() if "not this model's tensors" in line]) == 1
    staging = [r.levelname for r in caplog.records if r.name == "dbuffer.receive.stager"]
    assert staging.count("ERROR") == 1


# Weights that something else wrote or discarded


def reload_another_checkpoint(engine: FakeEngine) -> None:
    engine.rank.tensors = SMALL.weights(0)
    engine.endpoint.note_foreign_load("reload_weights")


def sleep_and_lose_the_weights(engine: FakeEngine) -> None:
    engine.endpoint.note_asleep(is_lost=True)
    engine.rank.tensors = SMALL.weights(0)
    engine.endpoint.note_awake()


@pytest.mark.parametrize("failing_loads", [0, 1])
@pytest.mark.parametrize("lose", [reload_another_checkpoint, sleep_and_lose_the_weights])
def test_lost_weights_are_unknown_until_a_sync_brings_the_version_again(
    scene, sender, caplog, lose, failing_loads
):
    engine = scene.engine
    with scene.serving() as follower:
        lose(engine)
        assert scene.recorded == (None, {})
        engine.rank.failing_loads = failing_loads  # there is nothing to go back to
        labels = []

        def note(label: WeightLabel) -> None:
            labels.append((label.version, label.metadata))
            FakeEngine.set_weight_version(engine, label)

        engine.set_weight_version = note
        assert follower.sync().version == engine.version == 1
        assert labels == [(UNKNOWN_VERSION, {}), ("1", {"step": 10})]
        assert ("loading version 1 once more" in caplog.text) == bool(failing_loads)
        assert "going back" not in caplog.text
        assert scene.recorded == (1, {"step": 10})
        del engine.set_weight_version
        assert follower.sync() is None
        sender.wait_applied(1, receivers=[scene.engine_id], timeout_s=WAIT_S)


@pytest.mark.parametrize("differing", [None, (), ("norm.weight",)])
def test_follower_learns_what_the_ranks_found_of_their_weights(scene, differing):
    engine, labels = scene.engine, []

    def note(label: WeightLabel) -> None:
        labels.append((label.version, label.attested_at is not None))
        FakeEngine.set_weight_version(engine, label)

    with scene.serving(attest=True) as follower:
        stager = engine.receiver._stager
        until("it was compared", lambda: stager.compared)
        stager.differing = differing
        engine.set_weight_version = note
        switch = follower.sync()
        record = DoubleBuffer(scene.store).receiver(scene.engine_id)
        assert (record.attested_at is not None) == (differing == ())
        assert scene.metrics().get("version_attested") == (1 if differing == () else None)
        if differing:
            assert switch.version == engine.version == 1
            assert labels == [(UNKNOWN_VERSION, False), ("1", False)]
        else:
            assert switch is None
            assert labels == ([("1", True)] if differing == () else [])
        calls = engine.calls
        assert follower.sync() is None
        if not differing:
            assert engine.calls == calls + 1  # for its label, and no more
        engine.endpoint.note_asleep(is_lost=True)
        with pytest.raises(dbuffer.EngineBusyError):
            follower.sync()
        assert "version_attested" not in scene.metrics()


def test_sleeping_engine_is_busy_and_is_not_resumed(scene):
    engine = scene.engine
    with scene.about_to_switch() as follower:
        engine.endpoint.note_asleep(is_lost=False)
        for _ in range(2):
            with pytest.raises(dbuffer.EngineBusyError):
                follower.sync()
        assert engine.serves == (1, "1")
        engine.endpoint.note_awake()
        assert follower.sync() is not None
        assert engine.serves == (2, "2")
        pause = engine.pause

        def pause_and_fall_asleep(mode: str) -> None:
            pause(mode)
            engine.endpoint.note_asleep(is_lost=False)

        engine.pause = pause_and_fall_asleep
        scene.publish(3)
        with pytest.raises(dbuffer.EngineBusyError):
            follower.sync()
        assert engine.paused, "its weights may be gone: whoever wakes it resumes it"


class OwnPause(FakeEngine):
    """An engine that tells this follower's pause from that of others, as one with the plugin."""

    has_own_pause = True
    is_held = False

    def is_paused(self) -> bool:
        return super().is_paused() or self.is_held

    def pause(self, mode: str) -> None:
        self.is_held = True

    def resume(self) -> None:
        self.is_held = False


def test_nothing_is_loaded_into_an_engine_that_others_resumed(scene):
    engine = scene.engine
    with scene.about_to_switch() as follower:
        engine.pause = lambda mode: None  # it is resumed at once
        with pytest.raises(dbuffer.EngineBusyError, match="resumed the engine"):
            follower.sync()
        assert engine.serves == (1, "1")
        del engine.pause
        assert follower.sync().version == 2
        assert not engine.paused


def test_version_that_comes_in_the_pause_does_not_take_the_place_of_the_one_that_is_ready(scene):
    """Staging it would keep the engine paused."""
    begun, may_end = threading.Event(), threading.Event()
    with scene.about_to_switch() as follower:
        stager, pause = scene.engine.receiver._stager, scene.engine.pause
        stage = stager._stage

        def stage_slowly(*arguments: Any) -> None:
            begun.set()
            assert may_end.wait(WAIT_S)
            stage(*arguments)

        def pause_and_publish(mode: str) -> None:
            pause(mode)
            stager._stage = stage_slowly
            scene.publish(3)
            begun.wait(NOT_IN_VAIN_S)

        scene.engine.pause = pause_and_publish
        try:
            assert follower.sync(timeout_s=WAIT_S).version == 2
        finally:
            may_end.set()
        del scene.engine.pause
        assert follower.sync().version == 3


def test_update_that_loads_nothing_has_no_figures_of_the_load_before(scene):
    with scene.serving():
        assert scene.engine.do(RankRequest("update", update=UpdateRequest())).stats == {}


def test_pause_that_others_begin_in_a_switch_is_left_to_them(scene):
    scene.engine = engine = OwnPause()

    def pause_as_others() -> None:
        engine.paused = True

    with scene.about_to_switch() as follower:
        engine.rank.on_load = pause_as_others
        assert follower.sync().version == 2
        assert (engine.paused, engine.is_held) == (True, False)
        engine.endpoint.note_asleep(is_lost=False)
        scene.publish(3)
        with pytest.raises(dbuffer.EngineBusyError):
            follower.sync()
        assert (engine.paused, engine.is_held) == (True, False), "else nobody could resume it"
    engine.is_held = True  # by a follower that was killed in a switch
    with scene.follower() as follower, pytest.raises(dbuffer.EngineBusyError):
        follower.sync()
    assert (engine.paused, engine.is_held) == (True, False)


def test_sleeping_server_is_neither_resumed_nor_paused_anew_when_following_begins(scene):
    engine = scene.engine
    pauses: list[str] = []
    engine.pause = pauses.append  # "abort" would end its requests, "wait" let them run
    engine.is_server = engine.paused = True  # a sleeping server says so
    engine.endpoint.note_asleep(is_lost=False)
    scene.publish(1)
    with scene.follower() as follower:
        with pytest.raises(dbuffer.EngineBusyError):
            follower.sync()
        assert engine.paused
        assert pauses == []
        engine.endpoint.note_awake()
        assert follower.sync() is not None
        assert engine.paused, "whoever wakes it resumes it"


# What is refused at once


def test_version_above_the_newest_is_refused_at_once(scene):
    with scene.serving(timeout_s=WAIT_S):
        started = time.monotonic()
        with pytest.raises(dbuffer.EngineUpdateError, match=r"version 99 .* 1"):
            scene.engine.do(RankRequest("update", update=UpdateRequest(version=99)))
        assert time.monotonic() - started < WAIT_S / 2
        assert scene.engine.serves == (1, "1")


def test_second_follower_of_an_engine_is_refused(scene, other_store):
    with scene.serving() as follower:
        for second in (scene.follower(), Follower(scene.engine, options(Path(other_store)))):
            for begin in (second.require_followable, second.sync):
                with pytest.raises(dbuffer.StoreBusyError):
                    begin()
        scene.publish(2)
        assert follower.sync() is not None
        assert scene.engine.serves == (2, "2")
    scene.engine = FakeEngine()
    with scene.follower() as third:  # the first is closed
        third.sync()
        assert scene.engine.version == 2


def test_ranks_that_were_let_follow_no_store_follow_again(scene):
    """As by vLLM's `shutdown_weight_transfer_engine`, by which a trainer takes its leave."""
    with scene.serving() as follower:
        scene.engine.do(RankRequest("end"))
        sleep_and_lose_the_weights(scene.engine)
        assert follower.sync() is not None
        assert scene.engine.serves == (1, "1")
        scene.engine.do(RankRequest("end"))
        scene.publish(2)
        assert follower.sync() is not None
        assert scene.engine.serves == (2, "2")


@pytest.mark.timing(rank_gone_s=0.0)
def test_ranks_that_could_not_begin_before_the_store_was_there_begin_later(
    store, engine_id, caplog
):
    """SGLang's ranks write into the store that they could not begin, and return no answers."""
    scene = Scene(store, engine_id, caplog)
    engine = scene.engine
    with scene.follower() as follower:
        engine.call = lambda request: [None]
        follower.start()
        del engine.call
        store.mkdir(mode=0o700)
        assert follower.sync() is None
        assert engine.endpoint.receiver is None, "to begin again pauses an SGLang server"
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(1))
            assert follower.sync().version == engine.version == 1


def test_ranks_that_began_before_the_store_was_there_need_not_begin_again(store, engine_id, caplog):
    """A begin pauses an SGLang server."""
    scene = Scene(store, engine_id, caplog)
    engine = scene.engine
    with scene.follower() as follower:
        follower.start()
        begun, call = [], engine.call
        engine.call = lambda request: begun.append(request.call) or call(request)
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(1))
            assert follower.sync().version == engine.version == 1
        assert "begin" not in begun


@pytest.mark.timing(rank_gone_s=0.05)
def test_ranks_that_cannot_write_records_begin_again_ever_more_rarely(store, engine_id, caplog):
    scene = Scene(store, engine_id, caplog)
    begun = []
    scene.engine.call = lambda request: begun.append(request.call) or [None]
    with scene.follower() as follower, dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        ends_at = time.monotonic() + 1.0
        while time.monotonic() < ends_at:
            with pytest.raises(dbuffer.WaitTimeoutError):
                follower.sync(timeout_s=0.0)
    assert 3 <= begun.count("begin") <= 6, "one each 0.05 s would be 20"


def fail_to_reserve() -> Any:
    raise RuntimeError("the connection is gone")


def refuse_to_reserve() -> Any:
    return [dbuffer.EngineUpdateError("rank 0 is staging a newer version")]


@pytest.mark.parametrize(
    ("reserve", "timeout_s", "error", "message"),
    [
        # Only a rank's refusal to keep a version is repeated, and not an engine's own error.
        (fail_to_reserve, None, dbuffer.EngineUpdateError, "the connection is gone"),
        (refuse_to_reserve, 0.0, dbuffer.WaitTimeoutError, "rank 0 is staging a newer version"),
    ],
)
def test_an_engine_is_not_paused_for_a_version_that_is_not_reserved(
    scene, monkeypatch, reserve, timeout_s, error, message
):
    with scene.serving() as follower:
        call, pauses = scene.engine.call, []

        def call_or_reserve(request: RankRequest) -> Any:
            return reserve() if request.call == "reserve" else call(request)

        monkeypatch.setattr(scene.engine, "call", call_or_reserve)
        monkeypatch.setattr(scene.engine, "pause", pauses.append)
        scene.publish(2)
        scene.wait_until_staged(2)
        with pytest.raises(error, match=message):
            follower.sync(timeout_s=timeout_s)
        assert not pauses
        assert scene.engine.serves == (1, "1")


def test_follower_hears_of_one_in_another_process(scene, other_store, monkeypatch):
    monkeypatch.setattr(scene.engine, "close", lambda: None)
    with scene.serving() as first:
        first._forget()
        with Follower(scene.engine, options(Path(other_store))) as second:
            second.sync()
            with pytest.raises(dbuffer.EngineUpdateError, match="another follower"):
                first.sync()
            assert scene.engine.serves == (7, "1")


def test_version_that_was_lost_between_two_followers_is_no_label(scene, monkeypatch):
    monkeypatch.setattr(scene.engine, "close", lambda: None)
    with scene.serving():
        pass
    scene.engine.endpoint.note_foreign_load("load_weights of a worker extension")
    assert scene.engine.label == "1", "nobody follows"
    with scene.follower() as follower:
        follower.start()
        assert (follower.applied, scene.engine.label) == (None, UNKNOWN_VERSION)


def test_lost_weights_are_not_waited_for_as_if_they_were_there(scene):
    with scene.following() as follower:
        sleep_and_lose_the_weights(scene.engine)
        assert follower.wait_applied(1, WAIT_S) == 1
        assert scene.engine.serves == (1, "1")


def test_switch_by_another_process_is_learned(scene):
    """A server may have two followers that do not know of each other."""
    with scene.about_to_switch() as follower:
        until("it is ready", follower.is_ready)
        scene.engine.do(RankRequest("update", update=UpdateRequest(at_least=2)))
        assert follower.sync() is None
        assert (follower.applied, scene.engine.label) == (2, "2")


def test_file_is_no_store(tmp_path):
    (tmp_path / "file").touch()
    for name in ("store", "local_store"):
        with pytest.raises(dbuffer.OptionError, match=f" {name} "):
            EngineOptions(**{"store": str(tmp_path), name: str(tmp_path / "file")})


# How a switch ended: never by what a message says


def test_failed_load_that_was_taken_back_leaves_the_label(scene, sender):
    with scene.about_to_switch() as follower:
        scene.engine.rank.failing_loads = 1
        with pytest.raises(dbuffer.EngineUpdateError, match=r"went back.* version 1"):
            follower.sync()
        record = DoubleBuffer(scene.store).receiver(scene.engine_id)
        assert "this load fails" in record.problem
        assert (record.problem_version.number, record.applied_version) == (2, 1)
        assert (scene.engine.serves, scene.engine.paused) == ((1, "1"), False)
        assert (scene.recorded, follower.applied_metadata) == ((1, {"step": 10}), {"step": 10})
        assert scene.metrics()["lag_steps"] == 10
        assert follower.sync() is not None
        assert scene.engine.serves == (2, "2")
        assert (scene.recorded, follower.applied_metadata) == ((2, {"step": 20}), {"step": 20})
        record = DoubleBuffer(scene.store).receiver(scene.engine_id)
        assert (record.problem, record.problem_version) == (None, None)
        assert scene.metrics()["lag_steps"] == 0
        sender.send(SMALL.weights(3))
        follower.sync()
        assert "lag_steps" not in scene.metrics(), "this version tells no step"
        scene.publish(4)
        follower.sync()
        assert scene.metrics()["lag_steps"] == 0
    assert "lag_steps" not in scene.metrics()


@pytest.mark.parametrize("failing_resumes", [0, 1])
def test_broken_engine_is_told_by_its_record(scene, failing_resumes):
    with scene.about_to_switch() as follower:
        scene.engine.rank.failing_loads, scene.engine.failing_resumes = 3, failing_resumes
        with pytest.raises(dbuffer.EngineBrokenError):
            follower.sync()
        assert scene.engine.paused == bool(failing_resumes)
        assert scene.engine.rank.refuses is not None
        assert (scene.engine.label, follower.applied) == (UNKNOWN_VERSION, None)
        assert scene.recorded == (1, {"step": 10})
        assert follower.sync() is not None
        assert follower.applied_metadata == {"step": 20}
        assert (scene.engine.serves, scene.engine.rank.refuses) == ((2, "2"), None)
        assert not scene.engine.paused


@pytest.mark.parametrize(
    "error",
    [
        # As from another process: only a message, and one that says what is not so.
        RuntimeError("a proxy says: the engine serves on with version 1"),
        dbuffer.EngineUpdateError("half-loaded weights are not what this is about"),
    ],
    ids=repr,
)
def test_lost_answer_is_not_believed_whatever_it_says(scene, error):
    """The engine's record tells how an attempt ended; its rank is asked for it again."""
    with scene.about_to_switch() as follower:
        scene.engine.lost_answer = error
        assert follower.sync().version == scene.engine.version == follower.applied == 2
        assert (scene.engine.label, scene.engine.paused) == ("2", False)
        assert [str(error) in line for line in scene.lines()] == [True]
        assert follower.sync() is None


def full(*_: object, **__: object) -> None:
    raise dbuffer.StoreFullError("no room")


def test_record_in_the_store_tells_the_outcome_if_no_answer_does(scene):
    """SGLang passes none on, so its rank writes the record at once."""
    engine = scene.engine

    def call(request: RankRequest) -> list[RankAnswer]:
        if request.call == "acknowledge":
            return [None]
        FakeEngine.call(engine, request)
        if request.call == "update":
            engine.receiver.acknowledge()
        return [None]

    with scene.about_to_switch() as follower:
        engine.call = call
        assert follower.sync().version == 2
        assert (engine.serves, scene.recorded) == ((2, "2"), (2, {"step": 20}))


@pytest.mark.parametrize(("failing_loads", "is_broken"), [(1, False), (3, True)])
def test_problem_of_a_switch_is_no_refusal_to_follow_again(scene, failing_loads, is_broken):
    """SGLang's follower learns from the engine's record whether the ranks refuse to follow."""
    with scene.about_to_switch() as follower:
        scene.engine.rank.failing_loads = failing_loads
        with pytest.raises(dbuffer.DBufferError, match="this load fails"):
            follower.sync()
        follower.start()
        record = DoubleBuffer(scene.store).receiver(scene.engine_id)
        assert (record.is_broken, record.problem is not None) == (is_broken, is_broken)
        assert record.problem_version is None
        assert follower.sync().version == 2


def test_engine_that_does_not_tell_how_an_attempt_ended_is_of_no_version_until_it_does(scene):
    """Its record goes on saying that version 1 is served, of the attempt before."""
    engine, lost = scene.engine, RuntimeError("a proxy says: it serves on")

    def call(request: RankRequest) -> list[RankAnswer]:
        answers = FakeEngine.call(engine, request)
        if request.call in ("update", "acknowledge"):
            raise lost
        return answers

    with scene.about_to_switch() as follower:
        engine.call = call
        with pytest.raises(dbuffer.EngineUpdateError, match=str(lost)):
            follower.sync()
        assert (engine.serves, engine.paused) == ((2, UNKNOWN_VERSION), False)
        del engine.call
        assert follower.sync() is None
        assert (engine.label, follower.applied) == ("2", 2)


@pytest.mark.timing(heartbeat_s=0.05)
@pytest.mark.parametrize("answer", [RuntimeError("a proxy says: it serves on"), None], ids=str)
def test_engine_whose_store_is_full_switches_and_acknowledges_once_there_is_room(
    scene, monkeypatch, answer
):
    with scene.about_to_switch() as follower:
        until("it is ready", follower.is_ready)
        scene.engine.lost_answer = answer
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "replace_file", full)
            assert follower.sync().version == 2
            assert scene.recorded == (1, {"step": 10})
            follower.start()  # as after a restart of its program
            assert follower.sync() is None
            assert (scene.engine.serves, follower.has_applied(2)) == ((2, "2"), True)
        until("it acknowledges", lambda: scene.recorded == (2, {"step": 20}))


def test_engine_acknowledges_last_and_writes_no_record_while_it_is_paused(
    mount, scene, monkeypatch
):
    """Senders that wait for a version send requests for it at once."""
    engine, put = scene.engine, PublishedRecord.put
    written_in_the_pause, acknowledged = [], []

    def note(self: PublishedRecord, record: ReceiverRecord) -> None:
        if engine.paused and threading.current_thread() is threading.main_thread():
            written_in_the_pause.append(record.receiver)
        if record.part_of is None and record.applied_version == 2:
            acknowledged.append((engine.label, engine.paused))
        put(self, record)

    with scene.about_to_switch() as follower:
        monkeypatch.setattr(PublishedRecord, "put", note)
        assert follower.sync().version == 2
        assert (written_in_the_pause, acknowledged[:1]) == ([], [("2", False)])


def test_acknowledgement_that_does_not_arrive_is_made_by_the_next_sync(scene):
    engine = scene.engine

    def call(request: RankRequest) -> list[RankAnswer]:
        if request.call == "acknowledge":
            raise away()
        return FakeEngine.call(engine, request)

    with scene.about_to_switch() as follower:
        engine.call = call
        with pytest.raises(dbuffer.EngineUnreachableError):
            follower.sync()
        assert (engine.serves, engine.paused, scene.recorded[0]) == ((2, "2"), False, 1)
        del engine.call
        assert follower.sync() is None
        assert (engine.label, scene.recorded[0]) == ("2", 2)


def test_ranks_that_take_long_are_looked_at_ever_less_often(scene, monkeypatch):
    """Each look opens some files for each rank, maybe over a network."""
    looks, look = [], DoubleBuffer.record
    monkeypatch.setattr(DoubleBuffer, "record", lambda *args: looks.append(args) or look(*args))
    with scene.serving() as follower, pytest.raises(dbuffer.WaitTimeoutError):
        looks.clear()
        follower.sync(at_least=2, timeout_s=1.0)
    assert len(looks) < 200


def test_engine_that_takes_no_label_is_not_resumed_under_that_of_other_weights(scene):
    def fail(label: WeightLabel) -> None:
        raise dbuffer.EngineUpdateError("no label")

    engine = scene.engine
    with scene.about_to_switch() as follower:
        engine.set_weight_version = fail
        with pytest.raises(dbuffer.EngineUpdateError, match="no label"):
            follower.sync()
        assert (engine.serves, engine.paused) == ((2, "1"), True)
        del engine.set_weight_version
        assert follower.sync() is None
        assert (engine.label, engine.paused) == ("2", False)


# A pause that could not be ended


def test_pause_that_could_not_be_ended_is_ended_by_the_next_sync(scene):
    engine = scene.engine
    with scene.left_paused() as follower:
        engine.error = away
        with pytest.raises(dbuffer.EngineUnreachableError):
            follower.sync()
        assert engine.paused
        engine.error = None
        assert follower.sync() is None
        assert (engine.label, engine.paused) == ("2", False)
        engine.error = away
        with pytest.raises(dbuffer.EngineUnreachableError):
            follower.sync()
        engine.error = None
        follower.start()
        assert (engine.label, follower.applied) == ("2", 2)


@pytest.mark.parametrize("at_its_end", ["answers", "does not resume", "has ended"])
def test_follower_that_ends_ends_its_pause(scene, caplog, at_its_end):
    with scene.left_paused():
        if at_its_end == "does not resume":
            scene.engine.failing_resumes = 1
        elif at_its_end == "has ended":  # as a server that is stopped in a switch
            scene.engine.error = dead
    assert scene.engine.paused == (at_its_end != "answers")
    assert scene.engine.serves == (2, "2")
    is_told = at_its_end == "does not resume"
    assert ("left paused" in caplog.text) == ("left paused: not now" in caplog.text) == is_told


def test_engine_is_resumed_while_its_store_cannot_be_followed(scene, monkeypatch):
    def fail(*_: object, **__: object) -> Any:
        raise dbuffer.StoreAccessError("the mount is away")

    engine = scene.engine
    with scene.left_paused() as follower:
        engine.error = away
        with pytest.raises(dbuffer.EngineUnreachableError):
            follower.sync()
        assert engine.paused
        engine.error = None
        engine.endpoint.end()  # its ranks must begin again
        with monkeypatch.context() as patch:
            patch.setattr(FakeRank, "make_check", fail)
            with pytest.raises(dbuffer.EngineUpdateError, match="the mount is away"):
                follower.sync()
        assert not engine.paused
        assert engine.label == UNKNOWN_VERSION, "nobody has asked it what it has"
        follower.sync()
        assert engine.label == "2"


def test_version_of_another_store_is_none_of_this_one(scene, other_store, shm_path):
    with scene.serving() as follower:
        follower.apply_once(str(shm_path / "empty"))
        assert (scene.engine.serves, follower.applied) == ((1, "1"), 1)
        assert follower.sync() is None
        follower.apply_once(other_store)
        assert (scene.engine.serves, scene.recorded) == ((7, UNKNOWN_VERSION), (None, {}))
        assert (follower.applied, follower.applied_metadata) == (None, {})
        assert follower.sync() is not None
        assert (scene.engine.serves, follower.applied) == ((1, "1"), 1)
        assert follower.applied_metadata == {"step": 10}
        scene.engine.failing_resumes = 1
        with pytest.raises(dbuffer.EngineUpdateError, match="not now"):
            follower.apply_once(other_store)
        assert scene.engine.paused
        follower.sync()
        assert not scene.engine.paused


def test_what_no_waiting_mends_is_raised_at_once(scene):
    with pytest.raises(dbuffer.OptionError):
        Follower(scene.engine).require_followable()
    scene.engine.error = lambda: dbuffer.UnsupportedError("no loader")
    with pytest.raises(dbuffer.UnsupportedError):
        scene.follower().require_followable()
    scene.engine.error = away
    scene.follower().require_followable()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("status", "error", "names"),
    [
        (404, dbuffer.UnsupportedError, "/server_info.* /v1"),
        (401, dbuffer.OptionError, "/server_info.*401"),
        (503, dbuffer.EngineUnreachableError, "/server_info.*503"),
    ],
)
def test_server_that_refuses_is_told_from_one_that_is_away(
    store, monkeypatch, kind, status, error, names
):
    """A refusal that waiting does not change is raised at once."""
    httpx = pytest.importorskip("httpx")
    answers = httpx.MockTransport(lambda _: httpx.Response(status))
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=answers))
    follow = importlib.import_module(f"dbuffer.integrations.{kind}").follow
    with pytest.raises(error, match=names) as caught:
        with follow("http://me:secret@server:8000/v1", store) as away:
            until("it has tried", lambda: away.error is not None)
            raise away.error
    assert "secret" not in str(caught.value)


# The middleware: what it answers a server that starts, or ends

FOLLOW = "dbuffer.integrations.vllm.middleware.follow"
STARTED = {"type": "lifespan.startup.complete"}
ENDED = {"type": "lifespan.shutdown.complete"}


class Lifespan:
    """A server's side of the protocol, with an application that does nothing."""

    def __init__(self, engine_client: Any) -> None:
        from dbuffer.integrations.vllm.middleware import FollowStore  # needs vLLM's starlette

        state = SimpleNamespace(engine_client=engine_client)
        self._scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        app = FollowStore(self._app)
        self._task = asyncio.create_task(app(self._scope, self._to_app.get, self.answers.put))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        for step in ("startup", "shutdown"):
            assert await receive() == {"type": f"lifespan.{step}"}
            await send({"type": f"lifespan.{step}.complete"})

    async def tell(self, step: str) -> None:
        await self._to_app.put({"type": f"lifespan.{step}"})

    async def answer(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.answers.get(), WAIT_S)

    async def do(self, step: str) -> dict[str, Any]:
        await self.tell(step)
        return await self.answer()

    async def end(self) -> None:
        """Raise what it raises, if anything."""
        await asyncio.wait_for(self._task, WAIT_S)

    async def shut_down(self) -> None:
        assert await self.do("shutdown") == ENDED
        await self.end()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> Iterator[SimpleNamespace]:
    """vLLM's client of an engine, whose place the scene's engine takes."""
    pytest.importorskip("starlette")
    settings = {"store": str(scene.store), "poll_interval_s": 0.05, "plan": False}

    def follow(*_: Any, **__: Any) -> BackgroundFollower:
        return BackgroundFollower(Follower(scene.engine, EngineOptions.parse(settings)))

    monkeypatch.setattr(FOLLOW, follow)
    yield SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(_api_process_count=1),
            load_config=SimpleNamespace(load_format="auto"),
            additional_config={"dbuffer": settings},
        ),
        generate=None,
    )
    monkeypatch.undo()
    scene.engine.close()


def of_api_server(client: SimpleNamespace, rank: int) -> SimpleNamespace:
    """Return the client of one of two API servers."""
    parallel = SimpleNamespace(_api_process_count=2, _api_process_rank=rank)
    config = SimpleNamespace(**vars(client.vllm_config) | {"parallel_config": parallel})
    return SimpleNamespace(**vars(client) | {"vllm_config": config})


async def refusal(engine_client: Any) -> str:
    lifespan = Lifespan(engine_client)
    answer = await lifespan.do("startup")
    await lifespan.end()
    assert answer["type"] == "lifespan.startup.failed"
    assert "\n" not in answer["message"]
    return answer["message"]


def test_server_does_not_start_whatever_goes_wrong(scene, client):
    assert "FollowStore is for vLLM's API server" in asyncio.run(refusal(None))
    config = SimpleNamespace(**vars(client.vllm_config) | {"additional_config": {}})
    without_store = SimpleNamespace(vllm_config=config)
    assert "FollowStore needs a store" in asyncio.run(refusal(without_store))
    scene.publish(1)
    with group_writable(scene.store):
        assert "others can write to" in asyncio.run(refusal(client))
    scene.engine.error = lambda: RuntimeError("a bug\nin two lines")
    assert "RuntimeError: a bug in two lines" in asyncio.run(refusal(client))


def test_server_does_not_start_if_its_follower_cannot_be_closed_either(scene, client, monkeypatch):
    def close() -> None:
        raise RuntimeError("another bug")

    async def run() -> None:
        lifespan = Lifespan(client)
        assert (await lifespan.do("startup"))["type"] == "lifespan.startup.failed"
        with pytest.raises(RuntimeError, match="another bug"):
            await lifespan.end()

    client.vllm_config.load_config.load_format = "dummy"
    client.vllm_config.additional_config["dbuffer"]["timeout_s"] = 0.1
    with monkeypatch.context() as patch:
        patch.setattr(scene.engine, "close", close)
        asyncio.run(run())


def test_dummys_weights_are_not_served_when_no_version_comes_in_time(scene, client):
    client.vllm_config.load_config.load_format = "dummy"
    client.vllm_config.additional_config["dbuffer"]["timeout_s"] = 0.5
    message = asyncio.run(refusal(client))
    assert str(scene.store) in message
    assert "within 0.5 s" in message


def test_engine_with_weights_of_its_own_is_ready_without_a_version(scene, client, monkeypatch):
    def close() -> None:
        scene.engine.error = away
        raise dbuffer.StoreAccessError("the network is gone")

    async def run() -> None:
        lifespan = Lifespan(client)
        assert await lifespan.do("startup") == STARTED
        scene.publish(1)
        await asyncio.to_thread(until, "it is followed", lambda: scene.engine.label == "1")
        # Following ends before the server does, and raises nothing.
        monkeypatch.setattr(scene.engine, "close", close)
        assert await lifespan.do("shutdown") == ENDED
        assert scene.engine.error is away
        await lifespan.end()

    asyncio.run(run())


def test_engine_that_its_server_shuts_down_is_not_warned_of(scene, client, caplog):
    def shut_down() -> None:
        scene.engine.error = dead
        scene.publish(1)
        until("following ends", lambda: not is_following())

    def is_following() -> bool:
        return any(thread.name == "dbuffer-follower" for thread in threading.enumerate())

    async def run() -> None:
        client.shutdown = shut_down
        lifespan = Lifespan(client)
        assert await lifespan.do("startup") == STARTED
        await asyncio.to_thread(client.shutdown)
        await lifespan.shut_down()

    asyncio.run(run())
    assert "gets no more versions" not in caplog.text


# Several API servers of one engine


class CoreClient:
    """vLLM's client of a core that knows whether the engine is ready."""

    is_ready = False

    async def call_utility_async(self, method: str, is_ready: bool = False) -> bool:
        assert method == "dbuffer_ready"
        self.is_ready |= is_ready
        return self.is_ready


def test_no_api_server_is_ready_before_the_engine_is_and_the_first_follows(
    scene, client, monkeypatch
):
    from dbuffer.integrations.vllm import middleware

    client.vllm_config.load_config.load_format = "dummy"
    follow = middleware.follow
    followers: list[Any] = []

    def follow_once(*args: Any, **more: Any) -> Any:
        followers.append(follow(*args, **more))
        return followers[-1]

    monkeypatch.setattr(FOLLOW, follow_once)

    async def run() -> None:
        client.engine_core = CoreClient()
        lifespans = [Lifespan(of_api_server(client, rank)) for rank in (1, 0)]
        for lifespan in lifespans:
            await lifespan.tell("startup")
        await asyncio.sleep(2.5 * middleware.LOOK_S)
        assert all(lifespan.answers.empty() for lifespan in lifespans)
        scene.publish(1)
        for lifespan in lifespans:
            assert await lifespan.answer() == STARTED
        assert len(followers) == 1
        for lifespan in lifespans:
            await lifespan.shut_down()

    asyncio.run(run())


# Replicas


class Replica(FakeEngine):
    """One of several that step each by itself."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._replica = name
        self.rank.engine_id = lambda options: options.engine_id + name

    def facts(self) -> EngineFacts:
        return replace(super().facts(), replica=self._replica)


def test_replicas_have_a_version_when_all_of_them_do(sender, store):
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not now")

    engines = [Replica(""), Replica(".dp-1")]
    followers = [Follower(engine, options(store, "several")) for engine in engines]
    with BackgroundFollower(*followers) as follower:
        assert (follower.applied, follower.applied_metadata) == (None, {})
        sender.send(SMALL.weights(1), metadata={"step": 10})
        assert follower.wait_applied(1, WAIT_S) == follower.applied == 1
        stager = engines[1].receiver._stager
        stager.take = fail
        sender.send(SMALL.weights(2))
        until("the first replica has it", lambda: follower.replicas[0].applied == 2)
        with pytest.raises(dbuffer.WaitTimeoutError, match=r"several\.dp-1 has version 1"):
            follower.wait_applied(2, 0.2)
        assert (follower.applied, follower.applied_metadata) == (1, {"step": 10})
        assert [engine.label for engine in engines] == ["2", "1"]
        del stager.take
        assert follower.wait_applied(2, WAIT_S) == 2
        until("the attempt is over", lambda: follower.error is None)
        sender.wait_applied(2, receivers=["several", "several.dp-1"], timeout_s=WAIT_S)


def test_replicas_that_cannot_be_followed_are_refused_before_one_is(store):
    engines = [Replica(""), Replica(".dp-1")]
    engines[1].error = lambda: dbuffer.UnsupportedError("not this one")
    with pytest.raises(dbuffer.UnsupportedError, match="not this one"):
        BackgroundFollower(*(Follower(engine, options(store)) for engine in engines))
    assert not [thread for thread in threading.enumerate() if thread.name == "dbuffer-follower"]


class MeetsInSteps(FakeEngine):
    """An engine whose ranks can reach each other only while it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.began_paused: list[bool] = []

    def facts(self) -> EngineFacts:
        return replace(super().facts(), begins_paused=True)

    def call(self, request: RankRequest) -> list[RankAnswer]:
        if request.call == "begin":
            self.began_paused.append(self.paused)
        return super().call(request)


def test_pause_for_a_beginning_that_fails_is_ended(scene):
    scene.publish(1)
    scene.engine = engine = MeetsInSteps()
    engine.failing_resumes = 1
    with scene.follower() as follower:
        with group_writable(scene.store), pytest.raises(dbuffer.EngineUpdateError):
            follower.sync()  # the first resume fails, the second is ours as well
        assert not engine.paused
        # Its stager may just have found the store as it was.
        view = DoubleBuffer(scene.store)
        until("the rank has it ready", lambda: any(each.staged for each in view.receivers()))
        follower.sync()
        assert engine.began_paused == [True, True]
        assert not engine.paused
