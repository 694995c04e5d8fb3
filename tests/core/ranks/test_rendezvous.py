"""Ranks that meet, and those that wait in vain: who was missing, where, and for how long."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge
from dbuffer.ranks.rendezvous import join, leave, meet
from tests.support.children import Child
from tests.support.ports import free_port
from tests.support.waiting import TIMEOUT_S
from tests.support.worlds import World

SOON_S = 0.2


@pytest.fixture(params=["file", "tcp", "env"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nobody has met yet."""
    if request.param == "file":
        return f"file://{tmp_path}/meeting"
    if request.param == "tcp":
        return f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return "env://"


def named(place: str) -> str:
    """What a message must say of it."""
    return os.environ["MASTER_PORT"] if place == "env://" else place


def join_and_sum(connection: Connection, place: str, rank: int, size: int, meet_s: float) -> None:
    began = time.monotonic()
    try:
        join(place, rank, size, meet_s=meet_s, timeout_s=TIMEOUT_S)
        mine = torch.tensor([float(rank)])
        distributed.all_reduce(mine)
        connection.send(mine.item())
        distributed.destroy_process_group()
    except Exception as error:
        bases = {base.__name__ for base in type(error).__mro__}
        connection.send((bases, str(error), time.monotonic() - began))


def test_ranks_that_all_come_meet(place):
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Child(join_and_sum, place, rank, 3, TIMEOUT_S)) for rank in range(3)
        ]
        assert [child.receive() for child in ranks] == [3.0] * 3
        assert [child.wait() for child in ranks] == [0] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_comes_alone_says_whom_it_waited_for(place, rank):
    with Child(join_and_sum, place, rank, 2, SOON_S) as child:
        bases, message, took_s = child.receive()
    assert {"RankTimeoutError", "RankFailedError", "TimeoutError", "RuntimeError"} <= bases
    assert f"rank {rank} of 2 waited {SOON_S:g} s" in message
    assert f"for rank {1 - rank}" in message
    assert named(place) in message
    assert "rank_timeout_s" in message
    assert SOON_S <= took_s < TIMEOUT_S


def test_those_who_do_not_come_are_named(tmp_path):
    """Also who came and gave up, or has left."""
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
            with pytest.raises(dbuffer.RankTimeoutError, match="for ranks 1, 2, which did not"):
                waiting.result()
    store = distributed.HashStore()
    for rank, other in ((0, "rank 1, which did not come"), (1, "rank 0, which came, but")):
        with pytest.raises(dbuffer.RankTimeoutError, match=other):
            meet(store, rank, 2, timeout_s=0.01)
    store = distributed.HashStore()
    meet(store, 0, 1, timeout_s=SOON_S)
    leave(store, 0)
    with pytest.raises(dbuffer.RankTimeoutError, match="rank 0"):
        meet(store, 1, 2, timeout_s=0.01)
    with pytest.raises(dbuffer.RankTimeoutError, match="1, 2, 3, 4, 5, 6, 7, 8 and 91 "):
        meet(distributed.HashStore(), 0, 100, timeout_s=0.01)


def test_store_that_is_gone_or_a_port_that_is_taken_is_no_rank_that_is_late():
    port = free_port()
    server = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("127.0.0.1", port, is_master=False)
    with pytest.raises(dbuffer.RankFailedError, match=str(port)) as taken:
        join(f"tcp://127.0.0.1:{port}", 0, 2, meet_s=SOON_S, timeout_s=SOON_S)
    del server
    with pytest.raises(dbuffer.RankFailedError, match=str(port)) as gone:
        meet(client, 0, 2, timeout_s=SOON_S)
    for caught in (taken, gone):
        assert not isinstance(caught.value, dbuffer.RankTimeoutError)


@pytest.mark.parametrize("place", ["", "nowhere", "bogus://x", "tcp://127.0.0.1", "env://"])
def test_no_place_to_meet(place, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(dbuffer.OptionError):
        join(place, 0, 2, meet_s=SOON_S, timeout_s=SOON_S)


# Who meets so


def make_sender_on_rank_0(rank: int, store: Path) -> str:
    if rank == 0:
        with pytest.raises(dbuffer.RankTimeoutError) as caught:
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


def make_bridge(connection: Connection, place: str, store: Path) -> None:
    config = BridgeConfig(
        trainer_rank=1, world_size=2, init_method=place, device="cpu", timeout_seconds=TIMEOUT_S
    )
    with pytest.raises(dbuffer.RankTimeoutError) as caught:
        VLLMWeightBridge(config, store=store, rank_timeout_s=SOON_S).initialize()
    connection.send([str(caught.value), distributed.is_initialized(), store.exists()])


def test_bridge_that_one_rank_makes_alone(store, tmp_path):
    with Child(make_bridge, f"file://{tmp_path}/meeting", store) as child:
        message, *left = child.receive()
    assert f"rank 1 of 2 waited {SOON_S:g} s" in message
    assert "for rank 0, which did not come" in message
    assert left == [False, False]
