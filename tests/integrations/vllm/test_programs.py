"""Programs that need no more than a directory; each says what it shows."""

from __future__ import annotations

import pytest

from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    environment,
    observe,
)

pytestmark = NEEDS_VLLM
SENDS_FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@pytest.mark.parametrize(
    ("program", "more"),
    [
        *(pytest.param(name, {}, id=name) for name in ("layers", "stages", "partial", "plan")),
        pytest.param("pooling", SENDS_FUNCTIONS, marks=ANSWERS_TELL_VERSIONS, id="pooling"),
    ],
)
def test_program(tmp_path, program, more):
    observe(f"vllm_{program}.py", tmp_path, env=environment(processes=False, **more))
