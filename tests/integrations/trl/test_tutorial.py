"""The tutorial from top to bottom: real servers, TRL's trainer, a mirror, and a plain loop.

Its commands are run as a reader runs them, and what they print is what the page shows, but for
figures that differ from run to run.
"""

from __future__ import annotations

import importlib.util
import runpy

import pytest

from tests.support.documents import DOCS, TUTORIAL
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S
from tests.support.ports import free_port
from tests.support.soak import IN_SOAKS_ALONE

MADE = runpy.run_path(str(DOCS / "make_tutorial.py"))


@IN_SOAKS_ALONE
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
@pytest.mark.timeout(TIMEOUT_S + 60)
class TestTutorial:
    pytestmark = NEEDS_VLLM

    def test_its_commands_print_what_it_shows(self, shm_path):
        page = TUTORIAL.read_text(encoding="utf-8")
        directory = shm_path / "tutorial"
        replaced = {"/dev/shm/tutorial": str(directory)}
        replaced |= {str(port): str(free_port()) for port in (8000, 8001, 9100, 9101)}
        followed = MADE["follow"](page, replaced, print)
        assert MADE["steady"](followed) == MADE["steady"](page)
        assert not directory.exists()


def test_only_figures_that_differ_from_run_to_run_are_left_out():
    steady = MADE["steady"]
    assert steady("step  3: version 3, reward 0.268") == steady("step  3: version 3, reward 0.301")
    assert steady("step  3: version 3, reward 0.268") != steady("step  3: version 2, reward 0.268")
    assert steady("server-1  4711  12  0 (0 steps)") == steady("server-1  812  12  0 (0 steps)")
    assert steady("server-1  4711  12  0 (0 steps)") != steady("server-1  4711  11  1 (1 steps)")
