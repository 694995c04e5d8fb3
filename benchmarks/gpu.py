"""Publish from a GPU and switch one to it, against the same copies through page-locked memory.

Not yet run on a GPU: take its figures with care until someone has.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

import dbuffer
from benchmarks import models, report
from benchmarks.layouts import PlannedReceiver
from benchmarks.measure import median, timed
from benchmarks.models import Shapes, Weights

_ROUNDS = 7
_WARM_UPS = 3
"""The first switch of all proves the plan, and has no commit of its own."""

_TARGET = 0.9
_WAYS = ("publish", "receive", "stage", "commit")


def main(directory: Path) -> int:
    """Measure and print, or say that there is no GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU here, nothing to measure.")
        return 0
    print(report.environment_table(report.environment([directory])))
    shapes = models.qwen2_0_5b(width=1.5)
    num_bytes = models.num_bytes(shapes)
    times_s = measure(shapes, directory, torch.device("cuda"))
    rows = []
    for way in _WAYS:
        ours_s, limit_s = median(times_s[way]), median(times_s[f"{way}, pinned copy"])
        speeds = [f"{num_bytes / time_s / 1e9:.2f}" for time_s in (ours_s, limit_s)]
        verdict = "pass" if limit_s / ours_s >= _TARGET else "FAIL"
        rows.append((way, *speeds, f"{limit_s / ours_s:.2f}", f"≥ {_TARGET}", verdict))
    header = ("", "dbuffer GB/s", "pinned copy GB/s", "ratio", "target", "")
    print(f"\n{torch.cuda.get_device_name()}\n\n{report.table(header, rows)}")
    commit_s = median(times_s["commit"]) * 16e9 / num_bytes
    print(f"\nA commit of 16 GB at that speed: {commit_s:.2f} s (target: below 0.4)")
    return 0


def measure(shapes: Shapes, directory: Path, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each way, and of the copy of as many bytes that nothing can beat.

    *Stage*: from the store into page-locked memory, in the layout of an engine that fuses q, k and
    v, gate and up; the copy is one from main memory to main memory. *Commit*: from there into the
    engine's parameters.
    """
    weights = {name: t.to(device) for name, t in models.random_weights(shapes).items()}
    on_device = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    pinned, other = (_in_main_memory(weights) for _ in range(2))
    times_s: dict[str, list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="dbuffer-benchmark-", dir=directory) as folder,
        dbuffer.WeightSender(Path(folder, "store")) as sender,
        dbuffer.WeightReceiver(Path(folder, "store")) as receiver,
        PlannedReceiver(Path(folder, "store"), shapes, device) as engine,
    ):
        ways: dict[str, Callable[[], object]] = {
            "publish, pinned copy": lambda: _copy(pinned, weights),
            "publish": lambda: sender.send(weights),
            "receive, pinned copy": lambda: _copy(on_device, pinned),
            "receive": lambda: receiver.load_into(on_device),
            "stage, pinned copy": lambda: _copy(other, pinned),
            "commit, pinned copy": lambda: _copy(on_device, pinned),
        }
        for _ in range(_WARM_UPS + _ROUNDS):
            for way, action in ways.items():
                times_s[way].append(timed(lambda: _finished(action)))  # noqa: B023 - called at once
            switched = engine.switch()
            times_s["stage"].append(switched.staging_s)
            times_s["commit"].append(switched.commit_s)
        _require_equal(sender, receiver, engine, weights, on_device)
    return {way: samples[_WARM_UPS:] for way, samples in times_s.items()}


def _in_main_memory(weights: Weights) -> Weights:
    is_there = torch.cuda.is_available()
    return {
        name: torch.empty_like(tensor, device="cpu", pin_memory=is_there)
        for name, tensor in weights.items()
    }


def _require_equal(
    sender: dbuffer.WeightSender,
    receiver: dbuffer.WeightReceiver,
    engine: PlannedReceiver,
    weights: Weights,
    on_device: Weights,
) -> None:
    for tensor in on_device.values():
        tensor.zero_()
    for tensor in weights.values():
        tensor.add_(1)
    sender.send(weights)
    receiver.load_into(on_device)
    engine.switch()
    engine.require_right(weights)
    for name, tensor in weights.items():
        if not torch.equal(tensor, on_device[name]):
            raise RuntimeError(f"dbuffer did not bring {name} over")


def _copy(destination: Weights, source: Weights) -> None:
    for name, tensor in source.items():
        destination[name].copy_(tensor, non_blocking=True)


def _finished(action: Callable[[], object]) -> None:
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
