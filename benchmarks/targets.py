"""Targets of dbuffer, and checks of results against the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.copying import FROM_CACHE, FROM_MEMORY
from benchmarks.measure import median, percentile
from benchmarks.peers import Dbuffer, DbufferChecksums, Safetensors, TorchRL
from benchmarks.switches import EXPERTS, GPU, LIVE, PACKED, Pauses
from benchmarks.transfers import Times, Transfer
from benchmarks.ways import Floor, Memcpy, Reload

_PAUSES = {LIVE: (0.25, 1.4), GPU: (0.25, 1.4), PACKED: (0.30, 1.4), EXPERTS: (0.30, 2)}
"""Targets of a pause by engine: as a multiple of the floor, and as a multiple of a memcpy."""


@dataclass(slots=True)
class Results:
    """All measurements of a run."""

    transfers: dict[str, Transfer] = field(default_factory=dict)
    flips_s: list[float] = field(default_factory=list)
    extra_memory_bytes: int = 0
    """Extra memory in the sender."""
    fan_out_s: dict[int, list[float]] = field(default_factory=dict)
    """Publish times by the number of receivers."""
    sends_s: list[float] = field(default_factory=list)
    returns_s: list[float] = field(default_factory=list)
    """Times until `send(wait=False)` returned, for the same weights as `sends_s`."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table of targets."""

    what: str
    target: str
    measured: str
    met: bool
    limit: str = ""
    """Result of memcpy alone (if it is not 1 by definition), or of other necessary steps alone."""


def check(results: Results) -> list[Check]:
    """Compare a run with the targets."""
    dense, experts = results.transfers["dense"], results.transfers["experts"]
    size = f"{_gigabytes(dense)} in {len(dense.case.shapes)} tensors"
    many = f"{_gigabytes(experts)} in {len(experts.case.shapes):,} tensors"
    return [
        at_least(f"publish, {size}", "of memcpy", _ratio(dense, dense.publish), 0.95),
        _against(TorchRL.name, dense, dense.publish, 15),
        _against(Safetensors.name, dense, dense.publish, 5),
        _checksums(dense, dense.publish, "the same with checksums", FROM_CACHE),
        at_least(f"receive, {size}", "of memcpy", _ratio(dense, dense.receive), 0.95),
        _against(TorchRL.name, dense, dense.receive, 1.5),
        _against(Safetensors.name, dense, dense.receive, 1.3),
        # A receiver hashes the whole version before it writes the target, because the version may
        # be damaged.
        _checksums(dense, dense.receive, "the same, verified", FROM_MEMORY, FROM_CACHE),
        at_least(f"publish, {many}", "of memcpy", _ratio(experts, experts.publish), 0.80),
        at_least(f"receive, {many}", "of memcpy", _ratio(experts, experts.receive), 0.80),
        *_flips(results.flips_s),
        at_most("extra memory in the sender", "MB", results.extra_memory_bytes / 1e6, 64),
        _fan_out(results.fan_out_s),
        at_most(
            "send(wait=False) until it returns",
            "of a send",
            median(results.returns_s) / median(results.sends_s),
            0.1,
        ),
    ]


def check_pauses(results: Sequence[Pauses]) -> list[Check]:
    """Compare engines' pauses with the targets. All steps of dbuffer's pause count."""
    checks = []
    for pauses in results:
        ours_s = pauses.pause_s(Dbuffer.name)
        # On a GPU, a version is staged in page-locked memory. On a CPU, live layers are staged in
        # the store's buffer, and packed layers in images.
        staged_bytes = 0 if pauses.engine == LIVE else pauses.num_bytes
        target, of_memcpy = _PAUSES[pauses.engine]
        memcpy_s, floor_s = pauses.pause_s(Memcpy.name), pauses.pause_s(Floor.name)
        of_floor = at_most(f"pause, {pauses.engine}", "x floor", ours_s / floor_s, target)
        checks += [
            replace(of_floor, limit=f"{memcpy_s / floor_s:.2f}"),
            at_most("", f"x {Memcpy.name}", ours_s / memcpy_s, of_memcpy),
            at_most("", f"x {Reload.name}", ours_s / pauses.pause_s(Reload.name), 1),
            at_most(
                "memory to stage a version",
                "MB",
                pauses.staging_bytes / 1e6,
                64 + staged_bytes // 10**6,
            ),
        ]
    return checks


def _ratio(transfer: Transfer, times: Times, peer: str = Dbuffer.name) -> float:
    return transfer.limit_s / median(times[peer])


def _against(peer: str, transfer: Transfer, times: Times, target: float) -> Check:
    """Compare dbuffer's speed with a peer's. The limit is memcpy's speed over the peer's."""
    peer_s = median(times[peer])
    row = at_least("", f"x {peer}", peer_s / median(times[Dbuffer.name]), target)
    return replace(row, limit=f"{peer_s / transfer.limit_s:.2f}")


def _checksums(transfer: Transfer, times: Times, what: str, *hashing: str) -> Check:
    """Check the speed with checksums. The limit is a memcpy and hashing in the given ways."""
    row = at_least(what, "of memcpy", _ratio(transfer, times, DbufferChecksums.name), 0.85)
    hashed_s = sum(median(transfer.hashing[name]) for name in hashing)
    return replace(row, limit=f"{transfer.limit_s / (transfer.limit_s + hashed_s):.2f}")


def _flips(latencies_s: list[float]) -> list[Check]:
    what = f"flip seen by a receiver in another process, {len(latencies_s)} flips"
    return [
        at_most(what, "ms, median", 1e3 * median(latencies_s), 2),
        at_most("", "ms, p99", 1e3 * percentile(latencies_s, 0.99), 20),
    ]


def _fan_out(times_s: dict[int, list[float]]) -> Check:
    few, many = min(times_s), max(times_s)
    slowdown = median(times_s[many]) / median(times_s[few])
    what = f"publish time, {many} receivers against {few}"
    return at_most(what, "x", slowdown, 1.3)


def at_least(what: str, unit: str, measured: float, target: float) -> Check:
    """Return a check with a minimum."""
    return Check(what, f"≥ {target:g} {unit}", f"{measured:.2f}", measured >= target)


def at_most(what: str, unit: str, measured: float, target: float) -> Check:
    """Return a check with a maximum."""
    return Check(what, f"≤ {target:g} {unit}", f"{measured:.2f}", measured <= target)


def _gigabytes(transfer: Transfer) -> str:
    return f"{transfer.num_bytes / 1e9:.1f} GB"
