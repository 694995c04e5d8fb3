"""Seconds that each test file takes: `durations.json`, by which `conftest.py` orders a run.

Any run with `--measure` writes the table (`python3 dev.py measure`). Wall time depends on what
else the machine does; processor time hardly. That is counted for all processes below the one that
runs the file, whoever started them; not for those that outlive their parents, as daemons do.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

TABLE = ROOT / "tests" / "durations.json"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Duration(NamedTuple):
    """Seconds of one file."""

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


def processor_s(pid: int) -> float:
    """Return the processor time of a process, of its descendants, and of those that have ended."""
    total_s = 0.0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        place = Path(f"/proc/{pid}")
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        total_s = sum(map(int, fields[11:15])) / TICKS_PER_S
        for thread in (place / "task").iterdir():
            total_s += sum(map(processor_s, map(int, (thread / "children").read_text().split())))
    return total_s


class Measurement:
    """Adds up the seconds of each file's tests, and puts them into the table at the end."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_collection_finish(self) -> None:
        self._counted_s = processor_s(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before_s, self._counted_s = self._counted_s, processor_s(os.getpid())
        report.processor_s = self._counted_s - before_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._seconds[report.nodeid.partition("::")[0]]
        seconds[0] += report.duration
        seconds[1] += report.processor_s

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        table = {name: row for name, row in durations().items() if (ROOT / name).is_file()}
        for name, seconds in self._seconds.items():
            table[name] = Duration(*(round(max(0.0, value), 1) for value in seconds))
        write(table)
