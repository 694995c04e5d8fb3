"""Every scenario of the lab: in one file, so that one pair of guests runs them all."""

import pytest

pytest.register_assert_rewrite(
    "scenarios_deltas",
    "scenarios_doctor",
    "scenarios_lab",
    "scenarios_mirror",
    "scenarios_sharded",
    "scenarios_store",
)

from scenarios_deltas import *  # noqa: E402, F403
from scenarios_doctor import *  # noqa: E402, F403
from scenarios_lab import *  # noqa: E402, F403
from scenarios_mirror import *  # noqa: E402, F403
from scenarios_sharded import *  # noqa: E402, F403
from scenarios_store import *  # noqa: E402, F403
