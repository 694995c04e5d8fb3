"""The examples as their users run them; in a soak with the weights held back, which must fail.

Those of LightRFT and Atropos are for the soak, too: `test_lightrft` and `test_atropos` run the same
with engines and servers that are as real.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support import in_soaks_alone
from vllm_engines import NEEDS_VLLM, TIMEOUT_S, kill_group

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


class Run(NamedTuple):
    """How an example ended, and what it printed."""

    code: int
    text: str

    def numbers(self, pattern: str) -> list[float]:
        """What the pattern's group found, in each line that it stands in."""
        return [float(found) for found in re.findall(pattern, self.text)]


def run(name: str, shm_path: Path, *options: str) -> Run:
    """Run an example with its temporary files below ``shm_path``; it must leave nothing there.

    vLLM has a socket there, whose path must be short.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"dbuffer.examples.{name}", *options],
        env=os.environ | {"TMPDIR": str(shm_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        kill_group(process)
    print(text)
    assert list(shm_path.glob("dbuffer-*")) == []
    return Run(process.returncode, text)


@in_soaks_alone
@pytest.mark.slow
def test_cartpole_is_solved_over_the_scheme(shm_path: Path) -> None:
    done = run("cartpole", shm_path)
    assert done.code == 0, done.text
    assert done.numbers(r"return +([\d.]+)")[-1] >= 150
    # A synchronous collector never acts by any policy but the newest.
    assert done.numbers(r"policy lag (\d+)") == [0] * 15
    assert "\nsolved:" in done.text


@in_soaks_alone
@pytest.mark.slow
def test_cartpole_is_not_solved_by_workers_without_new_weights(shm_path: Path) -> None:
    done = run("cartpole", shm_path, "--broken-sync")
    assert done.code == 1, done.text
    # In the same number of batches, and not by a hair.
    assert max(done.numbers(r"return +([\d.]+)")) < 75
    assert done.numbers(r"policy lag (\d+)") == list(range(15))
    assert "not solved:" in done.text


@in_soaks_alone
@pytest.mark.slow
def test_an_adapter_learns_with_its_sampler(shm_path: Path) -> None:
    done = run("lora", shm_path)
    assert done.code == 0, done.text
    assert ": climbed\n" in done.text
    assert "greedy answers of sampler and adapter are equal" in done.text


def assert_engine_followed(done: Run) -> None:
    assert done.code == 0, done.text
    assert ": climbed\n" in done.text
    assert "the engine's greedy answers and the fresh one's are equal" in done.text


class TestGRPO:
    pytestmark = NEEDS_VLLM

    @in_soaks_alone
    def test_engine_learns_with_its_trainer(self, shm_path: Path) -> None:
        done = run("grpo", shm_path)
        assert_engine_followed(done)
        # The engine's own log-probabilities say that it sampled with the trainer's weights.
        assert done.numbers(r"effective sample size +(\d+)%") == [100] * 12


class TestTRL:
    pytestmark = NEEDS_VLLM

    @in_soaks_alone
    def test_engine_learns_with_its_trainer(self, shm_path: Path) -> None:
        done = run("trl", shm_path)
        assert_engine_followed(done)

    @in_soaks_alone
    def test_engine_learns_with_the_trainer_of_an_adapter(self, shm_path: Path) -> None:
        done = run("trl", shm_path, "--lora")
        assert_engine_followed(done)

    @in_soaks_alone
    def test_engine_without_new_weights_is_seen(self, shm_path: Path) -> None:
        done = run("trl", shm_path, "--broken-sync")
        assert done.code == 1, done.text
        assert ": did not climb\n" in done.text
        assert "the engine's greedy answers and the fresh one's differ" in done.text


class TestLightRFT:
    pytestmark = NEEDS_VLLM

    @in_soaks_alone
    def test_engines_of_all_ranks_follow_the_actor(self, shm_path: Path) -> None:
        done = run("lightrft", shm_path)
        assert done.code == 0, done.text
        assert done.text.count("answers of its engine and a fresh one are equal") == 2
        assert sorted(done.numbers(r"version (\d)")) == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]

    @in_soaks_alone
    def test_engines_without_new_weights_are_seen(self, shm_path: Path) -> None:
        done = run("lightrft", shm_path, "--zero3", "--broken-sync")
        assert done.code == 1, done.text
        assert done.text.count("answers of its engine and a fresh one differ") == 2
        assert done.numbers(r"version (\d)") == [1] * 12


class TestAtropos:
    pytestmark = NEEDS_VLLM

    @in_soaks_alone
    def test_server_answers_with_what_was_trained(self, shm_path: Path) -> None:
        done = run("atropos", shm_path)
        assert done.code == 0, done.text
        assert "the server's greedy answers and the fresh engine's are equal" in done.text
        assert len(done.numbers(r"update (\d+) ms")) == 4
