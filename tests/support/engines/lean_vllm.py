"""vLLM as forks for tests have it: imported, and changed where it would only take processor time.

Whatever imports this module has it so.

Its ranks sleep between messages, its kernels are replaced once, and outside of soaks torch compiles
nothing. It sees no AMX, so that engines are the same on all processors.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "dbuffer.integrations.vllm.backend",
    "dbuffer.integrations.vllm.rank",
)
"""Modules besides plugins. An older vLLM may lack some."""

QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
SPIN_S = 0.01

KERNELS = "register_triton_kernel_overrides"

REGISTRY = "vllm.model_executor.models.registry"

FORKED_WITH_CARE = "jemalloc_bg_thd"
"""Thread of pyarrow's allocator, which an older vLLM imports; jemalloc starts it anew in a fork."""


def has_threads() -> bool:
    """Whether the imports have started a thread, so that no fork has all of the process."""
    return _num_threads > 1


def prepare() -> None:
    """Import vLLM and its plugins, and change them."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # read as they are imported
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    for name in [*MODULES, *(plugin.module for plugin in plugins)]:
        # A program that needs a module that is missing will fail itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "DBUFFER_SOAK" not in os.environ:
        # Each engine with two ranks compiles how it looks up embeddings, for seconds.
        importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]
    let_readers_sleep()
    replace_kernels()
    hide_amx()
    describe_models_here()


def let_readers_sleep() -> None:
    """Let vLLM's ranks spin for 10 ms after each message, not for a second.

    On few processors they would take the time of the rank that they wait for. Before a reader's
    first message it spins as ever: until then it may miss what would wake it.
    """
    if (queues := sys.modules.get(QUEUES)) is None:
        return

    def record_read(self: Any) -> None:
        self.last_read = time.monotonic() - self.busy_loop_s + SPIN_S

    queues.SpinCondition.record_read = record_read  # type: ignore[attr-defined]


def replace_kernels() -> None:
    """Let vLLM replace its Triton kernels now, not for each engine.

    A CPU has other kernels. To replace one, vLLM looks at all names of all modules: 0.25 s.
    """
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if (replace := getattr(platform, KERNELS, None)) is not None:  # older ones replace none
        replace()
        setattr(type(platform), KERNELS, classmethod(lambda cls: None))


def hide_amx() -> None:
    """Let vLLM see a processor without AMX.

    With AMX it packs small layers of bfloat16 whatever `set_packing` asks for, its int8 layers take
    no float32, and 0.28 dies of an illegal instruction.
    """
    if (cpu := sys.modules.get("torch.cpu")) is not None:
        cpu._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]


def describe_models_here() -> None:
    """Let vLLM inspect the classes of models in its own process.

    It starts a program for each class, which imports vLLM, as the class might use a GPU.
    """

    def run(function: Callable[[], Any]) -> Any:
        return function()

    if (registry := sys.modules.get(REGISTRY)) is not None:
        registry._run_in_subprocess = run  # type: ignore[attr-defined]


prepare()
_names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
_num_threads = len([name for name in _names if name != FORKED_WITH_CARE])
