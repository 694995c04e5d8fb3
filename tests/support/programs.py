"""`run_program`: a program of Python that runs to its very end, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.support.waiting import TIMEOUT_S


def run_program(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program; its exit status, and what it wrote."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
