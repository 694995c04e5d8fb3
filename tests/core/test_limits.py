"""A process that can have no more threads, and then some again."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.mirror.mirror import Mirror
from dbuffer.runtime.timing import TIMING
from tests.support.children import Child
from tests.support.patterns import load, publish
from tests.support.waiting import TIMEOUT_S, error_of

NOBODY = 65534


def become_nobody(directory: Path) -> None:
    """Give up root, which no limit of threads holds for."""
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def allow_threads(number: int | None) -> None:
    """Allow this user so many; None: as many as before."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard if number is None else number, hard))


def live_without_threads(connection: Connection, directory: Path, mount: str) -> None:
    os.environ["DBUFFER_MOUNT"] = mount
    TIMING.inotify_retry_s = 0.0
    become_nobody(directory)
    store, local = directory / "store", directory / "local"
    with (
        dbuffer.WeightSender(store, num_threads=2) as sender,
        dbuffer.WeightReceiver(store, num_threads=2, poll_interval_s=0.05) as receiver,
        dbuffer.WeightReceiver(local, receiver_id="reader") as reader,
    ):
        publish(sender, 1)
        allow_threads(1)
        if error_of(threading.Thread(target=int).start) is None:
            connection.send("no limit of threads here")
            return
        seen: dict[str, Any] = {"waited": receiver.wait_for_version(1, 0.2)}
        publish(sender, 2)
        seen["loaded"] = load(receiver)
        mirror = Mirror(store, local, poll_interval_s=0.05, num_threads=2)
        run_until(mirror, lambda: mirror.stats["failures"] > 0)
        seen["mirrored at the limit"] = mirror.version
        allow_threads(None)
        publish(sender, 3)
        seen["loaded later"] = load(receiver)
        with mirror.start():
            mirror.wait_until_current(TIMEOUT_S)
            seen["mirrored"] = load(reader)
            # Acknowledgements are relayed by a thread, which could not begin at first.
            sender.wait_applied(3, receivers="reader", timeout_s=TIMEOUT_S)
    connection.send(seen)


def run_until(mirror: Mirror, is_enough: Callable[[], bool]) -> None:
    """Run a mirror in this thread until so."""

    class Stop(threading.Event):
        def is_set(self) -> bool:
            return is_enough()

    mirror.run(Stop())


@pytest.mark.parametrize("mount", ["local", "network"])
def test_what_needs_a_thread_waits_for_one(shm_path, mount):
    shm_path.chmod(0o755)  # the child is another user
    place = shm_path / "place"
    place.mkdir(mode=0o700)
    with Child(live_without_threads, place, mount) as child:
        seen = child.receive()
    if isinstance(seen, str):
        pytest.skip(seen)
    assert seen == {
        "waited": None,
        "loaded": 2,
        "mirrored at the limit": None,
        "loaded later": 3,
        "mirrored": 3,
    }
