"""The examples as their users run them; some also with the weights held back, which must fail.

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

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 60), pytest.mark.slow, IN_SOAKS_ALONE]

EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

HELD_BACK = {
    "torchrl_cartpole.py": """
from dbuffer.integrations.torchrl import DoubleBufferSyncScheme
DoubleBufferSyncScheme.send = lambda *_, **__: None
""",
    "trl_grpo.py": """
from dbuffer.integrations.trl import WeightSync
WeightSync.sync_weights = lambda _: None
""",
    "async_rl.py": """
import dataclasses
from dbuffer import WeightSender
send, published = WeightSender.send, []
def send_once(*arguments, **options):
    if published:
        last = published[-1]
        published.append(dataclasses.replace(last, version=last.version + 1))
    else:
        published.append(send(*arguments, **options))
    return published[-1]
WeightSender.send = send_once
""",
    "lightrft_ranks.py": """
from dbuffer.integrations.lightrft import BroadcastManager
broadcast = BroadcastManager.broadcast_to_engine
def broadcast_once(self):
    if not self.version:
        broadcast(self)
BroadcastManager.broadcast_to_engine = broadcast_once
""",
}
"""Code that runs before an example, and keeps its new weights from the engines."""


class Printed(str):
    """Output of an example."""

    def numbers(self, pattern: str) -> list[float]:
        """What the pattern's group found, in each line that it stands in."""
        return [float(found) for found in re.findall(pattern, self, re.MULTILINE)]


def run(
    name: str, shm_path: Path, launcher: list[str] | None = None, *, held_back: bool = False
) -> Printed:
    """Run an example with its temporary files below ``shm_path``; it must leave nothing there.

    It must succeed, unless its weights are held back. vLLM has a socket there, whose path must be
    short.
    """
    program = EXAMPLES / name
    if held_back:
        run_it = f"import runpy\nrunpy.run_path({str(program)!r}, run_name='__main__')\n"
        program = shm_path / "held_back.py"
        guarded = f"if __name__ == '__main__':\n    exec({HELD_BACK[name] + run_it!r})\n"
        program.write_text(guarded)  # not in processes that import it anew
    process = subprocess.Popen(
        [sys.executable, *(launcher or []), str(program)],
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
    assert process.returncode == held_back, text
    return Printed(text)


def test_cartpole_is_solved_over_the_scheme(shm_path):
    done = run("torchrl_cartpole.py", shm_path)
    assert done.numbers(r"return +([\d.]+)")[-1] >= 150
    # A synchronous collector never acts by any policy but the newest.
    assert done.numbers(r"policy lag (\d+)") == [0] * 15


def test_cartpole_is_not_solved_by_workers_without_new_weights(shm_path):
    done = run("torchrl_cartpole.py", shm_path, held_back=True)
    # In the same number of batches, and not by a hair.
    assert max(done.numbers(r"return +([\d.]+)")) < 75
    assert done.numbers(r"policy lag (\d+)") == list(range(15))


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

    def test_samples_of_an_engine_without_new_weights_are_dropped(self, shm_path):
        done = run("async_rl.py", shm_path, held_back=True)
        # All are of version 1, and up to three versions behind they are used.
        assert done.numbers(r"(\d+) of 16 samples dropped") == [0] * 4 + [16] * 46
        assert "WaitTimeoutError" in done

    def test_engine_learns_with_torchrls_loss(self, shm_path):
        done = run("torchrl_grpo.py", shm_path)
        # The engine's own log-probabilities say that it sampled with the trainer's weights.
        assert done.numbers(r"effective sample size +(\d+)%") == [100] * 12

    def test_engine_learns_with_trls_trainer(self, shm_path):
        run("trl_grpo.py", shm_path)

    def test_trls_engine_without_new_weights_is_seen(self, shm_path):
        done = run("trl_grpo.py", shm_path, held_back=True)
        first, *_, last = done.numbers(r"reward ([\d.]+)")
        assert last - first < 0.1
        assert "the engine and of a fresh one: differ" in done

    def test_engines_of_all_ranks_follow_the_actor(self, shm_path):
        done = run("lightrft_ranks.py", shm_path, TORCHRUN)
        assert done.count("its engine and of a fresh one: equal") == 2
        assert sorted(done.numbers(r"version (\d)")) == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]

    def test_engines_without_new_weights_are_seen(self, shm_path):
        done = run("lightrft_ranks.py", shm_path, TORCHRUN, held_back=True)
        assert done.count("its engine and of a fresh one: differ") == 2
        assert done.numbers(r"version (\d)") == [1] * 12

    def test_server_answers_with_what_was_trained(self, shm_path):
        done = run("atropos_bridge.py", shm_path)
        assert "the server and of a fresh one: equal" in done
        assert len(done.numbers(r"update (\d+) ms")) == 4
