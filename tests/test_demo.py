"""The demo end to end, and what it does when something is wrong with its engine."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support
from rich.console import Console
from support import IN_SOAKS_ALONE, Child, in_soaks_alone, is_running, preload

from dbuffer.errors import DBufferError, OptionError
from dbuffer.tools.commands import demo
from dbuffer.tools.demo import engines, loop, process
from dbuffer.tools.demo.engines import Refreshed, TorchEngine
from dbuffer.tools.demo.loop import DemoResult, run_demo
from dbuffer.tools.demo.policy import Tokens
from dbuffer.tools.demo.process import DemoError
from dbuffer.tools.demo.render import show_demo

preload("dbuffer.tools.demo.loop", "transformers.models.qwen3.modeling_qwen3")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo keeps its store; each test must leave it as empty as it was."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(loop, "_MEMORY", directory)
    return directory


def fork_engines(patch: pytest.MonkeyPatch) -> None:
    """Fork them off a process that has transformers, in place of spawning them, as with vLLM."""
    forking = SimpleNamespace(get_context=lambda _: support._processes)
    patch.setattr(process, "multiprocessing", forking)


def options(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {"output": tmp_path / "out", "engine": "torch", "steps": 25, "seed": 1, **changes}


def assert_nothing_left(scratch: Path) -> None:
    assert list(scratch.iterdir()) == []
    assert multiprocessing.active_children() == []


def assert_full_success(result: DemoResult, text: str, steps: int) -> None:
    assert result.success
    assert result.reward_last > result.reward_first + 0.2
    assert [step.step for step in result.steps] == list(range(1, steps + 1))
    assert [step.version_trained for step in result.steps] == list(range(1, steps + 1))
    sampled = [step.version_sampled for step in result.steps]
    assert sampled == sorted(sampled)
    # Sampling overlaps with training, and stays close behind.
    assert {step.lag for step in result.steps} <= {0, 1, 2}
    assert any(step.lag for step in result.steps)
    assert all(step.publish_ms > 0 for step in result.steps)
    assert all(step.pause_ms > 0 for step in result.steps if step.version_sampled)
    assert result.plot.read_bytes().startswith(b"\x89PNG")
    for words in ("version sampling", "pause ms", "climbed", "equal", "success", result.engine):
        assert words in text


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_engine_follows_the_trainer(tmp_path: Path, scratch: Path) -> None:
    output = io.StringIO()
    result = show_demo(Console(file=output, width=120), **options(tmp_path, engine="vllm"))
    assert_full_success(result, output.getvalue(), steps=25)
    assert result.engine.startswith("vLLM ")
    assert any(step.stage_ms > 0 for step in result.steps)
    assert_nothing_left(scratch)


@in_soaks_alone
@pytest.mark.slow
def test_torch_engine_follows_the_trainer_and_says_what_it_is(
    tmp_path: Path, scratch: Path
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    result = show_demo(console, **options(tmp_path))
    assert_full_success(result, output.getvalue(), steps=25)
    assert "plain torch" in result.engine
    assert "no vLLM" in result.engine
    assert_nothing_left(scratch)


class DeafEngine(TorchEngine):
    """Says that it has every version, and never loads one."""

    last_version_heard = 0
    version: int | None = None

    def refresh(self) -> Refreshed | None:
        version = self._receiver.wait_for_version(self.version, timeout_s=0)
        if version is None:
            return None
        if version <= self.last_version_heard:
            self._receiver.load_into(self._model)
        self.version = version
        return Refreshed(version, 0.0, 1.0)


class HalfDeafEngine(DeafEngine):
    """Loads what comes at first."""

    last_version_heard = 16


@in_soaks_alone
@pytest.mark.slow
def test_without_weights_in_the_engine_the_demo_fails(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "torch", DeafEngine)
    output = io.StringIO()
    result = show_demo(Console(file=output, width=120), **options(tmp_path))
    assert not result.success
    assert not result.reward_climbed
    assert not result.tokens_changed
    assert not result.tokens_match
    assert "failed" in output.getvalue()
    assert "success" not in output.getvalue()
    assert_nothing_left(scratch)


@in_soaks_alone
@pytest.mark.slow
def test_reward_alone_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "torch", HalfDeafEngine)
    result = run_demo(**options(tmp_path))
    assert result.reward_climbed
    assert not result.tokens_match
    assert not result.success


class FailsToStart(TorchEngine):
    def __init__(self, checkpoint: Path, seed: int) -> None:
        raise ValueError("no such kernel")


class DiesSampling(TorchEngine):
    def sample(self, prompts: Tokens, *, greedy: bool) -> Tokens:
        os._exit(7)


class HangsSampling(TorchEngine):
    def sample(self, prompts: Tokens, *, greedy: bool) -> Tokens:
        time.sleep(3600)
        raise AssertionError


class HangsStarting(TorchEngine):
    def __init__(self, checkpoint: Path, seed: int) -> None:
        time.sleep(3600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (FailsToStart, "the engine failed: ValueError: no such kernel"),
        (DiesSampling, "ended with exit code 7"),
        (HangsSampling, "no answer in 0.5 s"),
        pytest.param(HangsStarting, "no answer in 5 s", marks=IN_SOAKS_ALONE),
    ],
)
def test_engine_that_fails_dies_or_hangs_is_noticed(
    engine: type[TorchEngine],
    message: str,
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_engines(monkeypatch)
    monkeypatch.setitem(engines.ENGINES, "torch", engine)
    monkeypatch.setattr(process, "START_TIMEOUT_S", 5 if engine is HangsStarting else 120)
    monkeypatch.setattr(process, "REPLY_TIMEOUT_S", 0.5)
    with pytest.raises(DemoError, match=message) as caught:
        run_demo(**options(tmp_path))
    assert str(tmp_path / "out" / "engine.log") in str(caught.value)
    assert_nothing_left(scratch)


class LeavesItsPid(TorchEngine):
    def __init__(self, checkpoint: Path, seed: int) -> None:
        super().__init__(checkpoint, seed)
        (checkpoint.parents[1] / "pid").write_text(str(os.getpid()))


def train(_: Connection, directory: Path) -> None:
    """Until somebody kills this process."""
    fork_engines(pytest.MonkeyPatch())
    loop._MEMORY = directory
    engines.ENGINES["torch"] = LeavesItsPid
    run_demo(**options(directory, steps=10_000))


@pytest.mark.slow
def test_engine_ends_when_its_trainer_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with Child(train, tmp_path) as trainer:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", timeout_s=120)
        engine = int(pid_file.read_text())
        assert is_running(engine)
        trainer.signal(signal.SIGKILL)
        trainer.wait()
    wait_until(lambda: not is_running(engine), timeout_s=30)


def wait_until(condition: object, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_missing_vllm_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"pip install vllm.*--engine torch"):
        run_demo(**options(tmp_path, engine="vllm"))


@pytest.mark.parametrize("package", ["transformers", "matplotlib"])
def test_a_missing_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("dbuffer.tools.demo.render")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DBufferError, match=rf"the demo needs {package}.*\.\[demo\]"):
        demo.demo(engine="torch", output=tmp_path / "out")


@pytest.mark.parametrize("changes", [{"steps": 3}, {"engine": "sglang"}])
def test_options_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        run_demo(**options(tmp_path, **changes))
