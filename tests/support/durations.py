"""Seconds that each test file takes: `durations.json`, by which `conftest.py` orders a run.

As a program (`python3 dev.py measure [FILES]`), this file measures test files anew, all if none is
named. Each runs alone in a pytest of its own, as many side by side as the tests run. Wall time
depends on what else the machine does; processor time hardly. That is counted for all processes of
a file, however they end and whoever started them, as long as they end: each pytest runs below a
process that inherits all orphans. A pytest's own start, which a run of all files has but three
times, is measured first and left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

from tests.support import ROOT

TABLE = ROOT / "tests" / "durations.json"
SIDE_BY_SIDE = 3
NOTHING_SELECTED = 5
"""Exit status of a pytest that has run no test."""
ORPHANS_END_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


class Duration(NamedTuple):
    """Seconds of one file, less those of a pytest's start."""

    wall_s: float
    processor_s: float


def durations() -> dict[str, Duration]:
    """Read the table: by path below the repository's root."""
    if not TABLE.is_file():
        return {}
    return {name: Duration(**row) for name, row in json.loads(TABLE.read_text()).items()}


def write(table: dict[str, Duration]) -> None:
    """Write the table, longest first."""
    rows = sorted(table.items(), key=lambda row: -row[1].wall_s)
    lines = [f"  {json.dumps(name)}: {json.dumps(one._asdict())}" for name, one in rows]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def measure(*arguments: str) -> tuple[int, Duration]:
    """Run a pytest until it and all that it started have ended: its exit status and seconds."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started_s, processor_s = time.monotonic(), _processor_s()
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NOTHING_SELECTED):
        print(done.stdout[-4000:] + done.stderr[-4000:], flush=True)
    wall_s = time.monotonic() - started_s
    _wait_for_orphans()
    return done.returncode, Duration(wall_s, _processor_s() - processor_s)


def _processor_s() -> float:
    """Return the processor time of all descendants that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _wait_for_orphans() -> None:
    """Reap what the pytest has left behind; what goes on for long is not counted."""
    deadline = time.monotonic() + ORPHANS_END_S
    with contextlib.suppress(ChildProcessError):  # there is none left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)


def main(names: Sequence[str]) -> int:
    """Measure these files, or all, and put them into the table; 1: some fail, and are not in it."""
    files = names or [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]
    _, start = measure("--collect-only", "tests/core/runtime/test_errors.py")
    start_s = f"{start.wall_s:.1f} s, {start.processor_s:.1f} s of processor time"
    print(f"a pytest's start: {start_s}", flush=True)
    table = durations() if names else {}
    failed = []
    with ProcessPoolExecutor(SIDE_BY_SIDE) as pool:
        running = {pool.submit(measure, name): name for name in files}
        for done in as_completed(running):
            name, (status, whole) = running[done], done.result()
            pairs = zip(whole, start, strict=True)
            row = Duration(*(round(max(0.0, one - other), 1) for one, other in pairs))
            print(f"{name}: {row.wall_s} s, {row.processor_s} s of processor time", flush=True)
            if status in (0, NOTHING_SELECTED):
                table[name] = row
            else:
                failed.append(name)
    write(table)
    if failed:
        print(f"failed, and left out: {', '.join(sorted(failed))}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
