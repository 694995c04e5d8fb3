"""Kept versions across machines: one host keeps them, two others read, pin and stay on them."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dbuffer
from dbuffer.engine.follower import Follower
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.engines import FakeEngine
from dbuffer.testing.waiting import TIMEOUT_S
from tests.lab.guest import Guest
from tests.lab.lab import scenario
from tests.support.light_engines import options
from tests.support.patterns import SMALL
from tests.support.soak import is_soak

KEEP = 3
PINNED = 2
LAST = 40 if is_soak() else 16


def keep_versions(connection: Connection, path: Path) -> None:
    """Publish up to each version that is sent, at full speed; a negative one is published again."""
    with dbuffer.WeightSender(path / "store", keep=KEEP, num_threads=1) as sender:
        last = 0
        while True:
            goal = connection.recv()
            if goal < 0:
                last = sender.republish(-goal).version
            for version in range(last + 1, goal + 1):
                last = sender.send(SMALL.weights(version), version=version).version
            connection.send(last)


def open_each(receiver: dbuffer.WeightReceiver, versions: Any) -> dict[int, int | None]:
    """Open each of these versions; return those whose weights were read, None: it is not there."""
    found: dict[int, int | None] = {}
    for version in versions:
        try:
            with receiver.open(version=version, timeout_s=TIMEOUT_S) as snapshot:
                found[version] = SMALL.version_of(snapshot.tensors)
        except dbuffer.VersionError:
            found[version] = None
    return found


def read_kept_versions(connection: Connection, path: Path) -> None:
    """Open versions while more are published, until told; then all up to each that is sent."""
    rng = random.Random(0)
    with dbuffer.WeightReceiver(path / "store", poll_interval_s=0.05, num_threads=1) as receiver:
        num_read = 0
        connection.send("looks")
        while num_read == 0 or not connection.poll():  # a busy host may begin late
            newest = receiver.wait_for_version(timeout_s=TIMEOUT_S)
            assert newest is not None
            version = max(1, newest - rng.randrange(KEEP + 2))
            [read] = open_each(receiver, [version]).values()
            assert read in (version, None), f"of version {version}, {read} was read"
            num_read += read is not None
            assert open_each(receiver, [PINNED]) == {PINNED: PINNED}
        while True:
            last = connection.recv()
            connection.send((num_read, open_each(receiver, range(1, last + 1))))


def stay_on_a_version(connection: Connection, path: Path) -> None:
    """Pin a version, serve it, and say after each word what is served, and what is refused."""
    store, engine = path / "store", FakeEngine()
    kept.pin(DoubleBuffer(store), PINNED)
    with Follower(engine, options(store, version=PINNED, timeout_s=TIMEOUT_S)) as follower:
        switch = follower.sync()
        assert switch is not None
        while True:
            connection.send(engine.serves)
            gone = connection.recv()
            assert follower.sync() is None
            try:
                Follower(FakeEngine(instance_id="two"), options(store, "two", version=gone)).start()
            except dbuffer.VersionError as error:
                connection.send(str(error))


@scenario()
def test_kept_versions_are_read_and_served_on_other_hosts(guest: Guest) -> None:
    with guest.on("w", keep_versions) as writer:
        writer.send(KEEP + 2)
        assert writer.receive() == KEEP + 2
        with guest.on("r2", stay_on_a_version) as engine:
            serving = (PINNED, str(PINNED))
            assert engine.receive() == serving
            with guest.on("r", read_kept_versions) as reader:
                assert reader.receive() == "looks"
                writer.send(LAST)
                assert writer.receive() == LAST
                reader.send(LAST)
                num_read, found = reader.receive()
                print(f"{num_read} versions opened while {LAST} were published")
                assert num_read > 0
                held = {PINNED, *range(LAST - KEEP - 1, LAST + 1)}
                expected = {n: n if n in held else None for n in range(1, LAST + 1)}
                assert found == expected
                engine.send(LAST - KEEP - 2)
                refusal = engine.receive()
                assert refusal.endswith(f"holds {', '.join(map(str, sorted(held)))}"), refusal
                assert engine.receive() == serving
                kept.unpin(DoubleBuffer(guest.path("r2") / "store"), PINNED)
                writer.send(-PINNED)
                assert writer.receive() == LAST + 1
                writer.send(LAST + 2)  # which drops the version that was published again
                assert writer.receive() == LAST + 2
                reader.send(LAST + 2)
                _, found = reader.receive()
                assert found[LAST + 1] == PINNED
                assert (found[PINNED], found[LAST - KEEP + 1]) == (None, LAST - KEEP + 1)
