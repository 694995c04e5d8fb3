"""Publish and receive: dbuffer, its peers and memcpy, in turns, on one model and one directory."""

from __future__ import annotations

import gc
import time
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
from benchmarks.peers import OTHERS, Dbuffer, Peer
from benchmarks.processes import scratch_folder

Times = dict[str, list[float]]

MAX_ROUNDS = 5
_BUFFERS = 2
"""dbuffer writes to one, then to the other."""
_TURNS_WITHOUT_SLOW = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one directory, and who takes part."""

    key: str
    model: str
    shapes: Shapes
    directory: Path
    budget_s: float
    """No round but the first starts after this time."""
    fast: Sequence[type[Peer]] = (Dbuffer,)
    """Measured, with memcpy, twice before each of the slow ones: more samples at little cost."""
    slow: Sequence[type[Peer]] = OTHERS


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

    def publish_speedup(self, peer: str) -> float:
        """How many times as fast as ``peer`` dbuffer publishes."""
        return median(self.publish[peer]) / median(self.publish[Dbuffer.name])

    def receive_speedup(self, peer: str) -> float:
        """How many times as fast as ``peer`` dbuffer receives."""
        return median(self.receive[peer]) / median(self.receive[Dbuffer.name])


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
    start_s = time.monotonic()
    for round_number in range(MAX_ROUNDS):
        is_first = round_number == 0
        for slow_turn in [[peer] for peer in slow] or [[]] * _TURNS_WITHOUT_SLOW:
            _fast_turn(Transfer(case), fast, variants, check=is_first)
            _fast_turn(result, fast, variants)
            for peer in slow_turn:
                _visit(Transfer(case), peer, check=is_first)
                _visit(result, peer)
                gc.collect()  # its garbage is not for the next one to clear away
        if time.monotonic() - start_s > case.budget_s:
            break
    return result


def _fast_turn(
    into: Transfer,
    fast: list[Peer],
    variants: dict[str, Callable[[], object]],
    *,
    check: bool = False,
) -> None:
    for _ in range(_BUFFERS):
        for name, variant in variants.items():
            into.memcpy[name].append(timed(variant))
        for peer in fast:
            _visit(into, peer, check=check)


def _visit(into: Transfer, peer: Peer, *, check: bool = False) -> None:
    """Let a peer publish and receive once; look whether the data came over, if ``check``."""
    if check:
        for tensor in peer.destination.values():
            tensor.zero_()
    into.publish[peer.name].append(timed(peer.publish))
    into.receive[peer.name].append(timed(peer.receive))
    if check:
        _require_equal(peer)
    if not peer.keeps_files:
        peer.discard()


def _require_equal(peer: Peer) -> None:
    for name, tensor in peer.weights.items():
        if not torch.equal(tensor, peer.destination[name]):
            raise RuntimeError(f"{peer.name} did not bring {name} over")
