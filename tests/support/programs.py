"""`run_program`: a program of Python that runs to its very end, in an interpreter of its own."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.waiting import TIMEOUT_S


def run_program(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its exit status and its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    done.stderr = without_leaks_of_triton(done.stderr)
    return done


def without_leaks_of_triton(errors: str) -> str:
    """Remove the report that Triton 3.9 (torch 2.15) makes of its own objects as Python ends."""
    return re.sub(r"nanobind: leaked .*?refleaks\.html\n?", "", errors, flags=re.DOTALL)
