"""The demo as users run it, with a real vLLM engine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support import ROOT
from tests.support.engines import preforked
from tests.support.engines.vllm_engines import (
    IS_BEFORE_0_32,
    NEEDS_VLLM,
    TIMEOUT_S,
    kill_group,
)
from tests.support.soak import is_soak

pytestmark = NEEDS_VLLM


STEPS = 40 if is_soak() else 20
"""Of 40 that users see; half of them climb enough."""

PROGRAM = """
import sys
sys.path.insert(0, {examples!r})
import demo
demo.MEMORY = {memory!r}
demo.NUM_STEPS = {steps}
demo.main()
"""


def run(directory: Path) -> tuple[int, str]:
    """Run the demo with its store in a directory, where it must leave nothing."""
    output, scratch = directory / "output.txt", directory / "memory"
    scratch.mkdir()
    program = PROGRAM.format(examples=str(ROOT / "examples"), memory=str(scratch), steps=STEPS)
    process = preforked.start(
        ["-c", program],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        output=output,
        new_session=True,
    )
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        kill_group(process)
    text = output.read_text()
    print(text)
    assert list(scratch.iterdir()) == []
    return code, text


def test_engine_follows_the_trainer(tmp_path):
    code, text = run(tmp_path)
    assert code == 0, text
    rows = re.findall(r"^ *(\d+) +(\d+) +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)$", text, re.M)
    assert [(int(step), int(version)) for step, version, *_ in rows] == [
        (step, step) for step in range(1, STEPS + 1)
    ]
    assert float(rows[-1][2]) > float(rows[0][2]) + 0.2
    assert all(float(pause_ms) > 0 for *_, pause_ms in rows)
    assert IS_BEFORE_0_32 or "WARNING" not in text
    assert text.endswith("success: the engine followed its trainer\n")
