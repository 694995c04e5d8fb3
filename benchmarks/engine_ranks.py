"""Ranks of one engine: what they read and stage of a version, and the memory of their node."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import dbuffer
from benchmarks import models, report
from benchmarks.layouts import PlannedReceiver
from benchmarks.memory import NodeMemory
from benchmarks.models import Shapes, Weights
from benchmarks.processes import as_network, bytes_read, child, reply, scratch_folder
from benchmarks.targets import Check, at_most
from dbuffer.store.filesystem import MOUNT_VARIABLE

ALONE = "each rank reads by itself (default)"
MIRRORED = "one local copy of it (local_store)"

_SIZE = 4
_VERSIONS = 5
"""The first is reloaded, and the second staged before that has proven the plan."""

_MAX_SHARE = 1.15
_SEED = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of the last of some versions, in all ranks together."""

    how: str
    num_bytes: int
    """Of the model."""
    staged_bytes: int
    read_bytes: int
    """With read calls from the store that the trainer writes. What a host fetches over NFS for them
    is one version; `tests/lab` counts that."""
    peak_bytes: int
    """Most memory of the node that was in use for all this, above the ranks' parameters."""
    kept_bytes: int
    """Memory in use after the last switch."""


def main(options: Namespace) -> int:
    """Measure and print; 1 if a target was missed."""
    directory: Path = options.dir[0]
    shapes = models.qwen2_0_5b(width=0.25 if options.quick else 0.5)
    environment = report.begin([directory])
    readings = [_measure(how, shapes, directory) for how in (ALONE, MIRRORED)]
    size = f"{models.num_bytes(shapes) / 1e9:.2f} GB in {len(shapes)} tensors"
    print(f"\n{_SIZE} ranks, {size}, {directory}\n\n{_table(readings)}")
    found = {"ranks": [asdict(reading) for reading in readings]}
    return report.conclude(environment, _check(readings), found, options.json)


def _measure(how: str, shapes: Shapes, directory: Path) -> Reading:
    """Let ranks follow a store through some versions."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(directory))
        remote, local = folder / "remote", folder / "local"
        processes = []
        if how == MIRRORED:
            mirror = stack.enter_context(child(_mirror, remote, local))
            processes.append(mirror)
        else:
            stack.enter_context(as_network())
        sender = stack.enter_context(dbuffer.WeightSender(remote))
        store = local if how == MIRRORED else remote
        arguments = (store, shapes, how)
        ranks = [stack.enter_context(child(_rank, rank, *arguments)) for rank in range(_SIZE)]
        processes += ranks
        memory = NodeMemory([reply(each) for each in processes], local)
        used_before = memory.in_use()
        torch.manual_seed(_SEED)
        weights = models.random_weights(shapes)
        with memory.sampled():
            for version in range(1, _VERSIONS + 1):
                read_before = sum(_all("read", processes))
                _next(weights)
                sender.send(weights, version=version)
                staged_bytes = sum(_all(version, ranks))
                read_bytes = sum(_all("read", processes)) - read_before
        reading = Reading(
            how,
            models.num_bytes(shapes),
            staged_bytes,
            read_bytes,
            memory.peak_bytes - used_before,
            memory.in_use() - used_before,
        )
        _all("verify", ranks)
        return reading


def _next(weights: Weights) -> None:
    for tensor in weights.values():
        tensor.add_(1)


def _all(request: str | int, processes: list[Connection]) -> list[int]:
    """Let processes answer a request; a number is the version to switch to."""
    for process in processes:
        process.send(request)
    return [reply(process) for process in processes]


def _rank(connection: Connection, rank: int, store: Path, shapes: Shapes, how: str) -> None:
    _take_mounts_for("local" if how == MIRRORED else "network")
    cpu = torch.device("cpu")
    with PlannedReceiver(store, shapes, cpu, rank=rank, size=_SIZE) as receiver:
        connection.send(os.getpid())
        while True:
            match connection.recv():
                case "read":
                    connection.send(0 if how == MIRRORED else bytes_read())
                case int(version):
                    connection.send(receiver.switch(version).staged_bytes)
                case "verify":
                    torch.manual_seed(_SEED)
                    weights = models.random_weights(shapes)
                    for _ in range(_VERSIONS):
                        _next(weights)
                    receiver.require_right(weights)
                    connection.send(0)


def _take_mounts_for(kind: str) -> None:
    """Set it in this process: the one that it was forked from began with another."""
    os.environ[MOUNT_VARIABLE] = kind


def _mirror(connection: Connection, remote: Path, local: Path) -> None:
    _take_mounts_for("local")
    with dbuffer.Mirror(remote, local).start() as mirror:
        connection.send(os.getpid())
        while True:
            connection.recv()
            connection.send(int(mirror.stats["copied_bytes"]))


def _table(readings: list[Reading]) -> str:
    header = (
        "all ranks together, of the model",
        "staged",
        "read calls",
        "peak memory",
        "kept memory",
    )
    rows = [
        (
            reading.how,
            *(
                f"{num_bytes / reading.num_bytes:.2f}"
                for num_bytes in (
                    reading.staged_bytes,
                    reading.read_bytes,
                    reading.peak_bytes,
                    reading.kept_bytes,
                )
            ),
        )
        for reading in readings
    ]
    return report.table(header, rows)


def _check(readings: list[Reading]) -> list[Check]:
    checks = []
    for reading in readings:
        staged, read = reading.staged_bytes, reading.read_bytes
        what = f"{_SIZE} ranks, {reading.how}"
        checks.append(at_most(what, "of the model staged", staged / reading.num_bytes, _MAX_SHARE))
        if reading.how != ALONE:
            share = read / reading.num_bytes
            checks.append(at_most("", "of the model read", share, _MAX_SHARE))
    return checks
