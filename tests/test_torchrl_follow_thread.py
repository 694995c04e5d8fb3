"""What a sender learns of the receivers that follow by themselves, in other processes.

What engines make of it: `test_torchrl_vllm.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from support import Child, preload

import dbuffer
from dbuffer.integrations.torchrl.follow_thread import FollowThread, RegisteredReceivers

preload("dbuffer.integrations.torchrl.follow_thread")


class Reader:
    """Stand-in for an engine; it reads the whole version, after ``delay_s``."""

    def __init__(self, store: Path, delay_s: float) -> None:
        self.store = store
        self._receiver = dbuffer.WeightReceiver(store)
        self._delay_s = delay_s
        self.applied: int | None = None

    def catch_up(self) -> bool:
        version = self._receiver.wait_for_version(self.applied, 0.0)
        if version is not None:
            with self._receiver.open(acknowledge=False) as snapshot:
                if "refused" in snapshot.tensors:
                    raise dbuffer.EngineUpdateError("there is no place for 'refused'")
                time.sleep(self._delay_s)
            self.applied = version
        return True

    def wait_for_news(self, beyond: int | None, timeout_s: float, wake: threading.Event) -> None:
        self._receiver.wait_for_version(beyond, timeout_s, wake)


def follow(connection: Connection, store: Path, delay_s: float) -> None:
    thread = FollowThread(
        Reader(store, delay_s),
        is_to_be_made=True,
        allow_shared_store=False,
        poll_interval_s=0.05,
    )
    connection.send("following")
    connection.recv()
    thread.close()
    connection.send("left")


@pytest.fixture(params=["local", "network"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "network":
        monkeypatch.setenv("DBUFFER_MOUNT", "network")
    return tmp_path / "store"


def send(sender: dbuffer.WeightSender, name: str = "weight") -> int:
    return sender.send({name: torch.ones(2)}).version


def test_receivers_that_were_there_first_are_waited_for(store: Path) -> None:
    registered = RegisteredReceivers(store, allow_shared_store=False)
    with Child(follow, store, 0.2) as one, Child(follow, store, 0.0) as other:
        assert [one.receive(), other.receive()] == ["following"] * 2
        with dbuffer.WeightSender(store) as sender:
            for _ in range(2):
                version = send(sender)
                names = registered.names()
                assert len(names) == 2
                sender.wait_applied(version, receivers=names, timeout_s=30.0)
            one.send()
            assert one.receive() == "left"
            assert len(registered.names()) == 1
            with pytest.raises(dbuffer.ReceiverFailedError, match="no place for 'refused'"):
                sender.wait_applied(send(sender, "refused"), receivers=registered.names())
            sender.wait_applied(send(sender), receivers=registered.names())


def test_receiver_that_was_killed_is_told_once(store: Path) -> None:
    registered = RegisteredReceivers(store, allow_shared_store=False)
    with dbuffer.WeightSender(store) as sender, Child(follow, store, 0.0) as child:
        assert child.receive() == "following"
        sender.wait_applied(send(sender), receivers=registered.names())
        child.signal(signal.SIGKILL)
        child.wait()
        with pytest.raises(dbuffer.ReceiverFailedError, match="has ended"):
            sender.wait_applied(send(sender), receivers=registered.names())
        assert not registered.names()
