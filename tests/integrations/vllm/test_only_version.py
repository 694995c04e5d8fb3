"""A real vLLM engine that stays on one version, beside one that follows a trainer's newest.

Its tokens are those of a fresh engine while the trainer publishes on; it has the version from its
start when it is restarted; an engine goes back to it and on to the newest; and what cannot be is
refused at once.
"""

from __future__ import annotations

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


def test_engine_stays_on_a_version_while_the_trainer_publishes_on(tmp_path):
    observe("vllm_only_version.py", tmp_path)
