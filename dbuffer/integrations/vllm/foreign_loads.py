"""Notice where vLLM writes or discards weights without dbuffer, in its workers and its core.

A worker tells its :class:`RankEndpoint`, which then knows no version of its weights. The engine
core, which puts the weight version into each answer, drops that version before the call. It cannot
tell what other calls do (methods of a worker extension): there the follower's next look drops it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from dbuffer.integrations.engine.endpoint import RankEndpoint
from dbuffer.integrations.engine.protocol import UNKNOWN_VERSION
from dbuffer.integrations.vllm.config import BACKEND, CALL

_WEIGHTS = "weights"
_KEEPS_WEIGHTS = 1
"""Highest level of sleep after which waking brings the weights back."""

_LOADS = ("reload_weights", "reset_weights")
_TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
"""Loads too, unless they go through dbuffer's own backend or into a draft model."""
_START_DRAFT = "start_draft_weight_update"

_Method = Callable[..., Any]


def watch_workers(wrapper: type) -> None:
    """Let the wrapper around each of vLLM's workers notice what is called; again does nothing."""
    around: dict[str, Callable[[Any, _Method], _Method]] = {
        "sleep": _sleep,
        "wake_up": _wake_up,
        "discard": _discard,
        **dict.fromkeys((*_LOADS, *_TRANSFERS), _load),
    }
    for name, watch in around.items():
        if name not in vars(wrapper):
            setattr(wrapper, name, _watched(name, watch))


def watch_core(core: type) -> None:
    """Let vLLM's engine core drop the weight version of a followed engine; again does nothing."""
    for name, watch in (("sleep", _core_sleep), ("collective_rpc", _core_call)):
        method = getattr(core, name)
        if not hasattr(method, "__wrapped__"):
            setattr(core, name, watch(method))


def _watched(name: str, watch: Callable[[Any, _Method], _Method]) -> _Method:
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(wrapper.worker, name)
        return watch(wrapper.worker, method)(*args, **kwargs)

    call.__name__ = name
    return call


def _endpoint(worker: Any) -> RankEndpoint:
    return RankEndpoint.of(worker.get_model())


def _sleep(worker: Any, sleep: _Method) -> _Method:
    def watched(level: int = 1, **more: Any) -> Any:
        return _asleep(worker, lambda: sleep(level, **more), is_lost=level > _KEEPS_WEIGHTS)

    return watched


def _discard(worker: Any, discard: _Method) -> _Method:
    def watched(tags: Iterable[str]) -> Any:
        if _WEIGHTS not in tags:
            return discard(tags)
        return _asleep(worker, lambda: discard(tags), is_lost=True)

    return watched


def _asleep(worker: Any, call: Callable[[], Any], *, is_lost: bool) -> Any:
    endpoint = _endpoint(worker)
    endpoint.note_asleep(is_lost=is_lost)
    try:
        return call()
    except BaseException:
        endpoint.note_awake()
        raise


def _wake_up(worker: Any, wake_up: _Method) -> _Method:
    def watched(tags: list[str] | None = None) -> Any:
        answer = wake_up(tags)
        if tags is None or _WEIGHTS in tags:
            _endpoint(worker).note_awake()
        return answer

    return watched


def _load(worker: Any, load: _Method) -> _Method:
    name = load.__name__

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        finally:
            is_draft = getattr(worker, "_weight_update_is_draft", False)
            if name in _LOADS or not (is_draft or _has_our_backend(worker.vllm_config)):
                _endpoint(worker).note_foreign_load(name)

    return watched


def _core_sleep(sleep: _Method) -> _Method:
    @functools.wraps(sleep)
    def watched(core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > _KEEPS_WEIGHTS:
            _drop_version(core)
        return sleep(core, level, *args, **kwargs)

    return watched


def _core_call(call: _Method) -> _Method:
    @functools.wraps(call)
    def watched(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == CALL:
            core.dbuffer_follows = True
        elif method in (_TRANSFERS[0], _START_DRAFT):
            core.dbuffer_is_draft = method == _START_DRAFT
        is_transfer = method in _TRANSFERS and not getattr(core, "dbuffer_is_draft", False)
        if method in _LOADS or (is_transfer and not _has_our_backend(core.vllm_config)):
            _drop_version(core)
        return call(core, method, *args, **kwargs)

    return watched


def _drop_version(core: Any) -> None:
    is_followed = getattr(core, "dbuffer_follows", False) or _has_our_backend(core.vllm_config)
    if is_followed and hasattr(core, "set_weight_version"):  # not in vLLM 0.23
        core.set_weight_version(UNKNOWN_VERSION)


def _has_our_backend(vllm_config: Any) -> bool:
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND
