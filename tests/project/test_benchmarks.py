"""The benchmark of a GPU, with main memory as the GPU's: what it needs, and what it leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from dbuffer.testing.waiting import until

CODE = """
import sys
class Hidden:
    def find_spec(self, name, *_):
        if name in ("obstore", "matplotlib", "torchrl", "vllm", "typer", "rich"):
            raise ModuleNotFoundError(f"There is no {name}", name=name)
sys.meta_path.insert(0, Hidden())
from benchmarks.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_gpu_is_measured_with_few_packages_and_a_kill_leaves_the_figures(
    shm_path: Path, tmp_path: Path
) -> None:
    """A machine that has a GPU may have no network, and may be taken away at any time."""
    found, errors = tmp_path / "gpu.json", tmp_path / "errors"
    arguments = ("gpu", "--cpu", "--dir", str(shm_path), "--json", str(found))

    def figures() -> dict[str, Any]:
        return json.loads(found.read_text()) if found.exists() else {"seconds": {}}

    with errors.open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", CODE, *arguments], stdout=subprocess.PIPE, stderr=log
        )
        until(
            "the second size is measured",
            lambda: program.poll() is not None or "publish" in figures()["seconds"].get("0.01", {}),
            timeout_s=300,
            every_s=0.2,
        )
        program.kill()
        printed = program.communicate()[0].decode()
    assert (program.returncode, errors.read_text()) == (-signal.SIGKILL, "")
    kept = figures()
    kinds = ("copies", "staged in page-locked memory", "staged on the GPU", "1 % changed")
    assert [f"0.00544 GB, {kind}" for kind in kinds] == list(kept["parts"])[:4]
    assert all(outcome.startswith("took") for outcome in kept["parts"].values())
    for way, time_s in kept["seconds"]["0.005"].items():
        assert f"| {way} " in printed
        assert 0 < time_s < 60
