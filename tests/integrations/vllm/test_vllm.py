"""A store's weights in real vLLM engines in one process, against fresh engines on those weights.

Two ways in (the backend, and no option at all), four kinds of models, two dtypes, with linear
layers packed as vLLM does on a CPU and with live parameters as on a GPU: every pair of these, and
in a soak every combination.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.programs.vllm_offline import MANY, PATCHED, SWAPS, WITH_HEAD
from tests.support.engines.misfits import BIAS, EMBEDDING, K_PROJ, Q_PROJ
from tests.support.engines.patch_trainers import NUM_STEPS
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe, vllm_release

pytestmark = [*NEEDS_VLLM, pytest.mark.soak, pytest.mark.xdist_group("vllm")]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe("vllm_offline.py", tmp_path_factory.mktemp("vllm")))


@pytest.mark.parametrize("swap", SWAPS)
def test_switched_engines_answer_as_fresh_ones(observed, swap):
    seen = observed[swap]
    # Each engine is the other's measure: one was started on what the other switches to.
    for old, new in zip(seen["backend, fresh"], seen["none, fresh"], strict=True):
        assert old != new
    assert seen["backend, switched"] == seen["none, fresh"]
    assert seen["none, switched"] == seen["backend, fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_switching_back_restores_every_token(observed, swap):
    assert observed[swap]["backend, switched back"] == observed[swap]["backend, fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_switches_are_copies_and_layers_that_were_packed_meanwhile(observed, swap):
    """Experts are always packed on a CPU."""
    seen = observed[swap]
    # Into a form that has no image: the plan says so, and leaves the model with the reload.
    is_packed_otherwise = "bfloat16 packed" in swap and () < vllm_release() < (0, 31)
    assert seen["reloads of two switches"] == (2 if is_packed_otherwise else 0)
    assert seen["after two more"] == seen["backend, fresh"]
    assert seen["on the way there"] == seen["none, fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_live_parameters_are_what_they_say(observed, swap):
    # oneDNN has no kernel for bfloat16 where there is no AVX-512: vLLM packs nothing then.
    has_kernel = "bfloat16" not in swap or torch.cpu._is_avx512_supported()
    assert observed[swap]["parameters are live"] != (swap.endswith("packed") and has_kernel)


def test_outputs_tell_the_version_its_metadata_and_its_history(observed):
    told = [[None, {}, False], [1, {"step": 0}, True], [2, {"step": 1}, True]]
    if vllm_release() < (0, 32):
        told = [[version, None, None] for version, *_ in told]
    assert observed["versions reported"] == told


def test_the_engine_acknowledges_and_its_rank_does_not(observed):
    applied = {name: r["applied_version"] for name, r in observed["records"].items()}
    engine, rank = sorted(applied)
    assert rank == f"{engine}.rank-0"
    assert applied == {engine: 6, rank: None}
    assert observed["records"][rank]["part_of"] == engine


@pytest.mark.parametrize("misfit", WITH_HEAD)
def test_misfit_is_refused(observed, misfit):
    refusal = observed["refusals"][misfit]
    assert refusal.startswith("EngineUpdateError: ")
    assert "WeightsMismatchError" in refusal
    assert ".rank-0" in refusal


def test_refusals_leave_the_engine_as_it_was(observed):
    assert observed["after refusals"] == observed["before refusals"]
    assert observed["after a good one"] != observed["before refusals"]


def test_refusal_names_the_tensor(observed):
    refusals = observed["refusals"]
    assert Q_PROJ in refusals["too many rows"]
    assert "layers.1.self_attn.qkv_proj" in refusals["one part of a fused parameter missing"]
    assert f"no place for {BIAS}" in refusals["bias"]
    assert "no place for model.layers.2." in refusals["layer too many, tied to another"]
    assert f"no place for {K_PROJ.replace('1', '2')}" in refusals["layer too many"]
    padded = refusals["padded vocabulary"]
    assert f"{EMBEDDING} float32[512, 64] does not fit" in padded
    assert "has the 500 rows of its vocabulary, not 512" in padded


def test_surplus_tensors_are_left_out_with_one_warning(observed):
    assert observed["with surplus tensors"] == [observed["after a good one"]] * 2
    [warning] = observed["surplus warnings"]
    assert BIAS in warning
    assert "model.layers.2." in warning


def test_stock_calls_refuse_what_they_do_not_know(observed):
    for bad, error in observed["bad stock calls"].items():
        assert error.startswith("OptionError: "), bad


def test_a_request_is_parsed_as_vllm_has_it(observed):
    assert observed["not parsed"].startswith(("ValueError: ", "OptionError: "))
    assert "{'names': ['x']}" in observed["not parsed"]
    assert observed["parsed"] == 3


def test_stock_calls_take_newest_exact_and_nothing_twice(observed):
    fresh = observed["qwen3 float32 packed"]
    assert observed["stock newest"] == fresh["none, fresh"]
    assert observed["stock again"] == fresh["none, fresh"]
    assert observed["stock exact"] == fresh["backend, fresh"]
    assert "versions never go back" in observed["stock back"]
    assert "version 3 is not in" in observed["stock gone"]


def test_each_version_by_patches_is_the_trainers_state(observed):
    """In the engine's own parameters, fused ones included."""
    seen = observed["patches"]
    assert seen["differences"] == [[]] * (1 + NUM_STEPS)
    versions = [int(version) for version in seen["versions"]]
    # Each fifth step came in two chunks, which are a version each.
    chunked = range(1, 1 + NUM_STEPS, 5)
    assert versions == [1 + n + sum(one <= n for one in chunked) for n in range(1 + NUM_STEPS)]
    assert observed["after patches"] == observed[PATCHED]["none, fresh"]


def test_a_chunk_of_patches_is_there_at_once(observed):
    later = {"lm_head.weight", "model.embed_tokens.weight"}
    later.add("model.layers.0.self_attn.q_norm.weight")
    assert set(observed["patches"]["after a chunk"]) == later


def test_a_wrong_patch_leaves_the_engine_as_it_was(observed):
    seen = observed["patches"]
    assert seen["wrong"].startswith("WeightsMismatchError: a patch of 'lm_head', which was not")
    differences, version = seen["after a wrong one"]
    assert differences == []
    assert version in seen["versions"]


def test_patches_follow_a_whole_version(observed):
    assert observed["patches"]["too early"].startswith("VersionError: ")
    assert "send all weights once" in observed["patches"]["too early"]
    assert observed["no source"]["no base"].startswith("OptionError: ")
    assert "needs a WeightSource, or its init info a checkpoint" in observed["no source"]["no base"]


def test_a_trainer_of_patches_needs_no_source(observed):
    seen, fresh = observed["no source"], observed[MANY]
    assert seen["sent"] == fresh["none, fresh"]
    assert seen["nothing sent"] != seen["sent"]
    assert seen["other releases"] == [fresh["backend, fresh"], 0]


def test_busy_engine_is_refused_and_finishes_its_request(observed):
    assert observed["busy"].startswith("EngineBusyError: ")
    assert observed["finished when busy"] == observed["before busy"]


def test_engine_starts_on_the_newest_version(observed):
    seen = observed[MANY]
    assert observed["started from the store"] == seen["none, fresh"]
    assert observed["started with dummy weights"] == seen["none, fresh"]


def test_engine_starts_and_follows_from_a_local_copy(observed):
    """A store on a network is read once a node: by a mirror in one of the engine's processes."""
    seen = observed["local copy"]
    assert seen["started"] == observed[MANY]["none, fresh"]
    assert seen["followed"] == observed[MANY]["backend, fresh"]
    assert seen["polled"] == [True, False]
    assert seen["after polling"] == observed[MANY]["none, fresh"]
    assert seen["mapped"] == ["local"]
