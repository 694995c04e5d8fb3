"""A vLLM server that follows a store: by itself, by `follow` with its URL, by vLLM's own trainer.

`vllm_server.py` starts a server, kills it and starts it again, in each of two roles; in a third
role, a server that must not come up. The server that is driven from outside is a canary, too. The
model reveals its version: an answer's tokens say from which weights each of them came, and an
answer with weights of two versions is token 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
from tests.support.soak import IN_SOAKS_ALONE, is_soak

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(2 * TIMEOUT_S + 60)]


@pytest.fixture(scope="module")
def programs(directory: Path) -> Iterator[dict[str, Future[Any]]]:
    """Programs by their role, two of them side by side; the last one in soaks alone.

    In memory: what is written at full speed to a disk holds up all who write there, logs too.
    """

    def run(role: str) -> Any:
        place = directory / role
        place.mkdir()
        return observe("vllm_server.py", place, role, env=environment(processes=True))

    with ThreadPoolExecutor(2) as pool:
        roles = ("inside", "outside", "refused")[: None if is_soak() else 2]
        yield {role: pool.submit(run, role) for role in roles}


@ANSWERS_TELL_VERSIONS
def test_server_follows_by_itself(programs):
    programs["inside"].result()


@COMPUTES_CHECKSUMS
def test_server_is_driven_from_outside(programs):
    programs["outside"].result()


@IN_SOAKS_ALONE
def test_server_that_cannot_follow_does_not_start_and_says_why(programs):
    programs["refused"].result()
