"""The oldest vLLM that dbuffer's extra allows, in an environment of its own."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support import ROOT
from tests.support.engines.vllm_engines import run_tests_with
from tests.support.soak import IN_SOAKS_ALONE

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
[OLDEST] = re.findall(r"^vllm>=([\d.]+)$", "\n".join(EXTRAS["vllm"]), re.MULTILINE)
TIMEOUT_S = 900


@IN_SOAKS_ALONE
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_oldest_vllm_switches_and_answers_as_fresh_engines():
    programs = "tests/integrations/vllm/test_programs.py"
    run_tests_with(f"{OLDEST}.0", f"{programs}::test_program[offline]", TIMEOUT_S)
