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
"""Number of a store's buffers, which dbuffer writes in turn."""

_MEMORY_IN_MODELS = 9
"""Memory to require: for source, destination, two stores of two buffers, and a peer's files and
buffers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one directory, and the peers to measure."""

    key: str
    model: str
    shapes: Shapes
    directory: Path
    fast: Sequence[type[Peer]]
    """Peers to measure twice, together with memcpy, before each measurement of a slow peer."""
    slow: Sequence[type[Peer]]
    slow_samples: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Times of a case in seconds, one for each sample."""

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
        """Name of the fastest variant of memcpy."""
        return min(self.memcpy, key=lambda name: median(self.memcpy[name]))

    @property
    def limit_s(self) -> float:
        """Median time of the fastest variant of memcpy."""
        return median(self.memcpy[self.limit])


def run(case: Case) -> Transfer:
    """Measure one case, and delete its files."""
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
    """Exit if too little memory is available: a kill by the kernel would leave files in memory."""
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
    """Measure all peers in turns, so that the noise of a shared machine affects all alike.

    Memcpy and the fast peers are measured before each measurement of a slow peer. This takes
    seconds, as a training step between two publishes does. Memory that a peer keeps between its
    publishes stays warm; memory that it allocates for each publish comes from the system.
    """
    result = Transfer(case)
    for peer in fast * _BUFFERS:
        _visit(peer, None, check=True)
    for peer in slow:
        _visit(peer, None, check=True)
        for _ in range(case.slow_samples):
            gc.collect()  # so that no peer collects another peer's garbage
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
    """Touch all memory, then measure.

    The host of a virtual machine reclaims memory that was not touched for ten seconds. The next
    touch then takes ten times as long as the copy.
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
    """Let a peer publish and receive once. If ``check``, verify the received data."""
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
            raise RuntimeError(f"{peer.name} delivered wrong values of {name}")
