"""Switches by copies alone, in real engines that are not what a plan takes for granted.

Weights that vLLM's own `reload_weights` has put back, of each kind of parameter of a deep model; a
reranker that computes its head from its embedding; and a model that keeps published tensors beside
its parameters.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.vllm_plan import KINDS, NUM_LAYERS
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    seen: dict[str, Any] = observe("vllm_plan.py", tmp_path_factory.mktemp("plan"))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_vllm_put_back_is_not_patched_upon(observed, kind):
    assert observed["put back"][kind] == {"put back": NUM_LAYERS, "wrong": [], "error": None}


def test_one_switch_verifies_all_but_a_layer_that_derives_something(observed):
    seen = observed["deriving"]
    first = ["of all"] * 2 + ["of all", "of a part"] * 2  # without the layer, in the second round
    assert seen["reloads"] == [first, ["of a part"], ["of a part"]]
    assert seen["largest"] == [10.0, 11.0, 12.0]
    assert seen["right"] == [True] * 3


def test_a_reranker_that_computes_its_head_is_refused_and_serves_on(observed):
    error, is_as_before = observed["reranker"]
    assert error.startswith("EngineUpdateError: ")
    assert "computes score.weight from model.embed_tokens.weight" in error
    assert is_as_before


def test_what_a_model_keeps_beside_its_parameters_is_of_the_version(observed):
    assert observed["beside"][0] == [[None, [7.0, 9.0]], [None, [11.0, 10.0]]]


def test_a_tensor_of_which_a_model_keeps_a_view_is_refused(observed):
    assert "no place for viewed" in observed["beside"][1]
