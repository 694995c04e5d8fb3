"""Bytes and times of publishing deltas and patches into stores, compared with full publishes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

import dbuffer
from benchmarks import models
from benchmarks.copying import scatter
from benchmarks.measure import median, timed
from benchmarks.models import Weights
from benchmarks.processes import as_network, scratch_folder, slow_link
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier
from dbuffer.io.delta import Words

_CHANGED = 0.01
"""Share of the elements, chosen at random, that a training step changes by one unit in the last
place."""

_LINK_BYTES_PER_S = 1e9

_PUBLISHES = 60
_ROUNDS = 5


@dataclass(slots=True)
class Stores:
    """Bytes and times of publishes on a network, and times of patches in shared memory."""

    num_bytes: int
    """Size of the model."""
    delta_bytes: list[int] = field(default_factory=list)
    """Size of each delta, with 1 % changed."""
    written_bytes: list[int] = field(default_factory=list)
    """Bytes that each publish wrote: a delta or an anchor."""
    whole_s: list[float] = field(default_factory=list)
    """Time of each full version on a link of 1 GB/s, from `send` until a receiver has loaded it."""
    delta_s: list[float] = field(default_factory=list)
    """Time of each delta with 1 % changed, from `send` until a receiver has loaded the version."""
    send_s: list[float] = field(default_factory=list)
    patch_s: list[float] = field(default_factory=list)
    patch_floor_s: list[float] = field(default_factory=list)
    """Time to write the changed elements into two buffers, at known places: a lower bound."""

    @property
    def share(self) -> float:
        """Median size of a delta, as a share of the model."""
        return median([float(each) for each in self.delta_bytes]) / self.num_bytes

    @property
    def mean_share(self) -> float:
        """Mean bytes that a publish wrote, as a share of the model. Anchors count."""
        return sum(self.written_bytes) / len(self.written_bytes) / self.num_bytes

    @property
    def loaded_share(self) -> float:
        """Time to publish and load a delta over the link, as a share of a full version's time."""
        return median(self.delta_s) / median(self.whole_s)

    @property
    def patch_share(self) -> float:
        """Time to publish patches, as a share of the time to send all weights."""
        return median(self.patch_s) / median(self.send_s)

    @property
    def patch_floor_share(self) -> float:
        """Lower bound of the time to publish patches, as a share of a send of all weights."""
        return median(self.patch_floor_s) / median(self.send_s)


def _step(weights: Weights, share: float = _CHANGED) -> None:
    """Change a share of each bfloat16 tensor's elements by one unit in the last place."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        places = torch.randint(len(bits), (round(share * len(bits)),))  # few are drawn twice
        bits[places] += 2 * torch.randint(0, 2, places.shape, dtype=torch.int16) - 1


def run(directory: Path, *, quick: bool) -> Stores:
    """Measure in a directory in shared memory, also with an emulated network mount."""
    torch.manual_seed(0)
    weights = models.random_weights(models.qwen2_0_5b(width=0.25))
    stores = Stores(sum(tensor.nbytes for tensor in weights.values()))
    with scratch_folder(directory) as folder:
        with as_network(), dbuffer.WeightSender(folder / "network", delta=True) as sender:
            _publish(sender, weights, stores, publishes=5 if quick else _PUBLISHES)
        weights = models.random_weights(models.qwen2_0_5b(width=0.25 if quick else 1.0))
        with as_network(), slow_link(_LINK_BYTES_PER_S):
            _load(folder, weights, stores)
        with (
            dbuffer.WeightSender(folder / "whole") as whole,
            dbuffer.WeightSender(folder / "patched", delta=True) as patched,
        ):
            _patch(whole, patched, weights, stores)
    return stores


def _publish(
    sender: dbuffer.WeightSender, weights: Weights, stores: Stores, *, publishes: int
) -> None:
    for _ in range(publishes):
        before = _files(sender.store)
        publication = sender.send(weights)
        new = _files(sender.store)
        stores.written_bytes.append(sum(new[path] for path in new.keys() - before.keys()))
        if publication.delta_bytes is not None:
            stores.delta_bytes.append(publication.delta_bytes)
        _step(weights)


def _files(store: Path) -> dict[Path, int]:
    found = [*store.glob("*/weights-*"), *store.glob("deltas/*")]
    return {path: path.stat().st_size for path in found}


def _load(folder: Path, weights: Weights, stores: Stores) -> None:
    """Time full versions and deltas in turns, each from the publish until it is loaded."""
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    with (
        dbuffer.WeightSender(folder / "slow-whole") as whole,
        dbuffer.WeightSender(folder / "slow-delta", delta=True) as delta,
        dbuffer.WeightReceiver(whole.store) as whole_receiver,
        dbuffer.WeightReceiver(delta.store) as delta_receiver,
    ):

        def publish(sender: dbuffer.WeightSender, receiver: dbuffer.WeightReceiver) -> None:
            sender.send(weights)
            receiver.load_into(target)

        for turn in range(1 + _ROUNDS):
            whole_s = timed(partial(publish, whole, whole_receiver))
            delta_s = timed(partial(publish, delta, delta_receiver))
            if turn:  # the first version is full in both stores
                stores.whole_s.append(whole_s)
                stores.delta_s.append(delta_s)
            _step(weights)


def _patch(
    whole: dbuffer.WeightSender, patched: dbuffer.WeightSender, weights: Weights, stores: Stores
) -> None:
    for sender in (whole, patched):
        for _ in range(3):  # makes and maps both buffers
            sender.send(weights)
    copier = Copier()
    buffers = np.zeros((2, sum(tensor.numel() for tensor in weights.values())), np.uint16)
    for _ in range(_ROUNDS):
        patches = [_patch_of(name, tensor) for name, tensor in weights.items()]
        stores.send_s.append(timed(lambda: whole.send(weights)))
        stores.patch_s.append(timed(partial(patched.send_patches, patches)))
        places, values = _in_one(patches, weights)
        write = partial(scatter, places, values)
        stores.patch_floor_s.append(sum(timed(partial(write, one, copier)) for one in buffers))


def _patch_of(name: str, tensor: torch.Tensor) -> dbuffer.SparsePatch:
    """Change some elements of a tensor; return the patch."""
    flat = tensor.view(-1)
    places = torch.randint(len(flat), (round(_CHANGED * len(flat)),)).unique()  # type: ignore[no-untyped-call]
    flat[places] *= -1
    return dbuffer.SparsePatch(name, places, flat[places])


def _in_one(patches: Sequence[dbuffer.SparsePatch], weights: Weights) -> tuple[Integers, Words]:
    """Return the places and values of all patches, as if all tensors were one."""
    sizes = [weights[patch.name].numel() for patch in patches]
    starts = itertools.accumulate(sizes, initial=0)
    places = [patch.indices + start for patch, start in zip(patches, starts, strict=False)]
    values = torch.cat([patch.values for patch in patches]).view(torch.int16)
    return torch.cat(places).numpy(), values.numpy().view(np.uint16)
