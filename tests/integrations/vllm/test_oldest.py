"""The oldest vLLM that dbuffer's extra allows, in an environment of its own."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
[OLDEST] = re.findall(r"^vllm>=([\d.]+)$", "\n".join(EXTRAS["vllm"]), re.MULTILINE)
FILES = ["tests/integrations/vllm/test_vllm.py"]
TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_oldest_vllm_switches_and_answers_as_fresh_engines() -> None:
    if not runpy.run_path(str(ROOT / "dev.py"))["takes_cpu_pins"]():
        pytest.skip("vLLM's CPU builds are for Linux on x86-64 without a GPU")
    command = [sys.executable, "dev.py", "vllm", f"{OLDEST}.0", *FILES]
    options = ["--numprocesses=0", "--quiet", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env={name: told for name, told in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d\d? passed", done.stdout), done.stdout[-2000:]
