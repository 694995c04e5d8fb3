"""Every scenario of the lab: in one file, so that one guest runs them all."""

from tests.lab.scenarios_deltas import *  # noqa: F403
from tests.lab.scenarios_kept import *  # noqa: F403
from tests.lab.scenarios_lab import *  # noqa: F403
from tests.lab.scenarios_mirror import *  # noqa: F403
from tests.lab.scenarios_sharded import *  # noqa: F403
from tests.lab.scenarios_store import *  # noqa: F403
