"""LightRFT's BroadcastManager with a server, and with an engine of one rank of the trainer only.

One program, started by torchrun, does everything: two ranks, of which the first has an engine in a
process of its own, and knows a server by its URL. The tests judge what it saw.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import lightrft_engines
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, *IN_SOAKS_ALONE, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = environment(processes=True)
    return observe(lightrft_engines.__file__, tmp_path_factory.mktemp("engines"), env=env)


@pytest.mark.parametrize("version", ["1", "2"])
def test_all_engines_answer_from_the_version_when_the_call_returns(observed, version):
    from tests.support.engines.tiny_models import token_of

    first, second = observed[version]
    assert first["error"] is second["error"] is None
    assert set(first["server"]) == set(first["llm"]) == {token_of(int(version))}
    assert first["server reports"] == version


def test_no_server_raises_on_all_ranks_and_the_other_engine_has_the_version(observed):
    from tests.support.engines.tiny_models import token_of

    first, second = observed["3"]
    for seen in (first, second):
        assert seen["error"].startswith("EngineUnreachableError: rank 0 could not switch")
    assert set(first["llm"]) == {token_of(3)}


def test_store_of_the_user_stays(observed):
    assert observed["newest"] == 3
