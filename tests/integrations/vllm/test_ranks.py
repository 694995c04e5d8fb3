"""An engine of two ranks, of which one fails: both switch, or none does, and replies stay in order.

One program does everything, with two engines. After each failure the engine answers as a fresh one
on the weights that it had, acknowledges nothing, and takes the next update.
"""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_ranks_switch_together_or_not_at_all(directory):
    observe("vllm_ranks.py", directory, env=environment(processes=True))
