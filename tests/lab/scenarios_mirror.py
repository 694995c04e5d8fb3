"""Mirrors across machines: one network read a node and version, and what happens on the way."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dbuffer.mirror import mirror as mirrors
from dbuffer.mirror.mirror import Mirror
from dbuffer.testing.waiting import TIMEOUT_S
from tests.lab.guest import Guest
from tests.lab.hosts import Looking, publish_when_told, published
from tests.lab.lab import scenario
from tests.support.patterns import Pattern, newest
from tests.support.steps import Step, at_step
from tests.support.stores import SHARED_MEMORY

MB = 1 << 20
WEIGHTS = Pattern(num_tensors=5, numel=MB // 8)  # read in two spans
POLL_INTERVAL_S = 0.1


@contextlib.contextmanager
def local_stores(*clients: str) -> Iterator[list[Path]]:
    """A place in shared memory for each client's own store."""
    folder = Path(tempfile.mkdtemp(prefix="dbuffer-test-", dir=SHARED_MEMORY))
    yield [folder / client for client in clients]
    shutil.rmtree(folder)


def mirror(connection: Connection, path: Path, local: Path, poll_interval_s: float) -> None:
    """Mirror; send each version that was copied, and when."""
    with Mirror(
        path / "store",
        local,
        poll_interval_s=poll_interval_s,
        on_copied=lambda copied: connection.send((copied.version, time.monotonic())),
    ) as mirroring:
        mirroring.run()


def mirror_looking(connection: Connection, path: Path, local: Path) -> None:
    """Say when it has looked once; mirror, and send each version with the looks until then."""
    Looking.told, mirrors.WeightReceiver = connection, Looking
    with Mirror(
        path / "store",
        local,
        poll_interval_s=POLL_INTERVAL_S,
        on_copied=lambda copied: connection.send((copied.version, Looking.looks)),
    ) as mirroring:
        mirroring.run()


def load_looking(connection: Connection, path: Path) -> None:
    """Say when it has looked once; send the first version with the looks until then."""
    Looking.told = connection
    with Looking(path / "store", poll_interval_s=POLL_INTERVAL_S, num_threads=1) as receiver:
        receiver.wait_for_version(timeout_s=TIMEOUT_S)
        connection.send((receiver.load_into(WEIGHTS.empty()), receiver.looks))


@scenario(quiet=True)
def test_a_store_that_comes_later_is_seen_by_the_next_look(guest: Guest) -> None:
    """Though the clients have looked before, and have it in mind that there is none."""
    with contextlib.ExitStack() as stack:
        [local] = stack.enter_context(local_stores("q2"))
        mirroring = stack.enter_context(guest.on("q2", mirror_looking, local))
        reader = stack.enter_context(guest.on("q3", load_looking))
        assert mirroring.receive() == reader.receive() == "looks"
        writer = stack.enter_context(guest.on("q", publish_when_told, WEIGHTS))
        started, written, _ = published(writer, 1)
        for child in (mirroring, reader):
            version, looks = child.receive()
            assert version == 1
            assert looks[0][0] < started
            assert looks[0][1] is None
            assert all(seen == 1 for began, seen in looks if began > written), "a look missed it"


def mirror_with_a_stop(connection: Connection, path: Path, local: Path, step: Step) -> None:
    """Mirror with one thread; after the first version, stop once at a step until told to go on."""

    def stop() -> None:
        connection.send("stopped")
        connection.recv()

    def on_copied(copied: Any) -> None:
        connection.send(copied.version)
        if connection.recv():
            at_step(step, stop)

    with Mirror(
        path / "store",
        local,
        poll_interval_s=POLL_INTERVAL_S,
        num_threads=1,
        on_copied=on_copied,
    ) as mirroring:
        mirroring.run()


IN_MID_COPY = Step("c_call", "preadv", nth=2)


@scenario()
def test_a_mirrors_network_is_cut_in_mid_copy(guest: Guest) -> None:
    """Local readers read on meanwhile, the sender publishes on, and it catches up by itself."""
    with contextlib.ExitStack() as stack:
        [local] = stack.enter_context(local_stores("r"))
        writer = stack.enter_context(guest.on("w", publish_when_told, WEIGHTS))
        published(writer, 1)
        child = stack.enter_context(guest.on("r", mirror_with_a_stop, local, IN_MID_COPY))
        assert child.receive() == 1
        child.send(True)
        published(writer, 2)
        assert child.receive() == "stopped"
        guest.cut("r")
        child.send()
        for version in (3, 4):
            published(writer, version)
            assert newest(local, WEIGHTS, verify=True) == 1
            time.sleep(1.5)
        guest.restore("r")
        restored = time.monotonic()
        seen = child.receive()
        while seen != 4:
            child.send(False)
            seen = child.receive()
        print(f"caught up {time.monotonic() - restored:.1f} s after the network was back")
        assert newest(local, WEIGHTS, verify=True) == 4
