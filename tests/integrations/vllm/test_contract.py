"""vLLM 0.23 and 0.24: the contract that their documents give for a weight transfer's engine.

Objects as those documents make and call them, with any vLLM; and real engines of these releases, in
an environment of their own, whose answers are compared with those of fresh engines.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.vllm_contract import ENGINES, IS_OF_THEM
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe, run_tests_with
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM

RELEASES = ["0.23.0", "0.24.0"]
TIMEOUT_S = 1500


def test_contract(tmp_path):
    """As those documents make and call objects, on a local mount and on a network."""
    observe("vllm_contract.py", tmp_path, "contract")


# Real engines of these releases.


@IN_SOAKS_ALONE
@pytest.mark.skipif(IS_OF_THEM, reason="this is one of them")
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("release", RELEASES)
def test_engines_of_these_releases(release):
    run_tests_with(release, __file__, TIMEOUT_S)


of_these_releases = pytest.mark.skipif(not IS_OF_THEM, reason="needs vLLM 0.23 or 0.24")


@pytest.fixture(scope="module", params=ENGINES)
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    where = ENGINES[request.param]
    place = tmp_path_factory.mktemp("contract")
    env = environment(processes=where["processes"])
    return observe("vllm_contract.py", place, str(where["tp"]), env=env, imports_anew=True)


@of_these_releases
def test_dense_updates(observed):
    """In a session for a checkpoint's weights, and in one for a kernel's; each is switched to."""
    assert len(observed["dense"]) == 4
    for seed, tokens in observed["dense"]:
        assert tokens == observed["fresh"][str(seed)]


@of_these_releases
def test_sparse_updates(observed):
    has_one_rank = observed["ranks"] == 1
    expected = observed["fresh"]["1"] if has_one_rank else observed["sparse refused"]
    assert observed["sparse"] == expected


@of_these_releases
@pytest.mark.parametrize("session", ["checkpoint", "kernel"])
def test_misfit_leaves_the_engine_as_it_was(observed, session):
    error, tokens = observed["misfit"][session]
    assert "norm.weight" in error
    assert tokens == observed["fresh"]["2"]


@of_these_releases
def test_trainers_learn_which_version_is_served(observed):
    assert observed["applied"]
