"""Programs that need no more than a directory; each says what it shows."""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("program", ["layers", "quantized", "stages", "plan"])
def test_program(tmp_path, program):
    observe(f"vllm_{program}.py", tmp_path, env=environment(processes=False))
