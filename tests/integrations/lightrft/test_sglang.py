"""LightRFT's BroadcastManager with a real SGLang engine: two ranks of FSDP2, and LightRFT's names.

One program, started by torchrun with SGLang's Python, does everything; the tests judge what it saw.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import lightrft_sglang
from tests.support.engines.sglang_engines import (
    NEEDS_SGLANG,
    WAIT_S,
    observe,
)
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_SGLANG, *IN_SOAKS_ALONE, pytest.mark.timeout(3 * WAIT_S)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return observe(lightrft_sglang.__file__, tmp_path_factory.mktemp("lightrft-sglang"))


def test_engine_answers_as_a_fresh_one(observed):
    assert observed["before"] != observed["fresh"]
    assert observed["after"] == observed["fresh"]


def test_all_ranks_return_when_it_has_switched(observed):
    assert observed["versions"] == [1, 1]


def test_names_in_the_trainer_are_not_those_of_the_engine(observed):
    assert {name.rpartition("language_model.")[0] for name in observed["names"]} == {"model."}
