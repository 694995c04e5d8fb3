"""Schedule of a run: the process that takes each test file, and the order.

Scopes of a run: test files that go to one process together.

Programs with vLLM are forks of a process that has imported it, for 9 s of processor time. Each
process that runs such files has one; so two processes run all of them, side by side. Files whose
tests need four ranks of a trainer share these (`tests/core/publish/conftest.py`). An import of peft
takes 2 s.

Long files begin first: `durations.json` has the wall time of each in seconds. Any run with
`--measure` writes it (`python3 dev.py measure`).
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support import ROOT

TABLE = ROOT / "tests" / "durations.json"


SCOPES = {
    "vLLM": ("tests/integrations/vllm/",),
    "frameworks with vLLM": (
        "tests/core/test_examples.py",
        "tests/core/test_demo.py",
        "tests/integrations/atropos/test_atropos.py",
        "tests/integrations/lightrft/",
        "tests/integrations/torchrl/",
        "tests/integrations/trl/",
        "tests/integrations/verl/",
    ),
    "peft": ("tests/integrations/peft/",),
    "ranks": (
        "tests/core/publish/test_sharded.py",
        "tests/core/publish/test_stages.py",
        "tests/core/publish/test_zero3.py",
    ),
}
"""Beginnings of the paths of a scope's files."""


def scope_of(path: str) -> str:
    """Return the name of a file's scope: its path, unless it goes with others."""
    for name, beginnings in SCOPES.items():
        if path.startswith(beginnings):
            return name
    return path


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
