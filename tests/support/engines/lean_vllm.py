"""vLLM as forks for tests have it: imported, and changed where it would only take processor time.

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
from collections.abc import Sequence
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


def prepare() -> None:
    """Import vLLM and its plugins, and change them."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    import_all([*MODULES, *(plugin.module for plugin in plugins)])
    if "DBUFFER_SOAK" not in os.environ:
        # Each engine with two ranks compiles how it looks up embeddings, for seconds.
        importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]
    let_readers_sleep()
    replace_kernels()
    hide_amx()


def import_all(names: Sequence[str]) -> None:
    """Import those that there are; a program that needs another will fail itself."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


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
