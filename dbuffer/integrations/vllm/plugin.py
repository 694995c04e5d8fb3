"""Plugin for vLLM. vLLM calls `register` in each of its processes."""

from __future__ import annotations

import contextlib
import logging
import re
from functools import partial
from typing import Any

from dbuffer.integrations.vllm.config import BACKEND, CALL, LOAD_ADAPTER
from dbuffer.runtime.messages import described
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

NEWEST = (0, 33)


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

    from dbuffer.integrations.vllm.core import add_pauses, label_cores, tell_labels
    from dbuffer.integrations.vllm.workers import watch_workers

    watch_workers(WorkerWrapperBase)
    label_cores(EngineCore)
    add_pauses(EngineCoreProc, DPEngineCoreProc)
    tell_labels(RequestState)
    for factory, module, name in (
        (WeightTransferEngineFactory, "backend", "DBufferWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "DBufferTrainerWeightTransferEngine"),
    ):
        with contextlib.suppress(ValueError):  # the backend is already registered
            factory.register_engine(BACKEND, f"dbuffer.integrations.vllm.{module}", name)
    # Add the methods to the wrapper around a worker, where collective_rpc finds them too. If the
    # worker's class had a method, vLLM would refuse worker extensions with the same method.
    setattr(WorkerWrapperBase, CALL, _call_the_extension)
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


def _call_the_extension(wrapper: Any, request: dict[str, Any]) -> Any:
    from dbuffer.integrations.vllm.rank import WorkerExtension

    # Called through the worker, because a worker extension can override the method.
    worker = wrapper.worker
    call = getattr(worker, CALL, None) or partial(WorkerExtension.dbuffer_call, worker)
    return call(request)
