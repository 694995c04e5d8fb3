"""Publish and receive: dbuffer, its peers and memcpy, in turns, on one model and one directory."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import models
from benchmarks.copying import HalvesCopy, memcpy_variants
from benchmarks.measure import median, timed
from benchmarks.models import Shapes
from benchmarks.peers import Peer
from benchmarks.processes import scratch_folder

Times = dict[str, list[float]]

_BUFFERS = 2
"""dbuffer writes to one, then to the other."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one directory, and who takes part."""

    key: str
    model: str
    shapes: Shapes
    directory: Path
    fast: Sequence[type[Peer]]
    """Measured, with memcpy, twice before each of the slow ones: more samples at little cost."""
    slow: Sequence[type[Peer]]
    slow_samples: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a case took; times in seconds, one for each sample."""

    case: Case
    memcpy: Times = field(default_factory=lambda: defaultdict(list))
    publish: Times = field(default_factory=lambda: defaultdict(list))
    receive: Times = field(default_factory=lambda: defaultdict(list))

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
    weights = models.random_weights(case.shapes)
    copy = HalvesCopy(models.warm_destination(case.shapes))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(scratch_folder(case.directory)))
        fast = [peer(weights, copy, folder / peer.__name__) for peer in case.fast]
        slow = [peer(weights, copy, folder / peer.__name__) for peer in case.slow]
        for peer in (*fast, *slow):
            stack.callback(peer.close)
        return _measure(case, fast, slow, memcpy_variants(weights, copy))


def _measure(
    case: Case, fast: list[Peer], slow: list[Peer], variants: dict[str, Callable[[], object]]
) -> Transfer:
    """Take turns, which spreads the noise of a shared machine over all of them alike.

    Whoever's turn it is first goes untimed: hosts of virtual machines take memory away that was
    not touched for some seconds, and to give it back can cost ten times the copy.
    """
    result = Transfer(case)
    for turn, peer in enumerate(slow):
        _fast_turn(result, fast, variants, check=turn == 0)
        _slow_turn(result, peer)
    return result


def _fast_turn(
    into: Transfer, fast: list[Peer], variants: dict[str, Callable[[], object]], *, check: bool
) -> None:
    for _ in range(_BUFFERS):  # this touches memcpy's memory, too
        for peer in fast:
            _visit(peer, None, check=check)
    for _ in range(_BUFFERS):
        for name, variant in variants.items():
            into.memcpy[name].append(timed(variant))
        for peer in fast:
            _visit(peer, into)


def _slow_turn(into: Transfer, peer: Peer) -> None:
    _visit(peer, None, check=True)
    for _ in range(into.case.slow_samples):
        if not peer.rewrites_files:
            peer.discard()
        _visit(peer, into)
    peer.discard()  # room for the next one's files, and memory
    gc.collect()  # nor is its garbage for the next one to clear away


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
