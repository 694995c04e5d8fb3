"""A store's weights in a real SGLang engine of two ranks, offline, with tied embeddings.

Tokens are compared with those of transformers.
"""

from __future__ import annotations

import pytest

from tests.programs import sglang_engine
from tests.support.engines.sglang_engines import NEEDS_SGLANG, WAIT_S, observe

pytestmark = [*NEEDS_SGLANG, pytest.mark.timeout(3 * WAIT_S)]


def test_engine_serves_the_versions_that_it_can_load(tmp_path):
    assert observe(sglang_engine.__file__, tmp_path) == "nothing came"
