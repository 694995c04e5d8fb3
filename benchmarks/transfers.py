"""Publish and receive: dbuffer, its peers and memcpy, in turns, on one model and one directory."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import models
from benchmarks.copying import HalvesCopy, hash_variants, memcpy_variants
from benchmarks.measure import median, timed
from benchmarks.models import Shapes
from benchmarks.peers import Peer
from benchmarks.processes import scratch_folder

Times = dict[str, list[float]]

_BUFFERS = 2
"""dbuffer writes to one, then to the other."""

_MEMORY_IN_MODELS = 9
"""Source, destination, two stores of two buffers, and a peer's files and buffers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one directory, and who takes part."""

    key: str
    model: str
    shapes: Shapes
    directory: Path
    fast: Sequence[type[Peer]]
    """Measured, with memcpy, twice before each time that a slow one is."""
    slow: Sequence[type[Peer]]
    slow_samples: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a case took; times in seconds, one for each sample."""

    case: Case
    memcpy: Times = field(default_factory=lambda: defaultdict(list))
    publish: Times = field(default_factory=lambda: defaultdict(list))
    receive: Times = field(default_factory=lambda: defaultdict(list))
    hashing: Times = field(default_factory=lambda: defaultdict(list))

    @property
    def num_bytes(self) -> int:
        """Size of the model."""
        return models.num_bytes(self.case.shapes)

    @property
    def limit(self) -> str:
        """The name of the fastest memcpy variant."""
        return min(self.memcpy, key=lambda name: median(self.memcpy[name]))

    @property
    def limit_s(self) -> float:
        """Its median time."""
        return median(self.memcpy[self.limit])


def run(case: Case) -> Transfer:
    """Measure one case; its files are gone afterwards."""
    require_memory(_MEMORY_IN_MODELS * models.num_bytes(case.shapes))
    weights = models.random_weights(case.shapes)
    copy = HalvesCopy(models.warm_destination(case.shapes))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(scratch_folder(case.directory)))
        fast = [peer(weights, copy, folder / peer.__name__) for peer in case.fast]
        slow = [peer(weights, copy, folder / peer.__name__) for peer in case.slow]
        for peer in (*fast, *slow):
            stack.callback(peer.close)
        return _measure(case, fast, slow, memcpy_variants(weights, copy), hash_variants(weights))


def require_memory(num_bytes: int) -> None:
    """End the program, rather than have the kernel end it and leave files in shared memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = 1024 * int(fields["MemAvailable"].split()[0])
    if available_bytes < num_bytes:
        sys.exit(
            f"the next benchmark needs {num_bytes / 1e9:.0f} GB of memory, and "
            f"{available_bytes / 1e9:.0f} GB are available; try --quick"
        )


def _measure(
    case: Case,
    fast: list[Peer],
    slow: list[Peer],
    copies: dict[str, Callable[[], object]],
    hashes: dict[str, Callable[[], object]],
) -> Transfer:
    """Take turns, which spreads the noise of a shared machine over all of them alike.

    Memcpy and the fast ones have theirs between any two of a slow one's. It takes seconds, as a
    trainer's step does between two publishes: what stays from one to the next is warm, and what
    a peer allocates anew for each it must get from the system.
    """
    result = Transfer(case)
    for peer in fast * _BUFFERS:
        _visit(peer, None, check=True)
    for peer in slow:
        _visit(peer, None, check=True)
        for _ in range(case.slow_samples):
            gc.collect()  # one's garbage is not for the next one to clear away
            _fast_turn(result, fast, copies, hashes)
            if not peer.rewrites_files:
                peer.discard()
            _visit(peer, result)
        peer.discard()
    return result


def _fast_turn(
    into: Transfer,
    fast: list[Peer],
    copies: dict[str, Callable[[], object]],
    hashes: dict[str, Callable[[], object]],
) -> None:
    """Warm everything up, then measure.

    Hosts of virtual machines take memory away that was not touched for ten seconds; the first
    touch after that costs ten times the copy.
    """
    for peer in fast * _BUFFERS:  # this touches memcpy's memory, too
        _visit(peer, None)
    for _ in range(_BUFFERS):
        for times, variants in ((into.memcpy, copies), (into.hashing, hashes)):
            for name, variant in variants.items():
                times[name].append(timed(variant))
        for peer in fast:
            _visit(peer, into)


def _visit(peer: Peer, into: Transfer | None, *, check: bool = False) -> None:
    """Let a peer publish and receive once; look whether the data came over, if ``check``."""
    if check:
        for tensor in peer.destination.values():
            tensor.zero_()
    published_s, received_s = timed(peer.publish), timed(peer.receive)
    if into is not None:
        into.publish[peer.name].append(published_s)
        into.receive[peer.name].append(received_s)
    if check:
        _require_equal(peer)


def _require_equal(peer: Peer) -> None:
    for name, tensor in peer.weights.items():
        if not torch.equal(tensor, peer.destination[name]):
            raise RuntimeError(f"{peer.name} did not bring {name} over")
