"""Publish from a GPU and receive onto it, against the same copies through pinned memory.

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
from benchmarks.measure import median, timed
from benchmarks.models import Weights

_ROUNDS = 7
_WARM_UPS = 2


def main(directory: Path) -> int:
    """Measure and print, or say that there is no GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU here, nothing to measure.")
        return 0
    print(report.environment_table(report.environment([directory])))
    shapes = models.qwen2_0_5b(width=1.5)
    num_bytes = models.num_bytes(shapes)
    times_s = _measure(
        {name: t.cuda() for name, t in models.random_weights(shapes).items()}, directory
    )
    rows = []
    for way in ("publish", "receive"):
        ours_s, limit_s = median(times_s[way]), median(times_s[f"{way}, pinned copy"])
        speeds = [f"{num_bytes / time_s / 1e9:.2f}" for time_s in (ours_s, limit_s)]
        verdict = "pass" if limit_s / ours_s >= 0.8 else "FAIL"
        rows.append((way, *speeds, f"{limit_s / ours_s:.2f}", "≥ 0.8", verdict))
    header = ("", "dbuffer GB/s", "pinned copy GB/s", "ratio", "target", "")
    print(f"\n{torch.cuda.get_device_name()}\n\n{report.table(header, rows)}")
    return 0


def _measure(weights: Weights, directory: Path) -> dict[str, list[float]]:
    on_device = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    pinned = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=True)
        for name, tensor in weights.items()
    }
    times_s: dict[str, list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="dbuffer-benchmark-", dir=directory) as folder,
        dbuffer.WeightSender(Path(folder, "store")) as sender,
        dbuffer.WeightReceiver(Path(folder, "store")) as receiver,
    ):
        ways: dict[str, Callable[[], object]] = {
            "publish, pinned copy": lambda: _copy(pinned, weights),
            "publish": lambda: sender.send(weights),
            "receive, pinned copy": lambda: _copy(on_device, pinned),
            "receive": lambda: receiver.load_into(on_device),
        }
        for _ in range(_WARM_UPS + _ROUNDS):
            for way, action in ways.items():
                times_s[way].append(timed(lambda: _finished(action)))  # noqa: B023 - called at once
        _require_equal(sender, receiver, weights, on_device)
    return {way: samples[_WARM_UPS:] for way, samples in times_s.items()}


def _require_equal(
    sender: dbuffer.WeightSender,
    receiver: dbuffer.WeightReceiver,
    weights: Weights,
    on_device: Weights,
) -> None:
    for tensor in on_device.values():
        tensor.zero_()
    sender.send(weights)
    receiver.load_into(on_device)
    for name, tensor in weights.items():
        if not torch.equal(tensor, on_device[name]):
            raise RuntimeError(f"dbuffer did not bring {name} over")


def _copy(destination: Weights, source: Weights) -> None:
    for name, tensor in source.items():
        destination[name].copy_(tensor, non_blocking=True)


def _finished(action: Callable[[], object]) -> None:
    action()
    torch.cuda.synchronize()
