"""Options of the benchmarks, and what they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import __main__ as benchmarks


@pytest.mark.parametrize(
    "given",
    [["--dir", "/one", "/two"], ["--dir", "/one", "--dir", "/two"]],
    ids=["at once", "each"],
)
def test_directories_are_in_the_order_given(given: list[str]) -> None:
    assert [str(each) for each in benchmarks._parse(["objects", *given]).dir] == ["/one", "/two"]


def test_without_directories_stores_are_in_memory() -> None:
    assert str(benchmarks._parse(["objects"]).dir[0]) == "/dev/shm"


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
