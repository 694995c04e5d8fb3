"""Publish from a GPU and switch one, beside copies of the same bytes from page-locked memory.

Needs torch with CUDA, tensordict, watchdog, xxhash, zstandard, numpy and safetensors; no vLLM, no
network. The engine is a model whose parameters lie as vLLM's do (fused; with two ranks, the half
of each).
"""

from __future__ import annotations

import json
import mmap
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import dbuffer
from benchmarks import models, report
from benchmarks.layouts import PlannedReceiver
from benchmarks.measure import median, timed
from benchmarks.models import Shapes, Weights
from dbuffer.io.copier import Copier
from dbuffer.io.devices import PageLock

_ROUNDS = 3
_WARM_UPS = 4
"""Switches before the measured ones: the first verifies the plan; buffers are page-locked when they
are written, or read, the second time."""

_CHANGED, _ON_DEVICE = ", 1 % changed", ", staged on the GPU"

_TARGETS = {
    "publish": 0.9,
    "receive": 0.9,
    "commit": 0.9,
    "commit" + _CHANGED: 5.0,
    "commit" + _ON_DEVICE: 18.0,
}
"""Speeds as multiples of that of the copy of all bytes. A version of 1 GB is not judged: it takes
6 ms besides."""

_JUDGED_BYTES = 7e9

_WIDTHS = {1: 1.0, 8: 3.125, 16: 4.5}
"""Width of the layers that makes about so many GB."""


def main(options: Namespace) -> int:
    """Measure and print, or say that there is no GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU here, nothing to measure.")
        return 0
    directory: Path = options.dir[0]
    environment = report.begin(
        [directory], {"GPU": torch.cuda.get_device_name(), "CUDA": str(torch.version.cuda)}
    )
    device = torch.device("cuda")
    results = {}
    for size_gb, width in list(_WIDTHS.items())[: 1 if options.quick else None]:
        shapes = models.qwen2_0_5b(width=width)
        started = time.monotonic()
        times_s = measure(shapes, directory, device)
        results[size_gb] = {way: median(samples) for way, samples in times_s.items()}
        num_bytes = models.num_bytes(shapes)
        print(f"\n{num_bytes / 1e9:.2f} GB in {len(shapes)} tensors", end="")
        print(f" ({time.monotonic() - started:.0f} s)\n\n{_table(results[size_gb], num_bytes)}")
        print(flush=True)
        torch.cuda.empty_cache()
        if options.json:
            found = {"environment": environment, "seconds": results}
            options.json.write_text(json.dumps(found, indent=1))
    return 0


def _table(times_s: dict[str, float], num_bytes: int) -> str:
    rows = []
    for way, time_s in times_s.items():
        limit_s = times_s[_limit_of(way)]
        target = _TARGETS.get(way)
        if num_bytes < _JUDGED_BYTES:
            target = None
        verdict = "" if target is None else "pass" if limit_s / time_s >= target else "FAIL"
        speeds = f"{time_s * 1e3:.1f}", f"{num_bytes / time_s / 1e9:.2f}", f"{limit_s / time_s:.2f}"
        rows.append((way, *speeds, "" if target is None else f"≥ {target}", verdict))
    return report.table(("", "ms", "GB/s", "of the copy", "target", ""), rows)


def _limit_of(way: str) -> str:
    if way.startswith("publish"):
        return "publish: copy into page-locked memory"
    if way.startswith("stage"):
        return "stage: memcpy"
    return "receive: copy from page-locked memory"


def measure(shapes: Shapes, directory: Path, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each way, and of the copies of as many bytes that limit it.

    *Stage*: from the store into page-locked memory, in the layout of an engine that fuses q, k and
    v, gate and up; or into the GPU's. *Commit*: from there into the engine's parameters; the engine
    pauses for it. *Attest*: compare the parameters with the staged version; the engine serves.
    """
    weights = {
        name: torch.empty(shape, dtype=models.DTYPE, device=device).uniform_(-1, 1)
        for name, shape in shapes.items()
    }
    times_s: dict[str, list[float]] = defaultdict(list)
    _measure_copies(weights, times_s)
    for kind in ("", _ON_DEVICE, _CHANGED):
        with tempfile.TemporaryDirectory(prefix="dbuffer-", dir=directory) as folder:
            _measure_store(Path(folder, "store"), weights, times_s, device, kind)
    return {way: samples[-_ROUNDS:] for way, samples in times_s.items()}


def _measure_store(
    store: Path,
    weights: Weights,
    times_s: dict[str, list[float]],
    device: torch.device,
    kind: str,
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    has_deltas = kind == _CHANGED
    share = 0.01 if has_deltas else 1.0
    with (
        dbuffer.WeightSender(store, delta=has_deltas) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        PlannedReceiver(store, shapes, device, stages_on_device=kind == _ON_DEVICE) as engine,
    ):
        on_device = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

        def measured(way: str, action: Callable[[], object]) -> None:
            times_s[way].append(timed(lambda: _finished(action)))

        for _ in range(_WARM_UPS + _ROUNDS):
            _change(weights, share)
            measured("publish" + kind, lambda: sender.send(weights))
            switched = engine.switch()
            times_s["stage" + kind].append(switched.staging_s)
            times_s["commit" + kind].append(switched.commit_s)
            times_s["attest" + kind].append(engine.attest_s())
            measured("receive" + kind, lambda: receiver.load_into(on_device))
        if has_deltas:
            _change(weights, 1.0)
            measured("publish with delta=True, all changed", lambda: sender.send(weights))
            receiver.load_into(on_device)
            engine.switch()
        _require_equal(weights, on_device)
        on_device.clear()
        engine.require_right(weights)


def _measure_copies(weights: Weights, times_s: dict[str, list[float]]) -> None:
    """Measure copies of all tensors from and to a GPU, by all ways that there are."""
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    on_gpu = list(weights.values())
    # Not torch's own page-locked memory, which it rounds up to a power of two, and keeps.
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    page_locked = _cut(memory, on_gpu)
    mapped = _cut(torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8), on_gpu)
    copier = Copier()

    def measured(way: str, action: Callable[[], object]) -> None:
        for _ in range(1 + _ROUNDS):  # the first writes each page for the first time
            times_s[way].append(timed(lambda: _finished(action)))

    memory.zero_()  # makes the pages
    locks: list[PageLock] = []
    lock_s = timed(lambda: locks.append(PageLock(memory.data_ptr(), num_bytes)))
    times_s["publish: page-lock a mapping, once"].append(lock_s)
    measured("publish: copy into page-locked memory", lambda: _copy(page_locked, on_gpu))
    measured("publish: into a mapping", lambda: _copy(mapped, on_gpu))
    measured("publish: in page-locked pieces", lambda: copier.copy_tensors(mapped, on_gpu))
    measured("receive: copy from page-locked memory", lambda: _copy(on_gpu, page_locked))
    measured("receive: from a mapping", lambda: _copy(on_gpu, mapped))
    measured("receive: in page-locked pieces", lambda: copier.copy_tensors(on_gpu, mapped))
    measured("stage: memcpy", lambda: copier.copy_tensors(mapped, page_locked))
    locks.pop().release()
    copier.close()


def _cut(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut memory into tensors of these shapes."""
    parts = torch.split(memory, [tensor.nbytes for tensor in like])
    return [
        part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)
    ]


def _copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source, non_blocking=True)


def _change(weights: Weights, share: float) -> None:
    """Change such a share of the elements of each tensor by one in the last place."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        if share == 1.0:
            bits ^= 1
        else:
            count = max(1, int(share * bits.numel()))
            places = torch.randint(bits.numel(), (count,), device=bits.device)
            bits[places] ^= 1


def _require_equal(weights: Weights, received: Weights) -> None:
    for name, tensor in weights.items():
        if not torch.equal(tensor, received[name]):
            raise RuntimeError(f"dbuffer did not bring {name} over")


def _finished(action: Callable[[], object]) -> None:
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
