"""How soon a receiver in another process sees a new version."""

from __future__ import annotations

import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import dbuffer
from benchmarks import models
from benchmarks.processes import REPLY_TIMEOUT_S, child, reply, scratch_folder


def flip_latencies_s(directory: Path, *, flips: int) -> list[float]:
    """Time from just before CURRENT is replaced until a receiver that waits has the version."""
    weights = models.random_weights(models.tiny())
    flipped_ns = _note_flips()
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


def _note_flips() -> list[int]:
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
