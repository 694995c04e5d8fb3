"""Programs that several scenarios run on a host: a sender and a receiver of patterns."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import dbuffer
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.children import Child
from tests.support.patterns import Pattern


def publish_when_told(
    connection: Connection,
    path: Path,
    pattern: Pattern,
    name: Path | str = "store",
    **options: Any,
) -> None:
    """Publish what is sent: a version, and the receivers to wait for.

    Send when that began, when it was published, and when those had applied it.
    """
    with dbuffer.WeightSender(path / name, num_threads=1, **options) as sender:
        while True:
            version, receivers = connection.recv()
            weights = pattern.weights(version)
            started = time.monotonic()
            sender.send(weights)
            published = time.monotonic()
            if receivers:
                sender.wait_applied(version, receivers=receivers, timeout_s=TIMEOUT_S)
            connection.send((started, published, time.monotonic()))


def published(writer: Child, version: int, *receivers: str) -> tuple[float, float, float]:
    """Let `publish_when_told` publish a version; return what it sends."""
    writer.send((version, receivers))
    times: tuple[float, float, float] = writer.receive()
    return times


def load_each(
    connection: Connection,
    path: Path,
    store: Path | str,
    pattern: Pattern,
    receiver_id: str | None = None,
) -> None:
    """Load every version, newer each time and no mix; send it, and when it was applied."""
    target, version = pattern.empty(), None
    with dbuffer.WeightReceiver(
        path / store, receiver_id=receiver_id, poll_interval_s=0.05, num_threads=1
    ) as receiver:
        connection.send("ready")
        while True:
            last = version
            assert receiver.wait_for_version(last, timeout_s=TIMEOUT_S) is not None
            version = receiver.load_into(target)
            assert version is not None
            assert last is None or version > last
            assert pattern.version_of(target) == version, f"a mix was read as version {version}"
            connection.send((version, time.monotonic()))


def applied(reader: Child, version: int) -> list[int]:
    """Wait until `load_each`, or a mirror, has a version; return all since the last call."""
    versions: list[int] = []
    while not versions or versions[-1] != version:
        versions.append(reader.receive()[0])
    return versions


class Looking(WeightReceiver):
    """Receiver that notes its looks at the pointer and its waits between them, one in a process."""

    looks: ClassVar[list[tuple[float, int | None]]] = []
    """When each began, on the machines' one clock, and the version that it saw."""
    waits_s: ClassVar[list[float]] = []
    told: ClassVar[Connection | None] = None
    """Connection on which "looks" is sent after the first look."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        wait = self._watcher.wait

        def noting(timeout_s: float) -> bool:
            self.waits_s.append(timeout_s)
            return wait(timeout_s)

        self._watcher.wait = noting

    def _look(self) -> int | None:
        began = time.monotonic()
        version = super()._look()
        self.looks.append((began, version))
        if self.told is not None and len(self.looks) == 1:
            self.told.send("looks")
        return version
