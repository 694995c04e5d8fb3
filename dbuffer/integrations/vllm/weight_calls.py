"""Notice where vLLM writes or discards weights without dbuffer, in its workers and its core.

The engine core, which puts the weight version into each answer, drops that version before the call.
It cannot tell what other calls do (methods of a worker extension): there the follower's next look
drops it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dbuffer.engine.endpoint import falling_asleep, loading, waking_up, watch
from dbuffer.integrations.vllm.config import BACKEND, CALL
from dbuffer.integrations.vllm.core_labels import drop_label, note_follower

_WEIGHTS = "weights"
_KEEPS_WEIGHTS = 1
"""Highest level of sleep after which waking brings the weights back."""

_LOADS = ("reload_weights", "reset_weights")
_TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
"""Loads too, unless they go through dbuffer's own backend or into a draft model."""
_START_DRAFT = "start_draft_weight_update"

_Context = AbstractContextManager[None]


def watch_workers(wrapper: type) -> None:
    """Watch vLLM's workers, through the wrapper around each of them."""
    around: dict[str, Callable[..., _Context]] = {
        "sleep": _sleeping,
        "wake_up": _waking_up,
        "discard": _discarding,
        **{name: functools.partial(_loading, name) for name in (*_LOADS, *_TRANSFERS)},
    }
    for name, context in around.items():
        watch(wrapper, name, context, _method_of_worker(name))


def watch_core(core: type) -> None:
    """Let vLLM's engine core drop the weight version of a followed engine."""
    watch(core, "sleep", _core_sleeping)
    watch(core, "collective_rpc", _core_calling)


def _method_of_worker(name: str) -> Callable[..., Any]:
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapper.worker, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _sleeping(wrapper: Any, level: int = 1, **_: Any) -> _Context:
    return falling_asleep(wrapper.worker.get_model(), is_lost=level > _KEEPS_WEIGHTS)


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

    def is_ours() -> bool:
        is_draft = getattr(worker, "_weight_update_is_draft", False)
        return name not in _LOADS and (is_draft or _has_our_backend(worker.vllm_config))

    return loading(worker.get_model, name, is_ours)


def _core_sleeping(core: Any, level: int = 1, *_: Any, **__: Any) -> _Context:
    if level > _KEEPS_WEIGHTS:
        _drop_version(core)
    return nullcontext()


def _core_calling(core: Any, method: Any, *_: Any, **__: Any) -> _Context:
    if method == CALL:
        core.dbuffer_follows = True
        note_follower(core)
    elif method in (_TRANSFERS[0], _START_DRAFT):
        core.dbuffer_is_draft = method == _START_DRAFT
    is_transfer = method in _TRANSFERS and not getattr(core, "dbuffer_is_draft", False)
    # Through dbuffer's own backend, the weights change in update_weights. The label of the new ones
    # comes with finish_weight_update.
    is_load = method == "update_weights" or not _has_our_backend(core.vllm_config)
    if method in _LOADS or (is_transfer and is_load):
        _drop_version(core)
    return nullcontext()


def _drop_version(core: Any) -> None:
    is_followed = getattr(core, "dbuffer_follows", False) or _has_our_backend(core.vllm_config)
    if is_followed:
        drop_label(core)


def _has_our_backend(vllm_config: Any) -> bool:
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND
