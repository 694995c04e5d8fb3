"""Ranks of an engine that are stopped, or dead; and two engines of one name. No engine but ours."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import UpdateRequest
from dbuffer.engine.follower import Follower
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.rank_receiver import RankReceiver
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.engines import FakeEngine, FakeRank
from dbuffer.testing.moments import stop as freeze
from dbuffer.testing.waiting import until
from tests.support.children import Child
from tests.support.light_engines import options
from tests.support.patterns import SMALL
from tests.support.worlds import Coordinator, Failure, World, world_of

SIZE = 3
BAD = 1
TIMEOUT_S = 2.0
GIVEN_UP_S = 0.2
"""Time-out of a rank that goes on when the others have given it up: none of them comes."""
SOON_S = 60.0
NAME = "engine"
UNFIT = "unfit"
"""A tensor that one of the ranks has no place for."""


world = world_of(SIZE, "function")


def ranks(timeout_s: float = SOON_S) -> RankChannel:
    channel = RankChannel.of(Coordinator())
    channel.timeout_s = timeout_s
    return channel


def gather(rank: int, answer: Any = None, *, begins: bool = True) -> list[Any]:
    return ranks().gather((rank, answer), begins=begins)


def gather_stopped(rank: int, bad: int) -> list[Any]:
    timeout_s = GIVEN_UP_S if rank == bad else TIMEOUT_S
    # The store's host may stop before the others have read its answer from there.
    ranks(TIMEOUT_S).gather("begin", begins=True)
    if rank == bad:
        freeze()
    ranks(timeout_s).gather("step")
    return ranks(timeout_s).gather("another")


@pytest.mark.parametrize("size", [0, 100_000])
def test_everyone_hears_everyone(world, size):
    for _ in range(3):
        answers = [[rank, "x" * size] for rank in range(SIZE)]
        assert world.run(gather, "x" * size) == [answers] * SIZE
    uneven = world.run(gather_uneven, size)
    assert uneven == [["y" * size * rank for rank in range(SIZE)]] * SIZE


def gather_uneven(rank: int, size: int) -> list[Any]:
    # The longest valid option is added to the ranks' own time-out.
    return ranks(2 * threading.TIMEOUT_MAX).gather("y" * size * rank)


def gather_in_a_new_group(rank: int, rendezvous: Path) -> list[Any]:
    """Return all answers of ranks that met in another process group."""
    distributed.destroy_process_group()
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=SIZE
    )
    return gather(rank)


def test_ranks_meet_again_in_another_process_group(world, tmp_path):
    world.run(gather)
    answers = [[rank, None] for rank in range(SIZE)]
    for number in range(2):
        rendezvous = tmp_path / f"group-{number}"
        assert world.run(gather_in_a_new_group, rendezvous) == [answers] * SIZE


def num_keys(rank: int) -> int:
    for _ in range(10):
        gather(rank)
    gather(rank, begins=False)
    return ranks()._store.num_keys()


def test_answers_that_all_ranks_have_read_are_deleted(world):
    world.run(num_keys)
    before = world.run(num_keys)
    after = world.run(num_keys)
    assert max(after) <= min(before) + SIZE


WORLDS = pytest.mark.parametrize(
    ("tcp", "bad"), [(False, BAD), (True, BAD), (True, 0)], ids=["file", "tcp", "tcp, host"]
)
"""Ranks that meet in a file, or by TCP: then the process of the first one has the store."""


@WORLDS
def test_a_rank_that_is_stopped_is_named_and_the_others_go_on(tmp_path, tcp, bad):
    with World(tmp_path, SIZE, tcp=tcp) as world:
        assert len(world.run(gather)) == SIZE
        started = time.monotonic()
        world.begin(gather_stopped, bad)
        for rank in range(SIZE):
            if rank == bad:
                continue
            outcome = world.outcome(rank)
            assert isinstance(outcome, Failure)
            assert outcome.kind == "RankFailedError"
            message = outcome.message
            assert f"rank {bad} (process {world.ranks[bad].pid} on " in message
            assert f"did not answer within {TIMEOUT_S:g} s: it is stopped (SIGSTOP)" in message
            assert message.count("process") == 1, "the others are named, too"
        assert time.monotonic() - started < SOON_S
        world.ranks[bad].signal(signal.SIGCONT)
        # It hears their answers from before they gave it up, and then no more. The store's host may
        # give them up itself before they say so.
        outcome = world.outcome(bad)
        assert outcome.kind == "RankFailedError"
        assert "has given this step up" in outcome.message or bad == 0
        answers = [[rank, "again"] for rank in range(SIZE)]
        assert world.run(gather, "again") == [answers] * SIZE


@WORLDS
def test_a_rank_that_is_dead_is_named_at_once(tmp_path, tcp, bad):
    with World(tmp_path, SIZE, tcp=tcp) as world:
        assert len(world.run(gather)) == SIZE
        world.begin(die_in_gather, bad)
        world.ranks[bad].wait()
        for rank in range(SIZE):
            if rank != bad:
                started = time.monotonic()
                outcome = world.outcome(rank)
                assert outcome.kind == "RankFailedError"
                assert f"rank {bad} (process " in outcome.message
                assert "it has ended" in outcome.message
                assert time.monotonic() - started < 10 * TIMEOUT_S


def die_in_gather(rank: int, bad: int) -> list[Any]:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return gather(rank)


# An engine that is ours


class UnevenRank(FakeRank):
    """A rank of several, of which one has no place for a tensor."""

    def require_fitting(self, names: list[str]) -> None:
        if self.ranks.rank == BAD and UNFIT in names:
            raise dbuffer.WeightsMismatchError(f"{UNFIT} does not fit this rank")


_state: list[tuple[FakeRank, RankReceiver]] = []


def start(rank: int, store: Path, stop: bool = False) -> None:
    mine = UnevenRank(ranks=ranks(TIMEOUT_S if stop else SOON_S))
    endpoint = RankEndpoint()
    if rank == BAD and stop:
        freeze()
    endpoint.begin(lambda: mine, options(store, NAME))
    _state.append((mine, endpoint.receiver))


def update(rank: int, version: int, stop_at: str = "") -> int | None:
    model, receiver = _state[-1]
    # Everyone has it ready, so that what takes time is what the test is about.
    receiver._stager.take(version, timeout_s=SOON_S)
    receiver._stager.release()
    model.on_load = lambda: None
    receiver.ranks.timeout_s = TIMEOUT_S if stop_at else SOON_S

    def stop() -> None:
        receiver.ranks.timeout_s = GIVEN_UP_S
        freeze()

    if rank == BAD and stop_at == "prepare":
        stop()
    if rank == BAD and stop_at == "load":
        model.on_load = stop
    receiver.update(UpdateRequest(at_least=version))
    return model.version


def look(rank: int) -> tuple[int | None, bool]:
    model, _ = _state[-1]
    return model.version, model.refuses is not None


def test_ranks_that_one_kept_from_beginning_begin_again(world, store):
    world.run(gather)
    world.begin(start, store, True)
    for rank in range(SIZE):
        if rank != BAD:
            assert f"rank {BAD} (process {world.ranks[BAD].pid}" in world.outcome(rank).message
    world.ranks[BAD].signal(signal.SIGCONT)
    assert "has given this step up" in world.outcome(BAD).message
    world.run(start, store)


@pytest.mark.timing(last_word_s=0.2)
@pytest.mark.parametrize(("stop_at", "mended_by"), [("prepare", 3), ("load", 3), ("load", 2)])
def test_an_engine_with_a_stopped_rank_refuses_and_is_mended_by_an_update(
    world, store, stop_at, mended_by
):
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        world.run(start, store)
        assert world.run(update, 1) == [1] * SIZE
        sender.send(SMALL.weights(2))
        world.begin(update, 2, stop_at)
        for rank in range(SIZE):
            if rank != BAD:
                outcome = world.outcome(rank)
                assert outcome.kind == "EngineBrokenError"
                assert f"rank {BAD} (process {world.ranks[BAD].pid}" in outcome.message
        with pytest.raises(dbuffer.ReceiverFailedError, match=f"rank {BAD} .*stopped"):
            sender.wait_applied(2, receivers=[NAME], timeout_s=SOON_S)
        world.ranks[BAD].signal(signal.SIGCONT)
        world.outcome(BAD)
        for rank, (version, refuses) in enumerate(world.run(look)):
            # All tokens need all ranks: one that refuses is enough.
            assert refuses or rank == BAD, version
        if mended_by == 3:
            sender.send(SMALL.weights(3))
        assert world.run(update, mended_by) == [mended_by] * SIZE
        assert world.run(look) == [(mended_by, False)] * SIZE
        sender.wait_applied(mended_by, receivers=[NAME], timeout_s=SOON_S)


def try_update(rank: int, version: int, fail_at: str) -> Any:
    """Return the error of an update that one rank cannot do, the rank's version, and its loads."""
    model, receiver = _state[-1]
    model.num_loads, attempts = 0, 0

    def fail_once() -> None:
        nonlocal attempts
        attempts += 1
        if rank == BAD and fail_at == "load" and attempts == 1:
            raise RuntimeError("this load fails")

    model.on_load = fail_once
    error = None
    try:
        receiver.update(UpdateRequest(at_least=version))
    except dbuffer.DBufferError as raised:
        error = type(raised).__name__
    return error, model.version, model.num_loads


@pytest.mark.parametrize("fail_at", ["prepare", "load"])
def test_what_one_rank_cannot_do_is_done_to_none(world, store, fail_at):
    """By the weights of each rank, not by what the error says of them."""
    unfit = {UNFIT: torch.zeros(1)} if fail_at == "prepare" else {}
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        world.run(start, store)
        assert world.run(update, 1) == [1] * SIZE
        sender.send(SMALL.weights(2) | unfit)
        # In the load each takes the new version and the old one again; before it, nobody does.
        loads = {"prepare": 0, "load": 2}[fail_at]
        failed = ("EngineUpdateError", 1, loads)
        assert world.run(try_update, 2, fail_at) == [failed] * SIZE
        sender.send(SMALL.weights(3))
        assert world.run(update, 3) == [3] * SIZE


def update_apart(rank: int, taken: Path) -> int | None:
    """Take version 2 on one rank first, and version 3 on the others; return the one it has then."""
    model, receiver = _state[-1]
    stager = receiver._stager

    def take_first(*args: Any, **options: Any) -> Any:
        del stager.take
        if rank != BAD:
            return stager.take(at_least=3, timeout_s=SOON_S)
        staged = stager.take(*args, **options)
        taken.touch()
        return staged

    stager.take = take_first
    receiver.update(UpdateRequest(at_least=2))
    return model.version


def test_ranks_that_took_different_versions_all_take_the_highest(world, store):
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        world.run(start, store)
        sender.send(SMALL.weights(2))
        taken = store.with_name("taken")
        world.begin(update_apart, taken)
        until("one rank has version 2", taken.exists)
        sender.send(SMALL.weights(3))
        assert [world.outcome(rank) for rank in range(SIZE)] == [3] * SIZE
        sender.wait_applied(3, receivers=[NAME], timeout_s=SOON_S)


# Two engines of one name


def replica(connection: Connection, store: Path, instance_id: str) -> None:
    """An engine with its follower: tell what it serves, says, and is called, when asked."""
    engine = FakeEngine(instance_id=instance_id)
    with Follower(engine, options(store, NAME)) as follower:
        follower.start()
        connection.send((engine.version, follower.applied, follower.engine_id))
        while connection.recv() is not None:
            follower.sync()
            connection.send((*engine.serves, follower.applied, follower.engine_id))


def test_two_engines_of_one_name_each_serve_what_they_say(store):
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        with Child(replica, store, "first") as first:
            assert first.receive() == (0, None, NAME)
            first.send(1)
            assert first.receive() == (1, "1", 1, NAME)
            with Child(replica, store, "second") as second:
                assert second.receive() == (0, None, NAME), "what it has, it has from another"
                for version in (1, 2):
                    if version > 1:
                        sender.send(SMALL.weights(version))
                        with pytest.raises(dbuffer.WaitTimeoutError):
                            sender.wait_applied(version, receivers=[NAME], timeout_s=0)
                    for child in (first, second):
                        child.send(version)
                        assert child.receive() == (version, str(version), version, NAME)
                    sender.wait_applied(version, receivers=2, timeout_s=SOON_S)
                    sender.wait_applied(version, receivers=[NAME], timeout_s=SOON_S)
            first.signal(signal.SIGKILL)
            first.wait()
        with Child(replica, store, "third") as third:
            assert third.receive() == (0, None, NAME)
            third.send(2)
            assert third.receive() == (2, "2", 2, NAME)
    assert DoubleBuffer(store).receiver(NAME).applied_version == 2
