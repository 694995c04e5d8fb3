"""Plugin for vLLM. vLLM calls `register` in each of its processes.

In workers, dbuffer must notice each call that writes or discards weights without dbuffer. It also
records the worker that is loading its models: the worker has the draft model of speculative
decoding, but vLLM does not pass the worker to a weight transfer backend.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from dbuffer.engine.contract import WEIGHTS
from dbuffer.engine.endpoint import falling_asleep, loading, waking_up, watch
from dbuffer.integrations.vllm.config import (
    BACKEND,
    CALL,
    LOAD_ADAPTER,
    LOADING_WORKER,
    has_backend,
)
from dbuffer.integrations.vllm.core import (
    KEEPS_WEIGHTS,
    RELOADS,
    TRANSFERS,
    add_pauses,
    label_cores,
    tell_labels,
)
from dbuffer.runtime.messages import described
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

NEWEST = (0, 33)

_PARTS = (WEIGHTS, "kv_cache")
"""vLLM's tags of the memory that sleeps."""

_Context = AbstractContextManager[None]


def register() -> None:
    """Register ``backend="dbuffer"``, and add dbuffer's methods to vLLM's classes. Idempotent."""
    log_as_vllm()
    try:
        _extend()
    except (ImportError, AttributeError, TypeError) as error:
        # This vLLM is old, a fork, or a release that has renamed a function of vLLM. vLLM must
        # still start, but has no backend "dbuffer".
        logger.warning("dbuffer does not work with this vLLM (%s)", str(error))
        return
    import vllm

    release = tuple(int(number) for number in re.findall(r"\d+", vllm.__version__)[:2])
    if release > NEWEST:
        tested = ".".join(map(str, NEWEST))
        log_once(logger, "this vLLM is newer than %s, which dbuffer was tested with", tested)


def _extend() -> None:
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if CALL in vars(WorkerWrapperBase):
        return  # vLLM calls plugins several times in a process
    watch_workers(WorkerWrapperBase)
    label_cores(EngineCore)
    add_pauses(EngineCoreProc, DPEngineCoreProc)
    tell_labels(RequestState)
    for factory, module, name in (
        (WeightTransferEngineFactory, "backend", "DBufferWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "DBufferTrainerWeightTransferEngine"),
    ):
        factory.register_engine(BACKEND, f"dbuffer.integrations.vllm.{module}", name)
    # Add the methods to the wrapper around a worker, where collective_rpc finds them too. If the
    # worker's class had a method, vLLM would refuse worker extensions with the same method.
    setattr(WorkerWrapperBase, CALL, _answer_follower)
    setattr(WorkerWrapperBase, LOAD_ADAPTER, _load_adapter)


def log_as_vllm() -> None:
    """Log dbuffer's messages through vLLM's handlers, unless logging is already configured."""
    log, log_of_vllm = logging.getLogger("dbuffer"), logging.getLogger("vllm")
    is_configured = log.handlers or log.level or logging.getLogger().handlers
    if is_configured or not log_of_vllm.handlers:
        return
    for handler in log_of_vllm.handlers:
        log.addHandler(handler)
    log.setLevel(log_of_vllm.level)
    # The root logger may get a handler later, which must not log each line a second time.
    log.propagate = False


@contextlib.contextmanager
def loading_models(wrapper: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Record which worker is loading its models inside the ``with`` block.

    ``wrapper`` is vLLM's ``WorkerWrapperBase``, which contains the worker.
    """
    token = LOADING_WORKER.set(wrapper.worker)
    try:
        yield
    finally:
        LOADING_WORKER.reset(token)


def watch_workers(wrapper: type) -> None:
    """Wrap the methods that load, write or discard weights, so that dbuffer notices each call.

    ``wrapper`` is vLLM's ``WorkerWrapperBase``, the class around a worker.
    """
    around: dict[str, Callable[..., _Context]] = {
        "load_model": loading_models,
        "sleep": _sleeping,
        "wake_up": _waking_up,
        "discard": _discarding,
        **{name: partial(_noting_load, name) for name in (*RELOADS, *TRANSFERS)},
    }
    for name, context in around.items():
        watch(wrapper, name, context, _method_of_worker(name))


def _method_of_worker(name: str) -> Callable[..., Any]:
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapper.worker, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _sleeping(wrapper: Any, level: int = 1, **_: Any) -> _Context:
    return falling_asleep(wrapper.worker.get_model(), _PARTS, is_lost=level > KEEPS_WEIGHTS)


def _discarding(wrapper: Any, tags: Collection[str]) -> _Context:
    return falling_asleep(wrapper.worker.get_model(), tags, is_lost=WEIGHTS in tags)


def _waking_up(wrapper: Any, tags: Collection[str] | None = None) -> _Context:
    return waking_up(wrapper.worker.get_model, tags)


def _noting_load(name: str, wrapper: Any, *_: Any, **__: Any) -> _Context:
    worker = wrapper.worker
    is_ours = name in TRANSFERS and has_backend(worker.vllm_config)
    return nullcontext() if is_ours else loading(worker.get_model, name)


def _load_adapter(wrapper: Any, name: str, number: int, path: str) -> str | None:
    """Load a LoRA adapter in a worker; return an error message if the worker cannot load it.

    A worker must not raise the error: vLLM's executor would then leave the replies of later ranks
    unread, and take them for replies to its next call.
    """
    from vllm.lora.request import LoRARequest

    try:
        wrapper.worker.add_lora(LoRARequest(name, number, path))
    except Exception as error:  # noqa: BLE001 - vLLM's loaders raise errors of any class
        return described(error)
    return None


def _answer_follower(wrapper: Any, request: dict[str, Any]) -> Any:
    from dbuffer.integrations.vllm.rank import answer_follower

    return answer_follower(wrapper.worker, request)
