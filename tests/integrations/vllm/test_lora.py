"""Adapters in real vLLM engines: merged into what an engine follows, and loaded by the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe
from tests.support.peft_parts import NEEDS_PEFT

pytestmark = [*NEEDS_VLLM, *NEEDS_PEFT]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe("vllm_lora.py", tmp_path_factory.mktemp("lora")))


def test_an_engine_follows_the_merged_model(observed):
    assert observed["followed"] == [[None, tokens] for tokens in observed["fresh"]]
    for one, other in zip(*observed["fresh"], strict=True):
        assert one != other


def test_an_engine_loads_the_adapter(observed):
    """At each version, with prompts that its caches of adapters and prefixes know from before."""
    assert observed["by adapter"] == observed["fresh"]
    assert observed["without"] == observed["base"]
    assert observed["base"] not in observed["fresh"]


def test_the_base_model_of_adapters_is_switched_by_copies(observed):
    assert observed["base updates"] == [[None, tokens] for tokens in observed["fresh"]]
    assert observed["reloads"] == []


def test_the_last_adapter_can_still_be_asked_for(observed):
    assert observed["by the one before"] == observed["fresh"][0]


def test_an_adapter_is_no_model(observed):
    error, tokens = observed["adapter as model"]
    assert error.startswith("EngineUpdateError: ")
    assert "the store holds an adapter, not a model" in error
    assert tokens == observed["fresh"][-1]


def test_a_model_is_no_adapter(observed):
    assert "the store holds a model, not an adapter" in observed["model as adapter"]
