"""The examples as their users run them.

All of them run in soaks alone: the integrations' own tests run the same with engines and servers
that are as real. (`sglang_server`: ``test_sglang_server``.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, kill_group
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 60), IN_SOAKS_ALONE]

EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Printed(str):
    """Output of an example."""

    def numbers(self, pattern: str) -> list[float]:
        """What the pattern's group found, in each line that it stands in."""
        return [float(found) for found in re.findall(pattern, self, re.MULTILINE)]


def run(name: str, shm_path: Path, launcher: list[str] | None = None) -> Printed:
    """Run an example with its temporary files below ``shm_path``; it must leave nothing there.

    vLLM has a socket there, whose path must be short.
    """
    process = subprocess.Popen(
        [sys.executable, *(launcher or []), str(EXAMPLES / name)],
        env=os.environ | {"TMPDIR": str(shm_path), "PYTHONWARNINGS": "ignore"},
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
    assert process.returncode == 0, text
    return Printed(text)


def test_cartpole_is_solved_over_the_scheme(shm_path):
    done = run("torchrl_cartpole.py", shm_path)
    assert done.numbers(r"return +([\d.]+)")[-1] >= 150
    # A synchronous collector never acts by any policy but the newest.
    assert done.numbers(r"policy lag (\d+)") == [0] * 15


def test_an_adapter_learns_with_its_sampler(shm_path):
    done = run("peft_lora.py", shm_path)
    assert "the sampler and the adapter: equal" in done


class TestWithVLLM:
    pytestmark = NEEDS_VLLM

    def test_engine_learns_while_stale_tokens_are_masked(self, shm_path):
        done = run("async_rl.py", shm_path)
        dropped = done.numbers(r"(\d+) of 16 samples dropped")
        masked = done.numbers(r"(\d+) of \d+ tokens masked")
        assert (len(dropped), len(masked)) == (50, 50)
        assert done.numbers(r"^(\d+) samples dropped") == [sum(dropped)]
        assert done.numbers(r"(\d+) tokens masked$") == [sum(masked)]

    def test_engine_learns_with_torchrls_loss(self, shm_path):
        done = run("torchrl_grpo.py", shm_path)
        # The engine's own log-probabilities say that it sampled with the trainer's weights.
        assert done.numbers(r"effective sample size +(\d+)%") == [100] * 12

    def test_engines_of_all_ranks_follow_the_actor(self, shm_path):
        done = run("lightrft_ranks.py", shm_path, TORCHRUN)
        assert done.count("its engine and of a fresh one: equal") == 2
        assert sorted(done.numbers(r"version (\d)")) == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]

    def test_engine_follows_the_ranks_of_fsdp2(self, shm_path):
        done = run("fsdp2_async.py", shm_path)
        assert "the engine and of both ranks: equal" in done
        assert len(done.numbers(r"reward ([\d.]+)")) == 30

    def test_server_answers_with_what_was_trained(self, shm_path):
        done = run("atropos_bridge.py", shm_path)
        assert "the server and of a fresh one: equal" in done
        assert len(done.numbers(r"update (\d+) ms")) == 4
