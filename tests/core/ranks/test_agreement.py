"""Ranks that meet and take steps together; who is missing or out of step is named."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.ranks import agreement
from dbuffer.ranks.agreement import Agreement, meet
from dbuffer.runtime.timing import TIMING
from dbuffer.testing.moments import at_call
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.patterns import newest
from tests.support.ports import free_port
from tests.support.soak import in_turn
from tests.support.ways import Way, mounted
from tests.support.worlds import World, world_of

world = world_of(3)


def each(ranks: Agreement, what: str, action: Callable[[], Any]) -> list[Any]:
    """Let every rank do ``action`` in a step; return its results."""
    with ranks.step(what) as step:
        step.result = action()
    return step.results


def interrupt() -> None:
    raise KeyboardInterrupt


def skip_a_step(rank: int) -> list[str]:
    """One rank makes a call that the others do not make, and all go on."""
    ranks, went = Agreement(None, timeout_s=TIMEOUT_S), []
    for number in range(5):
        if number == 2 and rank == 1:
            continue
        try:
            went.append(str(each(ranks, f"count to {number % 2}", lambda: number)))  # noqa: B023
        except dbuffer.DBufferError as error:
            went.append(f"{type(error).__name__}: {error}")
    return went


def test_a_rank_at_another_step_is_lost_on_all(world):
    for rank, went in enumerate(world.run(skip_a_step)):
        assert went[:2] == ["[0, 0, 0]", "[1, 1, 1]"]
        assert "RankFailedError: the ranks are out of step: rank 1 tries to count to 1" in went[2]
        assert all("ClosedError" in one for one in went[3:])
        assert len(went) == 5 - (rank == 1)


def skip_one_of_two(rank: int) -> list[str]:
    """As before, where the step that is missed has the name of the next."""
    ranks, went = Agreement(None, timeout_s=TIMEOUT_S), []
    for number in range(3):
        with contextlib.suppress(KeyboardInterrupt), ranks.call():
            if number == 1 and rank == 1:
                ranks._fails_together = True  # as if a second interrupt kept it from closing
                interrupt()
            try:
                went.append(str(each(ranks, "count", lambda: number)))  # noqa: B023
            except dbuffer.DBufferError as error:
                went.append(type(error).__name__)
    return went


def test_steps_of_one_name_are_told_apart_by_their_number(world):
    first, second, third = world.run(skip_one_of_two)
    assert first == third == ["[0, 0, 0]", "RankFailedError", "ClosedError"]
    assert second == ["[0, 0, 0]", "RankFailedError"]


def fail_without_a_message() -> None:
    raise AssertionError


def be_interrupted(rank: int, others_do: Callable[[], Any]) -> tuple[str, bool]:
    TIMING.ranks_end_within_s = 0.1  # nobody ends
    ranks = Agreement(None, timeout_s=TIMEOUT_S)
    with pytest.raises((KeyboardInterrupt, dbuffer.RankFailedError)) as caught:
        each(ranks, "work", interrupt if rank == 2 else others_do)
    return f"{caught.type.__name__}: {caught.value}", ranks.is_open


@pytest.mark.parametrize("others_do", [bool, fail_without_a_message])
def test_an_interrupt_in_a_step_is_heard_of_at_once(world, others_do):
    *others, interrupted = world.run(be_interrupted, others_do)
    assert interrupted == ("KeyboardInterrupt: ", False)
    for message, is_open in others:
        assert message.startswith("RankFailedError: a rank was lost")
        assert not is_open


def fail_alone(rank: int) -> str:
    """One rank fails while the others wait for it in a collective of the trainer's."""
    ranks = Agreement(None, timeout_s=TIMEOUT_S)
    trainers = distributed.new_group(timeout=datetime.timedelta(seconds=1))

    def work() -> None:
        if rank == 1:
            raise dbuffer.StoreFullError("full")
        distributed.barrier(trainers)

    with pytest.raises(dbuffer.DBufferError) as caught:
        each(ranks, "work", work)
    return f"{caught.type.__name__}: {caught.value}"


def test_the_error_of_a_rank_that_only_waited_for_another_is_not_the_one_that_all_raise(world):
    assert set(world.run(fail_alone)) == {"StoreFullError: rank 1 could not work: full"}


def collect_texts(rank: int) -> list[str]:
    ranks = Agreement(None, timeout_s=TIMEOUT_S)
    with mock.patch.object(agreement, "_MESSAGE_BYTES", 2), ranks.step("tell") as step:
        step.message = "abcdef"[rank:].encode() if rank else b""
    return [bytes(message).decode() for message in step.messages]


def test_results_of_all_ranks_reach_the_first_alone(world):
    assert world.run(collect_texts) == [["bcdef", "cdef"], [], []]


def meet_again(rank: int) -> list[int]:
    """One rank is interrupted as they meet; then all try again."""
    meet = agreement.meet

    def meet_and_be_interrupted(*args: Any, **options: Any) -> None:
        meet(*args, **options)
        interrupt()

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(agreement, "meet", meet_and_be_interrupted)
        with pytest.raises((KeyboardInterrupt, dbuffer.RankFailedError)):
            Agreement(None, timeout_s=1.0)
    distributed.barrier()  # or the one would come in time for the first try of the others
    return Agreement(None, timeout_s=TIMEOUT_S).share("count", rank)


def test_a_rank_that_is_interrupted_as_they_meet_can_meet_them_again(world):
    assert world.run(meet_again) == [[0, 1, 2]] * 3


def send_interrupted(rank: int, store: Path, way: Way, at: tuple[int, str | None]) -> list[str]:
    """A trainer whose one rank is interrupted in a send goes on with the next, without waiting."""
    TIMING.ranks_end_within_s = 0.1
    number, name = at
    went = []
    with mounted(way.mount), way.open(store) as sender:
        for version in range(1, 7):
            weights = way.weights(version)
            try:
                if version == 3 and rank == 1:
                    at_call(number, interrupt, None if name is None else frozenset({name}))
                sender.send(weights)
                went.append("")
            except (KeyboardInterrupt, dbuffer.DBufferError) as error:
                went.append(type(error).__name__)
            if rank == 0:
                assert newest(store) in (version, 2, 3)
        distributed.barrier()
    return went


WAYS = [Way("local"), Way("network"), Way("local", delta=True), Way("network", delta=True)]


@in_turn(("at", "way"), [(1, None), (40, None), (1, "allgather"), (4, "allgather")], WAYS)
def test_an_interrupted_send_is_joined_by_no_other(world, store, way, at):
    first, second, third = world.run(send_interrupted, store, way, at)
    assert second == ["", "", "KeyboardInterrupt", *["ClosedError"] * 3]
    assert first == third
    assert first[2:] == ["RankFailedError", *["ClosedError"] * 3]


# Ranks that meet, and ranks that wait in vain


SOON_S = 0.2


def test_those_who_do_not_come_are_named(tmp_path):
    """Also who came and gave up."""
    both = threading.Barrier(2)

    class Meeting(distributed.FileStore):
        """Store where two begin to wait when both have left word."""

        def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
            both.wait(TIMEOUT_S)
            super().wait(keys, timeout)

    stores = [Meeting(str(tmp_path / "meeting"), 4) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        early, late = (
            pool.submit(meet, store, rank, 4, timeout_s=SOON_S)
            for rank, store in zip((0, 3), stores, strict=True)
        )
        for waiting in (early, late):
            with pytest.raises(dbuffer.RankFailedError, match="for ranks 1, 2, which did not"):
                waiting.result()
    store = distributed.HashStore()
    for rank, other in ((0, "rank 1, which did not come"), (1, "rank 0, which came, but")):
        with pytest.raises(dbuffer.RankFailedError, match=other):
            meet(store, rank, 2, timeout_s=0.01)
    with pytest.raises(dbuffer.RankFailedError, match="1, 2, 3, 4, 5, 6, 7, 8 and 91 "):
        meet(distributed.HashStore(), 0, 100, timeout_s=0.01)


def test_store_that_is_gone_is_no_rank_that_is_late():
    port = free_port()
    server = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("127.0.0.1", port, is_master=False)
    del server
    with pytest.raises(dbuffer.RankFailedError, match=f"{port}, which does not answer"):
        meet(client, 0, 2, timeout_s=SOON_S)


# Who meets so


def make_sender_on_rank_0(rank: int, store: Path) -> str:
    if rank == 0:
        with pytest.raises(dbuffer.RankFailedError) as caught:
            dbuffer.ShardedWeightSender(store, rank_timeout_s=SOON_S, reader_timeout_s=0.0)
        message = str(caught.value)
    distributed.barrier()
    # The next one is a new meeting.
    with dbuffer.ShardedWeightSender(store) as sender:
        sender.send({"a": torch.ones(2)})
    return message if rank == 0 else ""


def test_sender_that_one_rank_makes_alone(store, tmp_path):
    with World(tmp_path, 2) as world:
        message = world.run(make_sender_on_rank_0, store)[0]
    assert f"rank 0 of 2 waited {SOON_S:g} s" in message
    assert "for rank 1, which did not come" in message
    assert str(tmp_path) in message
