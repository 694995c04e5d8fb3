"""A store's weights in a real SGLang engine of two ranks, offline, with tied embeddings.

A program (this file, run by SGLang's Python) leaves what it saw, and the tests judge that: tokens
against those of the fresh engine, and of transformers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import sglang_engine
from tests.programs.sglang_engine import FORMS
from tests.support.engines.misfits import MISFITS, NORM
from tests.support.engines.sglang_engines import NEEDS_SGLANG, WAIT_S, observe

pytestmark = [*NEEDS_SGLANG, pytest.mark.timeout(3 * WAIT_S)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Observations of the program."""
    return dict(observe(sglang_engine.__file__, tmp_path_factory.mktemp("offline")))


def test_switched_engine_answers_as_transformers_does(seen):
    assert seen["switched"] == seen["transformers B"] != seen["transformers A"]
    assert seen["switched back"] == seen["fresh A"] == seen["transformers A"]
    assert seen["bfloat16"] == seen["transformers bfloat16 B"]
    assert seen["reported"] == ["default", "1", "2"]
    assert seen["told"] == [None, 1, 2]


def test_a_request_that_cannot_be_read_ends_no_engine(seen):
    assert seen["after a bad request"] == seen["fresh A"]


def test_engine_acknowledges_and_its_ranks_do_not(seen):
    assert seen["receivers"] == {
        "engine": [None, 2],
        "engine.rank-0": ["engine", None],
        "engine.rank-1": ["engine", None],
    }


def test_options_of_a_follower(seen):
    """A version to stay on, and names that are mapped on the way."""
    assert seen["stays"] == [None, seen["transformers B"], "1"]
    assert seen["renamed"] == seen["transformers B"]


def test_misfit_is_refused_and_the_engine_serves_on(seen):
    named = {
        "unknown name": "model.layers.0.bogus",
        "one part of a fused parameter missing": "qkv_proj",
        "wrong length": NORM,
    }
    assert seen["misfits"].keys() == MISFITS.keys() >= named.keys()
    for misfit, (error, message, tokens) in seen["misfits"].items():
        assert error == "EngineUpdateError"
        assert "the engine serves on with version 2" in message
        assert named.get(misfit, "") in message
        assert tokens == seen["fresh A"]
    assert seen["after misfits"] == seen["transformers B"]


def test_failed_load_of_one_rank_is_taken_back_on_all(seen):
    before = 3 + len(MISFITS)
    error, message, tokens, label = seen["failed once"]
    assert error == "EngineUpdateError"
    assert "rank 1: RuntimeError: the disk is on fire" in message
    assert f"the engine serves on with version {before}" in message
    assert (tokens, label) == (seen["transformers B"], str(before))
    assert seen["after a failure"] == seen["transformers A"]


def test_failure_before_any_version_goes_back_to_the_checkpoint(seen):
    error, message, tokens, label = seen["failed at first"]
    assert error == "EngineUpdateError"
    assert "the engine serves on with weights from outside the store" in message
    assert (tokens, label) == (seen["fresh A"], "default")


def test_engine_that_cannot_go_back_is_made_whole_by_an_update(seen):
    error, message = seen["broken"]
    assert error == "EngineBrokenError"
    assert "half-loaded weights" in message
    assert seen["mended"] == seen["transformers B"]
    assert seen["request to a broken engine"] == "nothing came"


def test_weights_that_others_released_or_loaded_are_brought_again(seen):
    error, message, label = seen["asleep"]
    assert error == "EngineUpdateError"
    assert "wake it up first" in message
    assert label == "unknown"
    assert seen["awake"] == [seen["transformers A"], "1"]
    assert seen["loaded by others"] == seen["transformers B"]
    assert seen["after others"] == [seen["transformers A"], "1"]


def test_weights_in_another_form_than_they_are_loaded_in(seen):
    """As SGLang leaves quantised ones; `test_breadth.py` has an engine of them."""
    refusals = dict(seen["forms"])
    assert refusals.pop("as it was") == ""
    assert refusals.keys() == FORMS.keys()
    for refusal in refusals.values():
        assert "weight was loaded as torch.bfloat16 (4, 4) and has been made something" in refusal
