"""Measurements as tables and as JSON, with the machine and the versions of packages."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import median
from benchmarks.steps import REPACKING, STEPS
from benchmarks.switches import Pauses
from benchmarks.targets import Check, Results
from benchmarks.transfers import Times, Transfer
from benchmarks.ways import Dbuffer, Floor

_IMPORTED_S = time.monotonic()
_PACKAGES = ("dbuffer", "torch", "tensordict", "torchrl", "safetensors", "xxhash", "watchdog")


def environment(directories: Iterable[Path]) -> dict[str, str]:
    """Return hardware, kernel, filesystems and versions of packages."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystems": ", ".join(f"{path} {filesystem(path)}" for path in directories),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # dbuffer from its source, or a peer that is not measured
        return "not installed"


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that ``path`` is on."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, rest = Path(line.split()[4]), line.partition(" - ")[2]
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, rest.split()[0]
    return kind


def elapsed_s() -> float:
    """Return the seconds since the benchmarks were imported."""
    return time.monotonic() - _IMPORTED_S


def begin(directories: Iterable[Path], more: dict[str, str] | None = None) -> dict[str, str]:
    """Print and return the environment, with a benchmark's additional entries ``more``."""
    found = environment(directories) | (more or {})
    print(table(("machine", ""), list(found.items())), flush=True)
    return found


def transfer_table(transfer: Transfer) -> str:
    """Return a table of one case. The fastest variant of memcpy is the limit in both directions."""
    case = transfer.case
    title = (
        f"{case.model}: {transfer.num_bytes / 1e9:.2f} GB in {len(case.shapes):,} tensors, "
        f"{case.directory} ({filesystem(case.directory)})"
    )
    header = ("", "publish ms", "GB/s", "of memcpy", "receive ms", "GB/s", "of memcpy", "samples")
    copied = _speed(transfer, transfer.memcpy[transfer.limit])
    samples = str(len(transfer.memcpy[transfer.limit]))
    rows = [(f"memcpy ({transfer.limit})", *copied, *copied, samples)]
    for name, taken in transfer.hashing.items():
        hashed = _speed(transfer, taken)
        rows.append((name, *hashed, *hashed, str(len(taken))))
    for peer, published in transfer.publish.items():
        received = transfer.receive[peer]
        speeds = (*_speed(transfer, published), *_speed(transfer, received))
        rows.append((peer, *speeds, str(len(published))))
    return f"{title}\n\n{table(header, rows)}"


def _speed(transfer: Transfer, times_s: Sequence[float]) -> tuple[str, str, str]:
    time_s = median(times_s)
    return (
        f"{1e3 * time_s:.1f}",
        f"{transfer.num_bytes / time_s / 1e9:.2f}",
        f"{transfer.limit_s / time_s:.2f}",
    )


MEMCPY = "memcpy itself"
"""Header of the column with memcpy's results, for targets that are multiples of memcpy."""

LIMIT = "limit here"
"""Header of the column with the limit: memcpy or other necessary steps alone, in the same run."""

_TOKENS = {True: "right", False: "WRONG", None: "-"}
"""Label for whether the tokens after a switch were right, or None if the way is no switch."""


def pauses_tables(pauses: Pauses) -> str:
    """Return tables of the ways' times, of the steps of their pauses, and of memory."""
    tables = (_ways_table(pauses), _steps_table(pauses), _memory_table(pauses))
    return f"{pauses.title}\n\n" + "\n\n".join(tables)


def _ways_table(pauses: Pauses) -> str:
    header = ("", "publish ms", "stage ms", "pause ms", "of floor", "total ms", "tokens", "samples")
    floor_s = pauses.pause_s(Floor.name)
    rows = []
    for way, samples in pauses.samples.items():
        published, staged, total = (
            _milliseconds([getattr(sample, field) for sample in samples])
            for field in ("publish_s", "stage_s", "total_s")
        )
        pause_s, tokens = pauses.pause_s(way), _TOKENS[pauses.is_right.get(way)]
        paused = (f"{1e3 * pause_s:.1f}", f"{pause_s / floor_s:.2f}")
        rows.append((way, published, staged, *paused, total, tokens, str(len(samples))))
    less_s = pauses.pause_s(Dbuffer.name, without=REPACKING)
    paused = (f"{1e3 * less_s:.1f}", f"{less_s / floor_s:.2f}")
    rows.append((f"{Dbuffer.name}, without its {REPACKING!r}", "", "", *paused, "", "", ""))
    return table(header, sorted(rows))


def _steps_table(pauses: Pauses) -> str:
    ways = sorted(pauses.samples)
    rows = [
        (step, *(f"{1e3 * pauses.step_s(way, step):.2f}" for way in ways))
        for step in STEPS
        if any(pauses.step_s(way, step) for way in ways)
    ]
    return table(("median ms of the pause", *ways), rows)


def _memory_table(pauses: Pauses) -> str:
    rows = [
        (moment, *(f"{num_bytes / 1e6:.0f}" for num_bytes in measured))
        for moment, *measured in pauses.memory
    ]
    return table(("memory of engine and trainer", "Pss MB", "anonymous MB", "GPU MB"), rows)


def _milliseconds(times_s: Sequence[float]) -> str:
    return f"{1e3 * median(times_s):.1f}" if any(times_s) else "-"


def targets_table(checks: Sequence[Check], *, reference: str | None = MEMCPY) -> str:
    """Return a table of targets, measurements, limits and verdicts.

    ``reference`` is the header of the column with the limits, or None for no such column.
    """
    header = ["", "target", "measured", *([reference] if reference else []), ""]
    rows = []
    for check in checks:
        referred = [check.limit] if reference else []
        verdict = "pass" if check.met else "FAIL"
        rows.append((check.what, check.target, check.measured, *referred, verdict))
    return table(header, rows)


def conclude(
    environment: dict[str, str],
    checks: Sequence[Check],
    found: dict[str, Any],
    path: Path | None,
    *,
    title: str = "Targets",
    reference: str | None = None,
) -> int:
    """Print the targets, and write ``found`` into ``path``. Return 1 if a target was missed."""
    print(f"\n{title}\n\n{targets_table(checks, reference=reference)}")
    environment["load after"] = f"{os.getloadavg()[0]:.1f}"
    if path:
        targets = [asdict(check) for check in checks]
        path.write_text(
            json.dumps({"environment": environment, "targets": targets} | found, indent=1)
        )
    print(f"\n{elapsed_s():.0f} s in all, load average {environment['load after']} at the end")
    return 0 if all(check.met for check in checks) else 1


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that is also readable as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index == 0 or len(header) <= 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width for width in widths]
    return "\n".join(line(row) for row in (header, rule, *rows))


def as_json(environment: dict[str, str], results: Results, checks: Sequence[Check]) -> Any:
    """Return all results, with the time of each sample in seconds."""
    return {
        "environment": environment,
        "targets": [asdict(check) for check in checks],
        "transfers": [_transfer_as_json(transfer) for transfer in results.transfers.values()],
        "flip_latencies_s": results.flips_s,
        "sends_s": results.sends_s,
        "returns_s": results.returns_s,
        "extra_memory_bytes": results.extra_memory_bytes,
        "fan_out_publish_s": results.fan_out_s,
    }


def _transfer_as_json(transfer: Transfer) -> Any:
    case = transfer.case
    return {
        "model": case.model,
        "tensors": len(case.shapes),
        "bytes": transfer.num_bytes,
        "directory": str(case.directory),
        "filesystem": filesystem(case.directory),
        "limit": transfer.limit,
        "memcpy_s": transfer.memcpy,
        "publish_s": transfer.publish,
        "receive_s": transfer.receive,
        "hashing_s": transfer.hashing,
        "publish_of_memcpy": _ratios(transfer, transfer.publish),
        "receive_of_memcpy": _ratios(transfer, transfer.receive),
    }


def _ratios(transfer: Transfer, times: Times) -> dict[str, float]:
    return {peer: transfer.limit_s / median(times_s) for peer, times_s in times.items()}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
