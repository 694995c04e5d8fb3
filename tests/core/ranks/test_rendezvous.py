"""Ranks that meet, and those that wait in vain: who was missing, where, and for how long."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.ranks.agreement import meet
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.ports import free_port
from tests.support.worlds import World

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
            with pytest.raises(dbuffer.RankTimeoutError, match="for ranks 1, 2, which did not"):
                waiting.result()
    store = distributed.HashStore()
    for rank, other in ((0, "rank 1, which did not come"), (1, "rank 0, which came, but")):
        with pytest.raises(dbuffer.RankTimeoutError, match=other):
            meet(store, rank, 2, timeout_s=0.01)
    with pytest.raises(dbuffer.RankTimeoutError, match="1, 2, 3, 4, 5, 6, 7, 8 and 91 "):
        meet(distributed.HashStore(), 0, 100, timeout_s=0.01)


def test_store_that_is_gone_is_no_rank_that_is_late():
    port = free_port()
    server = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("127.0.0.1", port, is_master=False)
    del server
    with pytest.raises(dbuffer.RankFailedError, match=str(port)) as gone:
        meet(client, 0, 2, timeout_s=SOON_S)
    assert not isinstance(gone.value, dbuffer.RankTimeoutError)


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
