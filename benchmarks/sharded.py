"""Trainer of four ranks: each rank writes its rows, or rank 0 gets all rows and publishes."""

from __future__ import annotations

import functools
import math
import os
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.tensor as sharding
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dbuffer
from benchmarks import models, publishing, report
from benchmarks.measure import median
from benchmarks.memory import anonymous_bytes
from benchmarks.models import DTYPE, Shapes, Weights
from benchmarks.processes import child, reply, scratch_folder
from benchmarks.targets import Check, at_most
from benchmarks.transfers import Times

RANKS = 4

SHARDED = "each rank its rows"
SHARDED_CHECKSUMS = "each rank its rows, checksums"
GATHERED = "full_tensor, then publish"
SENT = "rows sent to rank 0, then publish"

_BASELINES = (GATHERED, SENT)
_WARM_UPS = 2
"""Publishes that fill a store's two buffers for the first time."""

_MAX_SHARE = 0.6
"""Target: time as a share of the faster baseline's."""

_MAX_EXTRA_BYTES = 64e6
"""Target: a rank's extra memory, besides its largest part of a tensor."""

Sharded = dict[str, DTensor]


def main(options: Namespace) -> int:
    """Measure and print. Return 1 if a target was missed."""
    directory: Path = options.dir[0]
    shapes = models.qwen2_0_5b(width=0.25 if options.quick else 1.0)
    environment = report.begin([directory])
    times_s, extra_bytes = _measure(shapes, directory, samples=3 if options.quick else 9)
    size = f"{models.num_bytes(shapes) / 1e9:.2f} GB in {len(shapes)} tensors"
    print(f"\n{RANKS} ranks, gloo, {size}, {directory} ({report.filesystem(directory)})\n")
    print(_table(times_s, models.num_bytes(shapes)))
    checks = _check(times_s, extra_bytes, _largest_part_bytes(shapes))
    found = {
        "bytes": models.num_bytes(shapes),
        "times_s": times_s,
        "extra_bytes_by_rank": extra_bytes,
    }
    return report.conclude(environment, checks, found, options.json)


def _measure(shapes: Shapes, directory: Path, *, samples: int) -> tuple[Times, list[int]]:
    """Return the times of publishes on rank 0, and each rank's extra memory in bytes."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(directory))
        ranks = [
            stack.enter_context(child(_rank, rank, shapes, folder, samples))
            for rank in range(RANKS)
        ]
        pids = [reply(connection) for connection in ranks]
        before = [anonymous_bytes(pid) for pid in pids]
        peaks = list(before)
        for connection in ranks:
            connection.send("publish, watched")
        while not all(connection.poll(publishing.SAMPLE_INTERVAL_S) for connection in ranks):
            now = [anonymous_bytes(pid) for pid in pids]
            peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
        for connection in ranks:
            reply(connection)
            connection.send("publish, timed")
        times_s, *_ = [reply(connection, timeout_s=600) for connection in ranks]
        return times_s, [peak - first for peak, first in zip(peaks, before, strict=True)]


def _rank(connection: Connection, rank: int, shapes: Shapes, folder: Path, samples: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    weights = _random_shards(shapes)
    with ExitStack() as stack:
        sender, hashing = (
            stack.enter_context(dbuffer.ShardedWeightSender(folder / name, checksum=checksum))
            for name, checksum in (("rows", False), ("hashed", True))
        )
        distributed.barrier()
        connection.send(os.getpid())
        connection.recv()
        for _ in range(_WARM_UPS):
            sender.send(weights)
        connection.send(0)
        connection.recv()
        whole = models.warm_destination(shapes) if rank == 0 else {}
        plain = stack.enter_context(dbuffer.WeightSender(folder / "plain")) if rank == 0 else None

        def by_way_of_rank_0(gather: Callable[[Sharded, Weights], None]) -> None:
            gather(weights, whole)
            if plain is not None:
                plain.send(whole)

        ways: dict[str, Callable[[], object]] = {
            SHARDED: lambda: sender.send(weights),
            SHARDED_CHECKSUMS: lambda: hashing.send(weights),
            GATHERED: functools.partial(by_way_of_rank_0, _gather),
            SENT: functools.partial(by_way_of_rank_0, _send_rows),
        }
        connection.send(_time_in_turns(ways, samples))
        connection.recv()


def _random_shards(shapes: Shapes) -> Sharded:
    """Return random weights sharded as by FSDP2: each tensor's rows are spread over all ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))
    weights = {
        name: sharding.empty(shape, dtype=DTYPE, device_mesh=mesh, placements=[Shard(0)])
        for name, shape in shapes.items()
    }
    for weight in weights.values():
        weight.to_local().uniform_(-1, 1)
    return weights


def _gather(weights: Sharded, whole: Weights) -> None:
    """Gather each tensor on every rank, with `DTensor.full_tensor`. Rank 0 keeps the tensors."""
    for name, weight in weights.items():
        full = weight.full_tensor()
        if whole:
            whole[name].copy_(full)


def _send_rows(weights: Sharded, whole: Weights) -> None:
    """Send all rows to their places on rank 0, which moves the fewest bytes."""
    under_way = []
    for tag, (name, weight) in enumerate(weights.items()):
        rows = weight.to_local()
        if not whole:
            if rows.numel():
                under_way.append(distributed.isend(rows, 0, tag=tag))
            continue
        parts = whole[name].chunk(RANKS)
        parts[0].copy_(rows)
        under_way += [
            distributed.irecv(part, source, tag=tag) for source, part in enumerate(parts[1:], 1)
        ]
    for transfer in under_way:
        if transfer is not None:
            transfer.wait()


def _time_in_turns(ways: dict[str, Callable[[], object]], samples: int) -> Times:
    """Return times until every rank is done. The ways take turns, so noise affects all alike."""
    times_s: Times = defaultdict(list)
    for _ in range(_WARM_UPS + samples):
        for way, publish in ways.items():
            distributed.barrier()
            start_s = time.perf_counter()
            publish()
            distributed.barrier()
            times_s[way].append(time.perf_counter() - start_s)
    return {way: times[_WARM_UPS:] for way, times in times_s.items()}


def _largest_part_bytes(shapes: Shapes) -> int:
    """Return the size of the largest part of a tensor that a rank holds."""
    rows = max(math.ceil(shape[0] / RANKS) * math.prod(shape[1:]) for shape in shapes.values())
    return rows * DTYPE.itemsize


def _table(times_s: Times, num_bytes: int) -> str:
    fastest_s = min(median(times_s[way]) for way in _BASELINES)
    rows = [
        (
            way,
            f"{1e3 * median(times):.1f}",
            f"{1e3 * min(times):.1f} to {1e3 * max(times):.1f}",
            f"{num_bytes / median(times) / 1e9:.2f}",
            f"{median(times) / fastest_s:.2f}",
            str(len(times)),
        )
        for way, times in times_s.items()
    ]
    header = ("", "median ms", "ms", "GB/s", "of the faster gather", "samples")
    return report.table(header, rows)


def _check(times_s: Times, extra_bytes: list[int], largest_bytes: int) -> list[Check]:
    fastest_s = min(median(times_s[way]) for way in _BASELINES)
    share = median(times_s[SHARDED]) / fastest_s
    allowed = _MAX_EXTRA_BYTES + largest_bytes
    return [
        at_most("wall time", "of gathering and publishing", share, _MAX_SHARE),
        Check(
            "extra memory of the rank that takes most",
            f"≤ {allowed / 1e6:.0f} MB (64 and its largest part)",
            f"{max(extra_bytes) / 1e6:.1f}",
            max(extra_bytes) <= allowed,
        ),
    ]
