"""Programs with real engines; each says what it shows.

By hand: `DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_programs.py -k hybrid`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    COMPUTES_CHECKSUMS,
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)
from tests.support.peft_parts import NEEDS_PEFT
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(2 * TIMEOUT_S)]


def program(name: str, role: str = "", *marks: Any, processes: bool = False) -> Any:
    """Parameters of the test. With ``processes``, engines are in processes of their own."""
    return pytest.param(name, role, processes, marks=marks, id=f"{name} {role}".strip())


PROGRAMS = [
    program("adapters", "follow", *NEEDS_PEFT, ANSWERS_TELL_VERSIONS, processes=True),
    program("adapters", "refused", *NEEDS_PEFT, IN_SOAKS_ALONE, processes=True),
    program("async", "one-rank", ANSWERS_TELL_VERSIONS),
    program("async", "drafted", ANSWERS_TELL_VERSIONS, IN_SOAKS_ALONE, processes=True),
    program("async", "short-of-cache", ANSWERS_TELL_VERSIONS, IN_SOAKS_ALONE),
    program("caches"),
    program("canary", processes=True),
    program("contract"),
    program("dead_core", processes=True),
    program("layers"),
    program("lora", "", *NEEDS_PEFT),
    program("offline"),
    program("plan", "", COMPUTES_CHECKSUMS),
    program("ranks", processes=True),
    *(
        program("replicas", role, ANSWERS_TELL_VERSIONS, IN_SOAKS_ALONE)
        for role in ("dense", "lockstep", "hybrid")
    ),
    program("stages"),
    program("versions", "1", ANSWERS_TELL_VERSIONS, processes=True),
    program("versions", "2", ANSWERS_TELL_VERSIONS, IN_SOAKS_ALONE, processes=True),
]


@pytest.mark.parametrize(("name", "role", "processes"), PROGRAMS)
def test_program(shm_path, name, role, processes, record_property):
    # Some send functions to workers, to make them fail.
    env = environment(processes=processes, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    roles = [role] if role else []
    for figure in (observe(f"vllm_{name}.py", shm_path, *roles, env=env) or {}).items():
        record_property(*figure)
