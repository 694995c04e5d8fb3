"""Publishes from a GPU and switches on a GPU, compared with copies from page-locked memory.

The parts run from the shortest to the longest, for at most eight minutes in all. The file of
``--json`` always has the results so far. An error ends only its part, and a part that would take
too long is left out.

Needs torch with CUDA, tensordict, watchdog, xxhash, zstandard, numpy and safetensors; no network.
With pytest, the benchmark also runs tests; with vLLM, it also measures real engines. All other
parts use a model with fused parameters, as in vLLM, in place of an engine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import mmap
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dbuffer
from benchmarks import models, report
from benchmarks.layouts import FusedModel, PlannedReceiver
from benchmarks.measure import median, percentile, timed
from benchmarks.models import Weights
from dbuffer.engine.plan.prepared_switch import digest_of_all
from dbuffer.io.copier import Copier
from dbuffer.io.devices import PageLock

_TIME_S = 480.0
_TESTS_S = 120.0

_ROUNDS = 3
_WARM_UPS = 4
"""Switches before the measured ones. The first one verifies the plan, and buffers are page-locked
when they are written or read for the second time."""

_NUM_STEPS = 200

_CHANGED, _ON_DEVICE = ", 1 % changed", ", staged on the GPU"

_SPEEDS = {
    "publish": 0.9,
    "receive": 0.9,
    "commit": 0.9,
    "commit" + _CHANGED: 5.0,
    "publish" + _CHANGED: 1 / 1.1,
    "stage" + _CHANGED: 1 / 1.2,
}
"""Targets: minimum speeds, as multiples of the limit's speed. A version of 1 GB has no target,
because a fixed cost of 6 ms is a large part of its time."""

_JUDGED_BYTES = 7e9

_ON_DEVICE_MS: dict[float, float] = {1: 4.0, 16: 15.0}
"""Targets: most milliseconds to commit a version that was staged on the GPU, by its size in GB."""

_WIDTHS = {1: 1.0, 8: 3.125, 16: 4.5, 32: 6.5}
"""Factor of the layers' width, by the approximate size in GB that it gives."""

_ON_CPU = {0.005: 0.02, 0.01: 0.03}
"""Factor of the layers' width, by size in GB, to try the program without a GPU."""

_ENGINES_AFTER = 8
"""Size in GB after which real engines are measured."""


def main(options: Namespace) -> int:
    """Measure and print, or say that there is no GPU."""
    if not (options.cpu or torch.cuda.is_available()):
        print("nothing to measure: there is no GPU")
        return 0
    more = {"GPU": "none: main memory is the device"}
    if not options.cpu:
        more = {"GPU": torch.cuda.get_device_name(), "CUDA": str(torch.version.cuda)}
    figures = Figures(report.begin([options.dir[0]], more), options.json)
    if not options.cpu:
        figures.program("pytest", "-qm", "gpu", "tests/core/test_gpu.py", time_s=_TESTS_S)
    widths = list((_ON_CPU if options.cpu else _WIDTHS).items())
    for size_gb, width in widths[: 1 if options.quick else None]:
        device = torch.device("cpu" if options.cpu else "cuda")
        _measure(figures, size_gb, width, options.dir[0], device)
        if size_gb == _ENGINES_AFTER:
            for word in ("pause", "quantized", "latency"):
                figures.program("benchmarks", word, "--quick", needs="vllm")
    if not options.cpu:
        figures.program("pytest", "-qm", "gpu", "tests/integrations/vllm/test_gpu.py", needs="vllm")
    return 0


class Figures:
    """Measured times in seconds, by size in GB and by way, and the outcome of each part."""

    def __init__(self, environment: dict[str, str], file: Path | None) -> None:
        self._file = file
        self._end_s = time.monotonic() + _TIME_S
        self._samples: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._found: dict[str, Any] = {"environment": environment, "parts": {}}
        self._part: dict[str, list[float]] = {}
        self._durations_s: dict[str, float] = {}
        """Seconds per GB that the last part of each kind took."""

    @property
    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def part(self, kind: str, size_gb: float, num_bytes: int, measure: Callable[[], None]) -> None:
        """Measure a part, unless too little time is left; print its duration."""
        title = f"{num_bytes / 1e9:.3g} GB, {kind}"
        if self._durations_s.get(kind, 0.0) * size_gb > self._left_s:
            self._conclude(title, "left out: too little time is left")
            return
        self._part = self._samples[size_gb]
        before, started, outcome = set(self._part), time.monotonic(), ""
        try:
            measure()
        except (dbuffer.DBufferError, OSError, RuntimeError, MemoryError) as error:
            outcome = f"failed: {error}"
        gc.collect()
        torch.cuda.empty_cache()
        duration_s = time.monotonic() - started
        self._durations_s[kind] = duration_s / size_gb
        self._conclude(title, outcome or f"took {duration_s:.0f} s")
        times_s = {way: median(samples) for way, samples in self._part.items()}
        rows = [_row(way, times_s, size_gb, num_bytes) for way in times_s if way not in before]
        header = ("", "ms", "GB/s", "of the limit", "target", "")
        print(f"\n{report.table(header, rows)}" if rows else "", flush=True)

    def add(self, way: str, *samples_s: float) -> None:
        self._part[way] += samples_s
        self._save()

    def program(
        self, module: str, *arguments: str, needs: str | None = None, time_s: float = _TIME_S
    ) -> None:
        """Run a Python module, which prints its results, in the time that is left."""
        title = " ".join((module, *arguments))
        if importlib.util.find_spec(needs or module) is None:
            self._conclude(title, f"left out: there is no {needs or module}")
            return
        print(f"\n{title}:", flush=True)
        program = subprocess.Popen([sys.executable, "-m", module, *arguments])
        try:
            outcome = f"ended with {program.wait(max(0.0, min(time_s, self._left_s)))}"
        except subprocess.TimeoutExpired:
            outcome = "stopped: it took too long"
        finally:
            program.terminate()  # it then removes its files
            program.wait()
        self._conclude(title, outcome)

    def _conclude(self, title: str, outcome: str) -> None:
        print(f"\n{title}: {outcome}", flush=True)
        self._found["parts"][title] = outcome
        self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        self._found["seconds"] = {
            size_gb: {way: median(samples) for way, samples in times_s.items()}
            for size_gb, times_s in self._samples.items()
        }
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self._found, indent=1))
        unfinished.replace(self._file)  # atomic: a killed program leaves no half-written file


def _row(
    way: str, times_s: dict[str, float], size_gb: float, num_bytes: int
) -> tuple[str, str, str, str, str, str]:
    time_s, limit_s = times_s[way], times_s.get(_limit_of(way))
    if way.startswith("step"):
        return way, f"{time_s * 1e3:.2f}", "", "", "", ""
    share = 0.0 if limit_s is None else limit_s / time_s
    speeds = f"{num_bytes / time_s / 1e9:.2f}", f"{share:.2f}" if share else ""
    target, is_met = "", False
    if way == "commit" + _ON_DEVICE and size_gb in _ON_DEVICE_MS:
        target = f"≤ {_ON_DEVICE_MS[size_gb]:g} ms"
        is_met = time_s * 1e3 <= _ON_DEVICE_MS[size_gb]
    elif way in _SPEEDS and num_bytes >= _JUDGED_BYTES:
        target, is_met = f"≥ {_SPEEDS[way]:.2g}", share >= _SPEEDS[way]
    verdict = ("pass" if is_met else "FAIL") if target else ""
    return way, f"{time_s * 1e3:.1f}", *speeds, target, verdict


def _limit_of(way: str) -> str:
    if way == "publish" + _CHANGED:
        return "publish"
    if way.startswith("publish"):
        return "publish: copy into page-locked memory"
    if way.startswith("stage"):
        return "stage: memcpy"
    return "receive: copy from page-locked memory"


def _measure(
    figures: Figures, size_gb: float, width: float, directory: Path, device: torch.device
) -> None:
    """Measure a version of one size: all ways, and copies of as many bytes as lower bounds.

    *Stage*: copy from the store into page-locked memory or into the GPU's memory, in the layout of
    an engine with fused parameters. *Commit*: copy the staged version into the engine's parameters,
    in a pause. *Attest*: compare the parameters with the staged version, while the engine serves.
    *Step*: read all parameters once, as decoding does, alone or while a version is staged.
    """
    shapes = models.qwen2_0_5b(width=width)
    weights = {
        name: torch.empty(shape, dtype=models.DTYPE, device=device).uniform_(-1, 1)
        for name, shape in shapes.items()
    }
    part = partial(figures.part, size_gb=size_gb, num_bytes=models.num_bytes(shapes))
    has_all = size_gb <= 1
    part("copies", measure=lambda: _measure_copies(figures, weights, device, has_all=has_all))
    for kind in ("", _ON_DEVICE, _CHANGED):
        with tempfile.TemporaryDirectory(prefix="dbuffer-", dir=directory) as folder:
            measure = partial(_measure_store, figures, Path(folder, "store"), weights, device, kind)
            part(kind.removeprefix(", ") or "staged in page-locked memory", measure=measure)


def _measure_store(
    figures: Figures, store: Path, weights: Weights, device: torch.device, kind: str
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    has_deltas = kind == _CHANGED
    share = 0.01 if has_deltas else 1.0
    with (
        dbuffer.WeightSender(store, delta=has_deltas) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        PlannedReceiver(store, shapes, device, stages_on_device=kind == _ON_DEVICE) as engine,
    ):
        # Measure receiving in one part only: the received weights need as much memory as the model.
        received = {} if kind else {name: torch.zeros_like(t) for name, t in weights.items()}
        for index in range(_WARM_UPS + _ROUNDS):
            _change(weights, share)
            times_s = {"publish": _finished_s(lambda: sender.send(weights))}
            switched = engine.switch()
            times_s |= {"stage": switched.staging_s, "commit": switched.commit_s}
            times_s["attest"] = engine.attest_s()
            if received:
                times_s["receive"] = _finished_s(lambda: receiver.load_into(received))
            if index >= _WARM_UPS:
                for way, time_s in times_s.items():
                    figures.add(way + kind, time_s)
        _require_equal(weights, received)
        received.clear()
        engine.require_right(weights)
        if has_deltas:
            parameters = list(engine.model.parameters())
            figures.add("digest", _finished_s(lambda: digest_of_all(parameters)))
            _change(weights, 1.0)
            all_s = _finished_s(lambda: sender.send(weights))
            figures.add("publish with delta=True, all changed", all_s)
            engine.switch()
            engine.require_right(weights)
        else:
            _measure_steps(figures, sender, engine, weights, kind)


def _measure_steps(
    figures: Figures,
    sender: dbuffer.WeightSender,
    engine: PlannedReceiver,
    weights: Weights,
    kind: str,
) -> None:
    """Measure inter-token latency, with an engine whose steps only read its weights."""
    step = _step_of(engine.model)
    alone_s = [_finished_s(step) for _ in range(_NUM_STEPS)]
    beside_s: list[float] = []
    for _ in range(_ROUNDS):
        _change(weights, 1.0)
        version = sender.send(weights).version
        beside_s.append(_finished_s(step))
        while not engine.is_ready(version):
            beside_s.append(_finished_s(step))
        engine.switch()
        engine.attest_s()
    for way, times_s in (("step alone", alone_s), ("step beside staging", beside_s)):
        for share in (0.5, 0.99):
            figures.add(f"{way}{kind}, {share:.0%} at most", percentile(times_s, share))


def _step_of(model: FusedModel) -> Callable[[], None]:
    pairs = [(p, torch.ones_like(p[0])) for p in model.parameters() if p.dim() == 2]

    def step() -> None:
        for parameter, ones in pairs:
            torch.mv(parameter, ones)

    step()
    if not pairs[0][0].is_cuda:
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _measure_copies(
    figures: Figures, weights: Weights, device: torch.device, *, has_all: bool
) -> None:
    """Measure copies of all tensors from and to a GPU, in the fastest way or in all ways."""
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    on_gpu = list(weights.values())
    # Don't use torch's page-locked memory: torch rounds its size up to a power of 2, and keeps it.
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    page_locked = _cut(memory, on_gpu)
    mapped = _cut(torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8), on_gpu)
    memory.zero_()  # makes the pages
    locks: list[PageLock] = []

    def lock() -> None:
        if device.type == "cuda":
            locks.append(PageLock(memory.data_ptr(), num_bytes))

    figures.add("publish: page-lock a mapping, once", timed(lock))
    with contextlib.closing(Copier()) as copier:
        ways: dict[str, Callable[[], object]] = {
            "publish: copy into page-locked memory": lambda: _copy(page_locked, on_gpu),
            "receive: copy from page-locked memory": lambda: _copy(on_gpu, page_locked),
            "stage: memcpy": lambda: copier.copy_tensors(mapped, page_locked),
        }
        if has_all:
            ways |= {
                "publish: into a mapping": lambda: _copy(mapped, on_gpu),
                "publish: in page-locked pieces": lambda: copier.copy_tensors(mapped, on_gpu),
                "receive: from a mapping": lambda: _copy(on_gpu, mapped),
                "receive: in page-locked pieces": lambda: copier.copy_tensors(on_gpu, mapped),
            }
        for way, action in ways.items():
            action()  # writes each page for the first time
            figures.add(way, *(_finished_s(action) for _ in range(_ROUNDS)))
    for page_lock in locks:
        page_lock.release()


def _cut(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut memory into tensors with the shapes and dtypes of ``like``."""
    parts = torch.split(memory, [tensor.nbytes for tensor in like])
    return [
        part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)
    ]


def _copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source, non_blocking=True)


def _change(weights: Weights, share: float) -> None:
    """Change a share of each tensor's elements by one unit in the last place."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        if share == 1.0:
            bits ^= 1
        else:
            count = max(1, int(share * bits.numel()))
            places = torch.randint(bits.numel(), (count,), device=bits.device)
            bits[places] ^= 1


def _require_equal(weights: Weights, received: Weights) -> None:
    for name, tensor in received.items():
        if not torch.equal(tensor, weights[name]):
            raise RuntimeError(f"dbuffer delivered wrong values of {name}")


def _finished_s(action: Callable[[], object]) -> float:
    def finished() -> None:
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return timed(finished)
