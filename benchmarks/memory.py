"""How much memory publishing takes in the sender's process."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import dbuffer
from benchmarks import models
from benchmarks.models import Shapes
from benchmarks.processes import child, reply, scratch_folder

SAMPLE_INTERVAL_S = 0.001
_PUBLISHES = 2


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
        for _ in range(_PUBLISHES):
            sender.send(weights)
        connection.send(0)
        connection.recv()  # stay, so that there is a process to look at until the end


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not say RssAnon in /proc/PID/status")
