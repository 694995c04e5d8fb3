"""Detection of calls that write or discard weights in vLLM's workers without dbuffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dbuffer.engine.endpoint import falling_asleep, loading, waking_up, watch
from dbuffer.integrations.vllm.config import has_backend
from dbuffer.integrations.vllm.core_labels import KEEPS_WEIGHTS, RELOADS, TRANSFERS
from dbuffer.integrations.vllm.drafts import loading_models

_WEIGHTS = "weights"

_Context = AbstractContextManager[None]


def watch_workers(wrapper: type) -> None:
    """Watch the methods of ``wrapper`` that load, write or discard weights.

    ``wrapper`` is vLLM's ``WorkerWrapperBase``, the class around a worker.
    """
    around: dict[str, Callable[..., _Context]] = {
        "load_model": loading_models,
        "sleep": _sleeping,
        "wake_up": _waking_up,
        "discard": _discarding,
        **{name: functools.partial(_loading, name) for name in (*RELOADS, *TRANSFERS)},
    }
    for name, context in around.items():
        watch(wrapper, name, context, _method_of_worker(name))


def _method_of_worker(name: str) -> Callable[..., Any]:
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapper.worker, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _sleeping(wrapper: Any, level: int = 1, **_: Any) -> _Context:
    return falling_asleep(wrapper.worker.get_model(), is_lost=level > KEEPS_WEIGHTS)


def _discarding(wrapper: Any, tags: Iterable[str]) -> _Context:
    if _WEIGHTS not in tags:
        return nullcontext()
    return falling_asleep(wrapper.worker.get_model(), is_lost=True)


def _waking_up(wrapper: Any, tags: list[str] | None = None) -> _Context:
    if tags is not None and _WEIGHTS not in tags:
        return nullcontext()
    return waking_up(wrapper.worker.get_model)


def _loading(name: str, wrapper: Any, *_: Any, **__: Any) -> _Context:
    worker = wrapper.worker
    is_ours = name in TRANSFERS and has_backend(worker.vllm_config)
    return nullcontext() if is_ours else loading(worker.get_model, name)
