"""How soon `send(wait=False)` lets a trainer go on."""

from __future__ import annotations

from pathlib import Path

import dbuffer
from benchmarks import models
from benchmarks.measure import timed
from benchmarks.models import Shapes
from benchmarks.processes import scratch_folder


def return_times_s(shapes: Shapes, directory: Path, *, rounds: int) -> tuple[list[float], ...]:
    """Until `send` returns, when it waits and when it does not; in turns, after two of each."""
    weights = models.random_weights(shapes)
    waiting, at_once = [], []
    with scratch_folder(directory) as folder, dbuffer.WeightSender(folder / "store") as sender:
        for _ in range(rounds + 2):
            waiting.append(timed(lambda: sender.send(weights)))
            at_once.append(timed(lambda: sender.send(weights, wait=False)))
            sender.send(weights)  # when that is published
    return waiting[2:], at_once[2:]
