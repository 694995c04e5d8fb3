"""Real SGLang engines on a CPU, for tests: where they are, and how they are started."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dbuffer.integrations.sglang import versions_of
from tests.support import ROOT
from tests.support.engines import preforked, vllm_engines
from tests.support.engines.vllm_servers import EngineServer

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
WHOLE = PYTHON.parent.parent / "made-from"

NEEDS_SGLANG = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not WHOLE.is_file(), reason=f"there is no {PYTHON}: `python3 dev.py sglang` makes it"
    ),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="SGLang's CPU tests are for x86-64"),
]

LOADER = "dbuffer.integrations.sglang.load_from_store"
WAIT_S = 400
"""For anything that is waited for, an engine's start on a busy machine included."""

MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""SGLang imports every model that it has, unless told otherwise; that takes half a minute."""

PROMPTS = ([1, 2, 3], list(range(1, 60)))
"""A short one, and one of which the cache keeps much."""

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "mem_fraction_static": 0.05,
    "log_level": "warning",
}


def environment(models: Collection[str] = MODELS) -> dict[str, str]:
    """For processes of an engine of one of these models."""
    all_models = next(PYTHON.parent.parent.glob("lib/python*/site-packages/sglang/srt/models"))
    others = [file.stem for file in all_models.glob("*.py") if file.stem not in models]
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),  # alone: this process's has packages of another environment
        "HF_HUB_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # so that a process that has imported NumPy can be forked
        "PYTHONWARNINGS": "ignore",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        "SGLANG_USE_CPU_ENGINE": "1",
        # torch's compiler would look for what sglang_without_gpu stands in for.
        "TORCHDYNAMO_DISABLE": "1",
    }


def observe(
    program: str, directory: Path, *arguments: str, models: Collection[str] = MODELS
) -> Any:
    """Run a program with SGLang's Python, as `vllm_engines.observe` does."""
    env = environment(models)
    return vllm_engines.observe(program, directory, *arguments, env=env, python=PYTHON)


def prefork() -> None:
    """Import SGLang, and let processes of engines be forks of this one as it is now."""
    gc.disable()
    for module in ("sglang.srt.entrypoints.engine", "sglang.srt.models.registry"):
        importlib.import_module(module)
    gc.freeze()  # a collection of all writes to all, which a fork would copy
    gc.enable()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads cannot be forked"
    preforked.serve_forks()


def start_engine(checkpoint: Path, **more: Any) -> Any:
    """An ``sglang.Engine`` that can follow; in a process of SGLang's Python."""
    import sglang

    ours = {"custom_weight_loader": [LOADER, "sglang_faults.make"]}
    return sglang.Engine(model_path=str(checkpoint), **{**ENGINE, **ours, **more})


def greedy(engine: Any, tokens: int = 12) -> list[list[int]]:
    """What an engine answers each of :data:`PROMPTS` with."""
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers = engine.generate(input_ids=list(PROMPTS), sampling_params=parameters)
    return [answer["output_ids"] for answer in answers]


def version_told(engine: Any) -> int | None:
    """The version that all tokens of an answer came from, as the answer says."""
    parameters = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    [answer] = engine.generate(input_ids=[PROMPTS[0]], sampling_params=parameters)
    [span] = versions_of(answer)
    assert (span.start, span.end) == (0, 4)
    return span.version


def label(engine: Any) -> str:
    """The version that an engine reports."""
    return str(engine.get_model_info()["weight_version"])


class Server(EngineServer):
    """An SGLang server."""

    def __init__(self, checkpoint: Path, log: Path, *flags: str, port: int) -> None:
        command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
        for name, value in {**ENGINE, "port": port, "dtype": "bfloat16"}.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*command, *flags], env=environment(), stdout=output, stderr=subprocess.STDOUT
            )
        super().__init__(process, log, port, {})

    def generate(self, prompt: list[int], tokens: int = 12) -> dict[str, Any]:
        """SGLang's answer: ``output_ids`` and ``meta_info``."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters}
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())
