"""Layers that vLLM loads in its own ways, in real engines, against fresh ones on those weights.

int8 layers, which are kernels with scales on a CPU; scales of quantised caches, which a checkpoint
may lack; vLLM's Transformers backend, whose layers are half transformers' own; heads with a bias,
and one that is tied to an embedding which is not vLLM's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.vllm_layers import (
    BACKEND,
    BIASED,
    FAMILIES,
    HAS_FP8_CACHES,
    HEARS,
    INT8,
    JUDGES,
    LACK_BEGINS,
    MIXERS,
    ONLINE,
    PLAIN,
    RETIED,
    SCALED,
    WARNING,
)
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = NEEDS_VLLM
RELOADED = (*INT8, ONLINE, "phi packed", HEARS, JUDGES)
"""Models of which too little is only copied, or a layer is not to be loaded alone."""
RELOADED_IN_PART = (MIXERS, "bloom live")
needs_fp8_caches = pytest.mark.skipif(
    not HAS_FP8_CACHES, reason="vLLM keeps no fp8 caches on a CPU without AVX-512 and AMX"
)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("layers")
    seen: dict[str, Any] = observe("vllm_layers.py", directory)
    return seen | {"log": (directory / "log.txt").read_text()}


@pytest.mark.parametrize("case", [*FAMILIES, HEARS, JUDGES, BIASED, RETIED, *INT8, ONLINE])
def test_switched_engines_answer_as_fresh_ones(observed, case):
    seen = observed[case]
    for old, new in zip(*seen["fresh"][:2], strict=True):
        assert old != new
    assert seen["switched"] == [None, seen["fresh"][1]]
    assert seen["switched back"] == [None, seen["fresh"][0]]


@pytest.mark.parametrize("case", [*FAMILIES, HEARS, JUDGES, BIASED, RETIED, *INT8, ONLINE])
def test_one_switch_verifies_the_copies_that_later_ones_are(observed, case):
    seen = observed[case]
    if case in RELOADED:
        assert seen["first reloads"] == seen["later reloads"] == ["of all"]
    elif case in RELOADED_IN_PART:
        assert seen["first reloads"] == ["of all", "of a part"] * 2
        assert seen["later reloads"] == ["of a part"]
    else:
        assert seen["first reloads"] == ["of all"] * 2
        assert seen["later reloads"] == []


@pytest.mark.parametrize("case", BACKEND)
def test_the_model_is_of_the_transformers_backend(observed, case):
    assert observed[case]["class"].startswith("Transformers")


def test_a_bias_that_a_loader_registers_must_come(observed):
    error, answers = observed["without bias"]
    assert "score.bias of the engine's model was not published" in error
    assert answers == observed[JUDGES]["fresh"][0]


def test_a_tied_model_comes_in_any_form(observed):
    seen = observed[RETIED]
    assert seen["forms"] == {form: [None, seen["fresh"][1]] for form in seen["forms"]}
    assert len(seen["forms"]) == 3


def test_a_head_that_differs_from_its_embedding_is_refused(observed):
    error, tokens = observed[RETIED]["another head"]
    assert "lm_head.weight (it differs from model.embed_tokens.weight" in error
    assert tokens == observed[RETIED]["fresh"][0]


@pytest.mark.parametrize("case", INT8)
def test_a_part_of_an_int8_model(observed, case):
    seen = observed[case]
    assert seen["part"] == [None, seen["fresh"][2]]
    assert seen["fresh"][2] not in seen["fresh"][:2]


@pytest.mark.parametrize("case", INT8)
def test_int8_weights_without_their_scales_are_refused(observed, case):
    error, tokens = observed[case]["without scales"]
    assert "of model.layers.0.mlp.gate_up_proj came without its weight_scale" in error
    assert tokens == observed[case]["fresh"][0]


def test_an_int8_engine_goes_back_after_a_failed_load(observed):
    before, error, tokens = observed["failed load"]
    assert before is None
    assert "all ranks went back" in error
    assert tokens == observed["a scale a channel"]["fresh"][0]


def test_weights_that_are_not_quantised_are_refused_by_an_int8_engine(observed):
    error, is_as_before = observed["unquantised"]
    assert "torch.float32 does not convert to torch.int8" in error
    assert is_as_before


@pytest.mark.parametrize("partial", [False, True])
def test_a_layer_whose_reload_cannot_be_right_is_refused(observed, partial):
    seen = observed["fused"]
    error, tokens = seen[str(partial)]
    assert error.startswith("EngineUpdateError: ")
    assert "takes model.layers.0.mlp.gate_up_proj for whole" in error
    assert tokens == seen["fresh"]


@pytest.mark.parametrize("partial", [False, True])
def test_what_a_model_writes_past_its_loaders_is_refused(observed, partial):
    """vLLM's reload does not see it, and would leave the weights of the version before."""
    seen = observed["gpt oss"]
    error, tokens = seen[str(partial)]
    assert "GptOssForCausalLM writes model.layers.0.attn.sinks past its loader" in error
    assert tokens == seen["fresh"]


def test_what_was_a_view_of_a_packed_parameter_is_refused_at_once(observed):
    """vLLM's reload leaves it as it is: half of the layer would be of the version before."""
    seen = observed["packed convolution"]
    if seen["is a view"]:  # where bfloat16 is not packed
        assert seen["error"] is None
    else:
        assert seen["error"].startswith("UnsupportedError: ")
        assert "backbone.layers.0.mixer.conv_weights was a view of backbone." in seen["error"]


def test_latent_attention_that_drops_a_packed_weight_is_refused_at_once(observed):
    """vLLM's reload would fail halfway: it has no place for the weight."""
    seen = observed["latent attention"]
    if seen["is there"]:  # on a processor without AMX
        assert seen["error"] is None
    else:
        assert seen["error"].startswith("UnsupportedError: ")
        assert "start the engine with attention_backend='CPU_MLA'" in seen["error"]


@needs_fp8_caches
def test_scales_that_do_not_come_are_the_defaults(observed):
    """As in an engine that is started on that checkpoint; not those of the version before."""
    seen = observed["scales"]
    assert seen["lacking"] == [None, seen[PLAIN]]
    assert seen["brought"] == [None, seen[SCALED]]
    assert all(a != b for a, b in zip(seen[PLAIN], seen[SCALED], strict=True))


@needs_fp8_caches
def test_a_part_leaves_scales_as_they_are(observed):
    assert observed["scales"]["part"] == [None, observed["scales"][SCALED]]


def test_nothing_is_warned_of_that_is_no_failure(observed):
    before, _ = observed["log"].split(LACK_BEGINS)
    assert WARNING not in before


def test_what_really_gets_nothing_is_warned_of(observed):
    _, after = observed["log"].split(LACK_BEGINS)
    assert f"QKVParallelLinear{WARNING}" in after
    assert f"RotaryEmbedding{WARNING}" not in after
