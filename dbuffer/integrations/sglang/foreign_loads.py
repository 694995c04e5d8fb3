"""Notice where SGLang writes or discards weights without dbuffer, in its scheduler processes.

What SGLang calls through its dispatch table cannot be watched any more once the engine serves; so
these are the functions that those calls look up. The weight version is kept in another process: a
follower drops it at its next look.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler_components import weight_updater as scheduler
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_exec

from dbuffer.integrations.engine.endpoint import RankEndpoint
from dbuffer.integrations.sglang.sglang_engine import LOADER

logger = logging.getLogger(__name__)

_LOADS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
_RELEASES, _RESUMES = "_export_static_state", "_import_static_state"
"""Called with the model just before its weights' memory is released, and after it is resumed."""

_Function = Callable[..., Any]


def watch() -> None:
    """Watch the engine of this process; again does nothing."""
    around: dict[tuple[Any, str], Callable[[_Function], _Function]] = {
        **{(WeightUpdater, name): _load for name in _LOADS},
        (scheduler, _RELEASES): _release,
        (scheduler, _RESUMES): _resume,
    }
    for (owner, name), watched in around.items():
        function = getattr(owner, name, None)
        if function is None:
            _warn_of_missing(name)
        elif not hasattr(function, "__wrapped__"):
            setattr(owner, name, watched(function))


@functools.cache
def _warn_of_missing(name: str) -> None:
    logger.warning("this SGLang has no %s: loads through its successor are not noticed", name)


def _load(function: _Function) -> _Function:
    @functools.wraps(function)
    def watched(updater: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(updater, *args, **kwargs)
        finally:
            if LOADER not in (*args, kwargs.get("load_format")):
                RankEndpoint.of(updater.get_model()).note_foreign_load(function.__name__)

    return watched


def _release(function: _Function) -> _Function:
    @functools.wraps(function)
    def watched(model: Any, *args: Any) -> Any:
        is_kept = get_exec().features.enable_weights_cpu_backup
        RankEndpoint.of(model).note_asleep(is_lost=not is_kept)
        return function(model, *args)

    return watched


def _resume(function: _Function) -> _Function:
    @functools.wraps(function)
    def watched(model: Any, *args: Any) -> Any:
        answer = function(model, *args)
        RankEndpoint.of(model).note_awake()
        return answer

    return watched
