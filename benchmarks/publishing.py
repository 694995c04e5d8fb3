"""What publishing takes of the sender, and how soon a receiver sees it."""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import dbuffer
from benchmarks import models
from benchmarks.measure import timed
from benchmarks.memory import anonymous_bytes
from benchmarks.models import Shapes
from benchmarks.processes import REPLY_TIMEOUT_S, child, reply, scratch_folder

SAMPLE_INTERVAL_S = 0.001
_WARM_UPS = 2
"""Publishes that fill a store's two buffers for the first time."""


def return_times_s(shapes: Shapes, directory: Path, *, rounds: int) -> tuple[list[float], ...]:
    """Until `send` returns, when it waits and when it does not; in turns, after two of each."""
    weights = models.random_weights(shapes)
    waiting, at_once = [], []
    with scratch_folder(directory) as folder, dbuffer.WeightSender(folder / "store") as sender:
        for _ in range(rounds + _WARM_UPS):
            waiting.append(timed(lambda: sender.send(weights)))
            at_once.append(timed(lambda: sender.send(weights, wait=False)))
            sender.send(weights)  # when that is published
    return waiting[_WARM_UPS:], at_once[_WARM_UPS:]


def publish_times_s(
    shapes: Shapes, directory: Path, *, publishes: int, receivers: tuple[int, ...]
) -> dict[int, list[float]]:
    """Whether receivers that keep up slow the sender down, by their number.

    Publish in turns to a store for each number of receivers, when all have loaded the last.
    """
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


def flip_latencies_s(directory: Path, *, flips: int) -> list[float]:
    """Time from just before CURRENT is replaced until a receiver that waits has the version."""
    weights = models.random_weights(models.tiny())
    flipped_ns = note_flips()
    seen_ns = []
    with scratch_folder(directory) as folder, dbuffer.WeightSender(folder / "store") as sender:
        sender.send(weights)
        with child(_report_versions, folder / "store") as receiver:
            reply(receiver)
            flipped_ns.clear()
            for _ in range(flips):
                # Long enough for it to be waiting again, and in step with no timer.
                time.sleep(random.uniform(0.005, 0.015))
                sender.send(weights)
                seen_ns.append(reply(receiver))
    return [(seen - flip) / 1e9 for seen, flip in zip(seen_ns, flipped_ns, strict=True)]


def note_flips() -> list[int]:
    """Grows by the time of each replacement of CURRENT in this process from now on.

    ``os.replace`` raises its audit event just before the system call.
    """
    flipped_ns: list[int] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("CURRENT"):
            flipped_ns.append(time.monotonic_ns())

    sys.addaudithook(hook)
    return flipped_ns


def _report_versions(connection: Connection, store: Path) -> None:
    version = None
    with dbuffer.WeightReceiver(store) as receiver:
        while True:
            version = receiver.wait_for_version(version, timeout_s=REPLY_TIMEOUT_S)
            connection.send(time.monotonic_ns())  # one clock for all processes on Linux


def extra_memory_bytes(shapes: Shapes, directory: Path) -> int:
    """How far publishing raises a process's anonymous memory above that with the model in it.

    The store's own pages are not anonymous, and so not counted.
    """
    with (
        scratch_folder(directory) as folder,
        child(_publish, shapes, folder / "store") as publisher,
    ):
        pid = reply(publisher)
        before = peak = anonymous_bytes(pid)
        publisher.send("go")
        while not publisher.poll(SAMPLE_INTERVAL_S):
            peak = max(peak, anonymous_bytes(pid))
        reply(publisher)
        return peak - before


def _publish(connection: Connection, shapes: Shapes, store: Path) -> None:
    weights = models.random_weights(shapes)
    with dbuffer.WeightSender(store) as sender:
        connection.send(os.getpid())
        connection.recv()
        for _ in range(_WARM_UPS):
            sender.send(weights)
        connection.send(0)
        connection.recv()  # stay, so that there is a process to look at until the end
