"""Time and memory that a publish takes, and the delay until a receiver sees the version."""

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
    """Return the times of `send` and of `send(wait=False)`, measured in turns."""
    weights = models.random_weights(shapes)
    waiting, at_once = [], []
    with scratch_folder(directory) as folder, dbuffer.WeightSender(folder / "store") as sender:
        for _ in range(rounds + _WARM_UPS):
            waiting.append(timed(lambda: sender.send(weights)))
            at_once.append(timed(lambda: sender.send(weights, wait=False)))
            sender.send(weights)  # begins when the version before is published
    return waiting[_WARM_UPS:], at_once[_WARM_UPS:]


def publish_times_s(
    shapes: Shapes, directory: Path, *, publishes: int, receivers: tuple[int, ...]
) -> dict[int, list[float]]:
    """Return publish times by the number of receivers, to see whether receivers slow a sender.

    There is a store for each number of receivers. Publish into the stores in turns, when all
    receivers have loaded the version before.
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
    """Return times from just before CURRENT is replaced until a waiting receiver sees it."""
    weights = models.random_weights(models.tiny())
    flipped_ns = note_flips()
    seen_ns = []
    with scratch_folder(directory) as folder, dbuffer.WeightSender(folder / "store") as sender:
        sender.send(weights)
        with child(_report_versions, folder / "store") as receiver:
            reply(receiver)
            flipped_ns.clear()
            for _ in range(flips):
                # Sleep until the receiver waits again. The time is random, to match no timer.
                time.sleep(random.uniform(0.005, 0.015))
                sender.send(weights)
                seen_ns.append(reply(receiver))
    return [(seen - flip) / 1e9 for seen, flip in zip(seen_ns, flipped_ns, strict=True)]


def note_flips() -> list[int]:
    """Return a list that gets the time of each later replacement of CURRENT in this process.

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
    """Return how much publishing raises the anonymous memory of a process that has the model.

    The store's pages are not anonymous, so they are not counted.
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
        connection.recv()  # do not end before the parent has measured the memory
