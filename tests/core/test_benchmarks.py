"""Packages that the benchmark of a GPU needs."""

from __future__ import annotations

import subprocess
import sys


def test_a_gpu_is_measured_with_the_packages_that_its_page_names() -> None:
    """A machine that has one may have no network: each package more has to be carried there."""
    code = """
import sys
class Hidden:
    def find_spec(self, name, *_):
        if name in ("obstore", "matplotlib", "torchrl", "vllm", "typer", "rich"):
            raise ModuleNotFoundError(f"There is no {name}", name=name)
sys.meta_path.insert(0, Hidden())
from benchmarks.__main__ import main
sys.exit(main(["gpu", "--quick"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
