"""What dbuffer must reach, and whether it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.measure import median, percentile
from benchmarks.peers import Dbuffer, DbufferChecksums, Safetensors, TorchRL
from benchmarks.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Results:
    """All that a run measured; transfers by the key of their case."""

    transfers: dict[str, Transfer] = field(default_factory=dict)
    flips_s: list[float] = field(default_factory=list)
    extra_memory_bytes: dict[str, int] = field(default_factory=dict)
    """By the peer's name."""
    fan_out_s: dict[int, list[float]] = field(default_factory=dict)
    """Publish times by the number of receivers."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table of targets."""

    what: str
    target: str
    measured: str
    met: bool


def check(results: Results) -> list[Check]:
    """Judge a run."""
    dense, experts = results.transfers["dense"], results.transfers["experts"]
    checksums = results.transfers["checksums"]
    size = f"{_gigabytes(dense)} in {len(dense.case.shapes)} tensors"
    many = f"{_gigabytes(experts)} in {len(experts.case.shapes):,} tensors"
    return [
        _at_least(f"publish, {size}", "of memcpy", _ratio(dense, dense.publish), 0.95),
        _at_least("", "x TorchRL", dense.publish_speedup(TorchRL.name), 15),
        _at_least("", "x safetensors", dense.publish_speedup(Safetensors.name), 5),
        _at_least(
            "the same with checksums",
            "of memcpy",
            _ratio(checksums, checksums.publish, DbufferChecksums.name),
            0.70,
        ),
        _at_least(f"receive, {size}", "of memcpy", _ratio(dense, dense.receive), 0.95),
        _at_least("", "x TorchRL", dense.receive_speedup(TorchRL.name), 1.5),
        _at_least("", "x safetensors", dense.receive_speedup(Safetensors.name), 1.3),
        _at_least(f"publish, {many}", "of memcpy", _ratio(experts, experts.publish), 0.80),
        _at_least(f"receive, {many}", "of memcpy", _ratio(experts, experts.receive), 0.80),
        *_flips(results.flips_s),
        _at_most(
            "extra memory in the sender", "MB", results.extra_memory_bytes[Dbuffer.name] / 1e6, 64
        ),
        _fan_out(results.fan_out_s),
    ]


def _ratio(transfer: Transfer, times: Mapping[str, list[float]], peer: str = Dbuffer.name) -> float:
    return transfer.limit_s / median(times[peer])


def _flips(latencies_s: list[float]) -> list[Check]:
    what = f"flip seen by a receiver in another process, {len(latencies_s)} flips"
    return [
        _at_most(what, "ms, median", 1e3 * median(latencies_s), 2),
        _at_most("", "ms, p99", 1e3 * percentile(latencies_s, 0.99), 20),
    ]


def _fan_out(times_s: dict[int, list[float]]) -> Check:
    few, many = min(times_s), max(times_s)
    slowdown = median(times_s[many]) / median(times_s[few])
    what = f"publish time, {many} receivers against {few}"
    return _at_most(what, "x", slowdown, 1.3)


def _at_least(what: str, unit: str, measured: float, target: float) -> Check:
    return Check(what, f"≥ {target:g} {unit}", f"{measured:.2f}", measured >= target)


def _at_most(what: str, unit: str, measured: float, target: float) -> Check:
    return Check(what, f"≤ {target:g} {unit}", f"{measured:.2f}", measured <= target)


def _gigabytes(transfer: Transfer) -> str:
    return f"{transfer.num_bytes / 1e9:.1f} GB"
