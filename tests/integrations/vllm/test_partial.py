"""Versions that hold a part of a model, in real vLLM engines, against fresh ones on the whole.

With linear layers packed as vLLM does on a CPU and live as on a GPU, tied embeddings and experts.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.programs.vllm_partial import CASES, REFUSED
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe("vllm_partial.py", tmp_path_factory.mktemp("partial")))


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_base_with_the_part(observed, case):
    seen = observed[case]
    fresh = [seen["base"], *seen["fresh"]]
    assert seen["switched"] == [[None, tokens] for tokens in fresh]
    for one, other in itertools.pairwise(fresh):
        assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_less_than_was_brought_before_is_refused(observed, case):
    error, tokens = observed[case]["less"]
    assert error.startswith("EngineUpdateError: ")
    last = len(observed[case]["fresh"])
    assert f"version {last + 1} lacks" in error
    assert f"of version {last}" in error
    assert f"serves on with version {last}" in error
    assert tokens == observed[case]["fresh"][-1]


def test_without_being_told_a_part_is_refused(observed):
    error, tokens = observed["not told"]
    assert error.startswith("EngineUpdateError: ")
    assert "WeightsMismatchError: only 0 of " in error
    assert tokens == observed["qwen3 packed"]["base"]


@pytest.mark.parametrize("name", REFUSED)
def test_part_of_a_layer_is_refused(observed, name):
    family, _, reason = REFUSED[name]
    error, tokens = observed["refused"][name]
    assert error.startswith("EngineUpdateError: ")
    assert reason in error
    assert tokens == observed[f"{family} packed"]["base"]


def test_a_failed_load_goes_back_to_base_and_part(observed):
    """The version before does not hold what the failed one had begun to bring in addition."""
    seen, fresh = observed["recovery"], observed["qwen3 packed"]["fresh"]
    error, tokens = seen["failed"]
    assert "all ranks went back, and the engine serves on with version 1" in error
    assert tokens == fresh[0]
    assert seen["less again"] == [None, fresh[0]]
    assert seen["then"] == [None, fresh[1]]
