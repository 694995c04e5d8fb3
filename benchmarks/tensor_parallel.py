"""What the ranks of one engine stage and read of a version, all together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import dbuffer
from benchmarks import models
from benchmarks.layouts import PlannedReceiver
from benchmarks.models import Shapes
from benchmarks.processes import as_network, bytes_read, scratch_folder

NETWORK, MIRRORED = "each rank reads the network", "one local copy of it (local_store)"
_SIZE = 4
_VERSIONS = 4
"""The first is reloaded, and the second staged before that has proven the plan."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of one version, in all ranks together."""

    how: str
    num_ranks: int
    num_bytes: int
    """Of the model."""
    staged_bytes: int
    read_bytes: int
    """With read calls from the store that the trainer writes. What a host fetches over NFS for them
    is one version; `tests/lab` counts that."""


def run(directory: Path) -> list[Reading]:
    """Measure with a mount taken for a network, and with a mirror of such a store."""
    shapes = models.qwen2_0_5b(width=0.5)
    with scratch_folder(directory) as folder:
        return [_read_network(shapes, folder / "network"), _read_mirror(shapes, folder)]


def _read_network(shapes: Shapes, store: Path) -> Reading:
    with as_network(), dbuffer.WeightSender(store) as sender:
        return _read(NETWORK, shapes, sender, store, bytes_read)


def _read_mirror(shapes: Shapes, folder: Path) -> Reading:
    remote, local = folder / "remote", folder / "local"
    with (
        dbuffer.WeightSender(remote) as sender,
        dbuffer.Mirror(remote, local).start() as mirror,
    ):
        return _read(
            MIRRORED,
            shapes,
            sender,
            local,
            lambda: int(mirror.stats["copied_bytes"]),
            mirror.wait_until_current,
        )


def _read(
    how: str,
    shapes: Shapes,
    sender: dbuffer.WeightSender,
    store: Path,
    count_bytes: Callable[[], int],
    wait_until_there: Callable[[], None] = lambda: None,
) -> Reading:
    """What the ranks of ``store`` stage of the last of some versions, and what is read for it."""
    weights = models.random_weights(shapes)
    sender.send(weights)
    wait_until_there()
    with _ranks(store, shapes) as ranks:
        for _ in range(_VERSIONS):
            for rank in ranks:
                rank.switch()
            before = count_bytes()
            for tensor in weights.values():
                tensor.add_(1)
            sender.send(weights)
            wait_until_there()
        staged_bytes = sum(rank.switch().staged_bytes for rank in ranks)
        read_bytes = count_bytes() - before
        for rank in ranks:
            rank.require_right(weights)
    return Reading(how, _SIZE, models.num_bytes(shapes), staged_bytes, read_bytes)


@contextlib.contextmanager
def _ranks(store: Path, shapes: Shapes) -> Iterator[list[PlannedReceiver]]:
    with contextlib.ExitStack() as stack:
        device = torch.device("cpu")
        yield [
            stack.enter_context(PlannedReceiver(store, shapes, device, rank=rank, size=_SIZE))
            for rank in range(_SIZE)
        ]
