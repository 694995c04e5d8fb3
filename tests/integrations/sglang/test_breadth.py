"""Families and features in real SGLang engines: each token as a fresh one answers.

Each case is a program of its own. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py sglang tests/integrations/sglang/test_breadth.py -k gemma`.
"""

from __future__ import annotations

import pytest

from tests.programs import sglang_families
from tests.programs.sglang_families import CASES
from tests.support.engines.sglang_engines import NEEDS_SGLANG, WAIT_S, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_SGLANG, pytest.mark.timeout(3 * WAIT_S)]


@IN_SOAKS_ALONE
@pytest.mark.parametrize("name", CASES)
def test_switched_engine_answers_as_a_fresh_one(tmp_path, name):
    case = CASES[name]
    observe(sglang_families.__file__, tmp_path, name, models=case.models or (case.family,))
