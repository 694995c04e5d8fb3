"""Detection of calls that write or discard SGLang's weights without dbuffer.

When an engine serves, the functions in SGLang's dispatch table can no longer be replaced. So this
module replaces functions that the dispatched functions look up at each call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang.srt.managers.scheduler_components import weight_updater as scheduler
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_exec

from dbuffer.engine.endpoint import falling_asleep, loading, waking_up, watch
from dbuffer.integrations.sglang.sglang_engine import LOADER
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

_LOADS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)


def watch_scheduler() -> None:
    """Detect calls in this scheduler process that write or discard weights. Idempotent."""
    functions: list[tuple[Any, str, Callable[..., AbstractContextManager[None]]]] = [
        *((WeightUpdater, name, functools.partial(_loading, name)) for name in _LOADS),
        # SGLang calls these before it releases the memory of weights, and after it has restored the
        # memory.
        (scheduler, "_export_static_state", _releasing),
        (scheduler, "_import_static_state", _resuming),
    ]
    for owner, name, around in functions:
        if not watch(owner, name, around):
            message = "this SGLang has no %s: loads through its successor are not detected"
            log_once(logger, message, name)


def _loading(name: str, updater: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    is_ours = LOADER in (*args, kwargs.get("load_format"))
    return nullcontext() if is_ours else loading(updater.get_model, name)


def _releasing(model: Any, *_: Any) -> AbstractContextManager[None]:
    return falling_asleep(model, is_lost=not get_exec().features.enable_weights_cpu_backup)


def _resuming(model: Any, *_: Any) -> AbstractContextManager[None]:
    return waking_up(lambda: model)
