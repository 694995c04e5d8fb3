"""Switches of a real engine to new weights, by dbuffer and by vLLM itself, in turns."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.engines import Checkpoint, Model, Tokens, greedy_tokens, start_engine
from benchmarks.measure import median, timed
from benchmarks.models import Weights
from benchmarks.processes import child, finish, reply, scratch_folder
from benchmarks.steps import OTHER, Stopwatch, watch_steps
from benchmarks.transfers import require_memory
from benchmarks.ways import Dbuffer, Floor, Memcpy, Reload, Way

PACKED, LIVE, GPU = "packed by oneDNN", "live parameters", "on the GPU"
EXPERTS = "packed experts"

_MEMORY_IN_MODELS = 8
"""Memory to require: two sets of weights, a checkpoint, two buffers, the engine, and a reload."""

_ENGINE_BYTES = 2 << 30
_ENGINE_TIMEOUT_S = 600.0

_ROUNDS = {PACKED: 7, LIVE: 7, GPU: 7, EXPERTS: 3}
"""Rounds by engine. Few for experts, because a reload of 18,000 tensors takes seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one switch in one way."""

    publish_s: float
    stage_s: float
    pause_s: float
    total_s: float
    """Time to publish, to wait until the version is ready, and to switch."""
    steps_s: dict[str, float]
    """Times of the pause's steps."""


@dataclass(slots=True)
class Pauses:
    """Measurements of one engine."""

    engine: str
    model: Model
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Samples by the name of the way."""
    is_right: dict[str, bool] = field(default_factory=dict)
    """Whether the tokens after a switch were the tokens of an engine started with these weights."""
    memory: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Memory of the process at named moments, in bytes: Pss, anonymous Pss, and torch's memory on
    the GPU."""

    def pause_s(self, way: str, *, without: str | None = None) -> float:
        """Return the median pause, with all its steps or without one of them."""
        samples = self.samples[way]
        return median([s.pause_s - s.steps_s.get(without or "", 0.0) for s in samples])

    def step_s(self, way: str, step: str) -> float:
        """Return the median time of one step."""
        return median([sample.steps_s.get(step, 0.0) for sample in self.samples[way]])

    @property
    def staging_bytes(self) -> int:
        """Increase of the process's anonymous memory by following and staging."""
        anonymous = [in_use for _, _, in_use, _ in self.memory]
        return max(anonymous[1:]) - anonymous[0]

    @property
    def num_bytes(self) -> int:
        """Size of the model."""
        return models.num_bytes(self.model.shapes)

    @property
    def title(self) -> str:
        """Engine and model."""
        return f"{self.model.title}, {self.engine}"


def model_of(engine: str, *, quick: bool) -> Model:
    """Return the model that an engine is started with."""
    if engine == EXPERTS:
        shapes = models.qwen3_30b_a3b(narrowing=8, layers=2 if quick else 48, head=64)
        return Model("Qwen3-30B-A3B's shape, narrowed", shapes, head_size=64)
    width, head_size = (0.25, 32) if quick else (1.0, 64)
    return Model("Qwen2.5-0.5B's shape", models.qwen2_0_5b(width=width), head_size)


def run(engine: str, directory: Path, *, quick: bool) -> Pauses:
    """Measure one engine in its own process. Another process computes the expected tokens."""
    pauses = Pauses(engine, model_of(engine, quick=quick))
    require_memory(_MEMORY_IN_MODELS * pauses.num_bytes + _ENGINE_BYTES)
    rounds = 2 if quick else _ROUNDS[engine]
    with scratch_folder(directory) as folder:
        with child(_answer, folder, pauses) as fresh:
            right: Tokens = reply(fresh, _ENGINE_TIMEOUT_S)
            finish(fresh)
        with child(_measure, folder, pauses, rounds, right) as measuring:
            result: Pauses = reply(measuring, _ENGINE_TIMEOUT_S)
            finish(measuring)
    return result


def _answer(connection: Connection, folder: Path, pauses: Pauses) -> None:
    """Send the tokens of an engine that was started with the second weights."""
    checkpoint = Checkpoint(folder / "checkpoint", pauses.model)
    checkpoint.save(pauses.model.weights(seed=1))
    llm = start_engine(checkpoint, live=pauses.engine == LIVE)
    connection.send(greedy_tokens(llm))
    connection.recv()


def _measure(
    connection: Connection, folder: Path, pauses: Pauses, rounds: int, right: Tokens
) -> None:
    both = [pauses.model.weights(seed) for seed in (0, 1)]
    checkpoint = Checkpoint(folder / "checkpoint", pauses.model)
    checkpoint.save(both[0])
    llm = start_engine(checkpoint, live=pauses.engine == LIVE)
    expected = [greedy_tokens(llm), right]
    if expected[0] == expected[1]:
        raise RuntimeError("both sets of weights give the same tokens")
    stopwatch, floor = watch_steps(llm), Floor(llm)
    for weights in both:  # memory that the first reloads allocate counts as vLLM's
        floor.switch(weights)
    pauses.memory.append(("before following", *_memory_bytes()))
    ours = Dbuffer(llm, folder / "store")
    try:
        _weigh_staging(pauses, ours, both)
        ways = (ours, floor, Reload(llm, checkpoint))
        memcpy = Memcpy(both[0])
        for index in range(rounds):
            for way in (*ways[index % 3 :], memcpy, *ways[: index % 3]):
                weights, others = both[index % 2], both[1 - index % 2]
                sample = _sample(way, weights, others, floor, stopwatch)
                pauses.samples.setdefault(way.name, []).append(sample)
                if way is ours and greedy_tokens(llm) != expected[index % 2]:
                    raise RuntimeError("wrong tokens after a switch by dbuffer")
        _look_at_tokens(pauses, llm, ways, both, right)
    finally:
        ours.close()
    connection.send(pauses)
    connection.recv()


def _weigh_staging(pauses: Pauses, ours: Dbuffer, both: Sequence[Weights]) -> None:
    """Measure the process's memory without and with a staged version."""
    for weights in both:  # fills both buffers, and switches for the first time
        ours.publish(weights)
        ours.switch(weights)
    pauses.memory.append(("following, nothing staged", *_memory_bytes()))
    ours.publish(both[0])
    ours.wait_ready()
    pauses.memory.append(("a version staged", *_memory_bytes()))
    ours.switch(both[0])
    pauses.memory.append(("switched to it", *_memory_bytes()))


def _memory_bytes() -> tuple[int, int, int]:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return 1024 * kilobytes["Pss"], 1024 * kilobytes["Pss_Anon"], on_gpu


def _sample(
    way: Way, weights: Weights, others: Weights, floor: Floor, stopwatch: Stopwatch
) -> Sample:
    """Time a switch in one way. ``others`` are weights that the engine can have before."""
    is_ours = isinstance(way, Dbuffer)
    if is_ours:  # after a load by another way, the next switch reloads everything
        way.publish(others)
        way.switch(others)
    publish_s = timed(lambda: way.publish(weights))
    ready_s = timed(way.wait_ready)
    if not is_ours:
        # Reload once, untimed, to touch the memory that a reload allocates: memory that the host of
        # a virtual machine has reclaimed takes ten times as long.
        floor.switch(weights)
    gc.collect()  # so that no way collects another way's garbage
    stopwatch.read()
    pause_s = way.switch(weights)
    steps_s = stopwatch.read()
    steps_s[OTHER] = pause_s - sum(steps_s.values())
    return Sample(publish_s, way.stage_s, pause_s, publish_s + ready_s + pause_s, steps_s)


def _look_at_tokens(
    pauses: Pauses, llm: Any, ways: Sequence[Way], both: Sequence[Weights], right: Tokens
) -> None:
    """Test for each way whether it switches an engine from the first weights to the second."""
    ours = ways[0]
    for way in ways:
        for each, weights in ((ours, both[0]), (way, both[1])):
            each.publish(weights)
            each.switch(weights)
        pauses.is_right[way.name] = greedy_tokens(llm) == right
