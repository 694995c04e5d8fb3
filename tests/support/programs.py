"""`run_program`: a program of Python that runs to its very end, but for the imports of torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.engines import preforked
from tests.support.waiting import TIMEOUT_S


def run_program(directory: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program; its exit status, and what it wrote.

    In the processes of pytest-xdist it is a fork, which ends as an interpreter does.
    """
    script, output, errors = (directory / f"program.{end}" for end in ("py", "out", "err"))
    script.write_text(code)
    words = [str(script), *map(str, arguments)]
    with output.open("wb") as out, errors.open("wb") as err:
        process = preforked.start(
            words, env=dict(os.environ), output=out, errors=err, needs_vllm=False
        )
        status = process.wait(TIMEOUT_S)
    return subprocess.CompletedProcess(words, status, output.read_text(), errors.read_text())
