"""Wall time of each test file in seconds: `durations.json`. `conftest.py` orders a run by it.

Any run with `--measure` writes the table (`python3 dev.py measure`).
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support import ROOT

TABLE = ROOT / "tests" / "durations.json"


def durations() -> dict[str, float]:
    """Read the table: by path below the repository's root."""
    return json.loads(TABLE.read_text()) if TABLE.is_file() else {}


class Measurement:
    """Adds up the seconds of each file's tests, and puts them into the table at the end."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        table = {name: wall_s for name, wall_s in durations().items() if (ROOT / name).is_file()}
        table |= {name: round(wall_s, 1) for name, wall_s in self._seconds.items()}
        rows = dict(sorted(table.items(), key=lambda row: -row[1]))
        TABLE.write_text(json.dumps(rows, indent=2) + "\n")
