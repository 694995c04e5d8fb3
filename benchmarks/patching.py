"""Generation pause for a version in which one element of a hundred changed."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks import models
from benchmarks.copying import scatter
from benchmarks.engines import Checkpoint, Model, greedy_tokens, start_engine
from benchmarks.measure import median, timed
from benchmarks.models import Weights
from benchmarks.processes import child, finish, reply, scratch_folder
from benchmarks.switches import LIVE, model_of
from benchmarks.transfers import require_memory
from benchmarks.ways import Dbuffer, Floor, Memcpy
from dbuffer.io.copier import Copier

CHANGED = 0.01
"""Of all elements, by one unit in the last place, at random places: a step of a trainer."""

_ROUNDS = 7
_TIMEOUT_S = 600.0
_MEMORY_IN_MODELS = 9


@dataclass(slots=True)
class Patching:
    """Pauses of one engine, all in seconds, in turns."""

    model: Model
    whole_s: list[float] = field(default_factory=list)
    """All elements changed."""
    patched_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)
    """Of the model's bytes."""
    scatter_s: list[float] = field(default_factory=list)
    """To write as many elements into plain memory, at places that are known, and no more."""
    stage_s: list[float] = field(default_factory=list)
    """Until a version of which little changed was ready, while the engine could serve."""
    is_right: bool = False
    """Whether the engine generated what it does after a reload of the same weights."""

    @property
    def share(self) -> float:
        """The pause for a change, of that for a whole version."""
        return median(self.patched_s) / median(self.whole_s)


def step(weights: Weights, share: float = CHANGED) -> None:
    """Change some elements of bfloat16 by one unit in the last place."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        places = torch.randperm(len(bits))[: round(share * len(bits))]
        bits[places] += 2 * torch.randint(0, 2, places.shape, dtype=torch.int16) - 1


def run(directory: Path, *, quick: bool) -> Patching:
    """Measure, in a process of its own."""
    patching = Patching(model_of(LIVE, quick=quick))
    require_memory(_MEMORY_IN_MODELS * models.num_bytes(patching.model.shapes) + (2 << 30))
    with scratch_folder(directory) as folder, child(_measure, folder, patching, quick) as measuring:
        result: Patching = reply(measuring, _TIMEOUT_S)
        finish(measuring)
    return result


def _measure(connection: Connection, folder: Path, patching: Patching, quick: bool) -> None:
    both = [patching.model.weights(seed) for seed in (0, 1)]
    checkpoint = Checkpoint(folder / "checkpoint", patching.model)
    checkpoint.save(both[0])
    llm = start_engine(checkpoint, live=True)
    ours, memcpy, floor = Dbuffer(llm, folder / "store", delta=True), Memcpy(both[0]), Floor(llm)

    def switch(weights: Weights) -> float:
        ours.publish(weights)
        ours.wait_ready()
        gc.collect()
        return ours.switch(weights)

    words = np.ones(models.num_bytes(patching.model.shapes) // 2, np.uint16)
    generator = np.random.default_rng(0)
    places = np.unique(generator.integers(0, len(words), round(CHANGED * len(words))))
    values, copier = np.zeros(len(places), np.uint16), Copier()
    try:
        for weights in (*both, *both):  # until the plan is proven
            switch(weights)
        for index in range(2 if quick else _ROUNDS):
            weights = both[index % 2]
            patching.whole_s.append(switch(weights))
            step(weights)
            patching.patched_s.append(switch(weights))
            patching.stage_s.append(ours.stage_s)
            patching.memcpy_s.append(memcpy.switch(weights))
            patching.scatter_s.append(timed(lambda: scatter(places, values, words, copier)))
        tokens = greedy_tokens(llm)
        floor.switch(weights)
        patching.is_right = tokens == greedy_tokens(llm)
    finally:
        ours.close()
    connection.send(patching)
    connection.recv()
