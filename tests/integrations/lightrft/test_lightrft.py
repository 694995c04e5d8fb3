"""LightRFT's BroadcastManager: real trainers of two ranks, and a real vLLM engine of two ranks.

One program, started by torchrun, does everything, with the engine in the trainer's processes as
LightRFT has it; the tests judge what it saw.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import lightrft_ranks
from tests.programs.lightrft_ranks import FAILURES, LOAD_ERROR, shared_memory_name
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe
from tests.support.lightrft_parts import TRAINERS, expected_dtype
from tests.support.stores import SHARED_MEMORY

RANKS = (0, 1)

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    env = environment(processes=False)
    directory = tmp_path_factory.mktemp("lightrft")
    seen = observe(lightrft_ranks.__file__, directory, env=env)
    yield seen
    shutil.rmtree(seen["two managers"][0]["first store"])
    for path in SHARED_MEMORY.glob(f"{shared_memory_name(directory)}*"):
        path.unlink()  # of ranks that were killed


@pytest.mark.parametrize("trainer", TRAINERS)
def test_engine_answers_as_transformers_with_the_trainers_weights(observed, trainer):
    for seen in observed["trainers"][trainer]:
        assert seen["before"] != seen["expected"], (
            "the rest would hold with no weights moved at all"
        )
        assert seen["after"] == seen["expected"]
        # Also where tensors are gathered, and where they are cast.
        assert seen["deltas"] == [0, 1]
        assert seen["dtypes"] == [str(expected_dtype(trainer))]


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_raises_on_all_ranks_and_the_engine_serves_on(observed, failure):
    for seen in observed["failures"][failure]:
        assert seen["error"].startswith(f"{FAILURES[failure]}: ")
        assert seen["after"] == seen["before"]
        assert seen["next"] == seen["expected"] != seen["before"]


@pytest.mark.parametrize("rank", RANKS)
def test_error_names_the_rank_whose_load_failed(observed, rank):
    for seen in observed["failures"][f"load on rank {rank}"]:
        assert f"rank {rank}: RuntimeError: {LOAD_ERROR}" in seen["error"]
        assert f"rank {1 - rank}: " not in seen["error"]


def test_error_says_that_the_engine_sleeps(observed):
    assert "wake it up first" in observed["failures"]["asleep"][0]["error"]


def test_second_manager_of_an_engine_goes_on_and_the_first_hears_of_it_at_once(observed):
    """The default store is one directory in shared memory."""
    [store] = {seen["first store"] for seen in observed["two managers"]}
    assert Path(store).parent == SHARED_MEMORY
    for seen in observed["two managers"]:
        assert seen["error"].startswith("EngineUpdateError: ")
        assert "another follower let the engine follow another store" in seen["error"]
        assert store in seen["error"]
        assert seen["error_s"] < 60, "its time-out is ten minutes"
        assert seen["after"] == seen["expected"]


def test_ranks_without_a_follower_are_one_engine(observed):
    """Each calls its own worker, as vLLM has it where torchrun started the ranks."""
    first, second = observed["without a follower"]
    assert first["receivers"] == [first["engine"] + end for end in ("", ".rank-0", ".rank-1")]
    assert first["after"] == second["after"] == first["expected"]
    for seen in (first, second):
        assert f"rank 0: RuntimeError: {LOAD_ERROR}" in seen["error"]


def test_rank_that_ends_in_its_load_leaves_nobody_waiting(observed):
    seen = observed["rank lost"]
    assert seen["error"].startswith("RankFailedError: ")
    assert seen["error_s"] < 60
