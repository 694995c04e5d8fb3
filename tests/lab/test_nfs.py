"""Every scenario of the lab: in one file, so that one pair of guests runs them all."""

import pytest

pytest.register_assert_rewrite(
    "tests.lab.scenarios_deltas",
    "tests.lab.scenarios_doctor",
    "tests.lab.scenarios_lab",
    "tests.lab.scenarios_mirror",
    "tests.lab.scenarios_sharded",
    "tests.lab.scenarios_store",
)

from tests.lab.scenarios_deltas import *  # noqa: E402, F403
from tests.lab.scenarios_doctor import *  # noqa: E402, F403
from tests.lab.scenarios_lab import *  # noqa: E402, F403
from tests.lab.scenarios_mirror import *  # noqa: E402, F403
from tests.lab.scenarios_sharded import *  # noqa: E402, F403
from tests.lab.scenarios_store import *  # noqa: E402, F403
