"""Whether receivers that keep up slow the sender down."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import dbuffer
from benchmarks import models
from benchmarks.models import Shapes
from benchmarks.processes import REPLY_TIMEOUT_S, child, reply, scratch_folder

_WARM_UPS = 2
"""Publishes that fill a store's two buffers for the first time."""


def publish_times_s(
    shapes: Shapes, directory: Path, *, publishes: int, receivers: tuple[int, ...]
) -> dict[int, list[float]]:
    """Publish in turns to a store for each number of receivers, when all have loaded the last."""
    weights = models.random_weights(shapes)
    times_s: dict[int, list[float]] = {count: [] for count in receivers}
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(directory))
        senders = {}
        for count in receivers:
            store = folder / str(count)
            senders[count] = stack.enter_context(dbuffer.WeightSender(store))
            children = [stack.enter_context(child(_follow, shapes, store)) for _ in range(count)]
            for connection in children:
                reply(connection)
        for _ in range(_WARM_UPS + publishes):
            for count, sender in senders.items():
                start_s = time.perf_counter()
                version = sender.send(weights).version
                times_s[count].append(time.perf_counter() - start_s)
                sender.wait_applied(version, receivers=count, timeout_s=REPLY_TIMEOUT_S)
    return {count: times[_WARM_UPS:] for count, times in times_s.items()}


def _follow(connection: Connection, shapes: Shapes, store: Path) -> None:
    destination = models.warm_destination(shapes)
    version = None
    with dbuffer.WeightReceiver(store) as receiver:
        connection.send(0)
        while True:
            receiver.wait_for_version(version, timeout_s=REPLY_TIMEOUT_S)
            version = receiver.load_into(destination)
