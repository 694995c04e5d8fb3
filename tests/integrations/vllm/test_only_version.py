"""A real vLLM engine that stays on one version, beside one that follows a trainer's newest."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.vllm_only_version import KEPT, NUM_LOOKS
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe("vllm_only_version.py", tmp_path_factory.mktemp("only")))


def test_tokens_are_those_of_a_fresh_engine_while_the_trainer_publishes_on(observed):
    assert observed["fresh"] != observed["base"]
    assert observed["switched to"] == KEPT
    stayed = [True, None, KEPT, str(KEPT), observed["fresh"]]
    assert observed["looks"] == [stayed] * NUM_LOOKS
    assert observed["newest"] == observed["fresh newest"] != observed["fresh"]


def test_restarted_engine_has_it_from_its_start(observed):
    assert observed["restarted"] == [None, str(KEPT), observed["fresh"]]


def test_engine_goes_back_to_it_and_on_to_the_newest(observed):
    assert observed["went back"] == [str(KEPT), observed["fresh"]]
    assert observed["went on"] == observed["newest"]


def test_what_cannot_be_is_refused_at_once(observed):
    assert observed["gone"].startswith("VersionError: version 1 is not in ")
    assert observed["local copy"].startswith("OptionError: ")
    assert "local_store" in observed["local copy"]
    assert "version 1 is not in " in observed["started on what is gone"]
