"""Plugin of vLLM: the entry point ``vllm.general_plugins`` calls it in each vLLM process."""

from __future__ import annotations

import logging
from typing import Any

from dbuffer.engine.messages import as_answer, encode_answer
from dbuffer.errors import UnsupportedError
from dbuffer.integrations import interfaces
from dbuffer.integrations.vllm.config import BACKEND, CALL
from dbuffer.runtime.messages import listed
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)


def register() -> None:
    """Register ``backend="dbuffer"``, and add dbuffer's method to workers; idempotent."""
    log_as_vllm()
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
        from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
        from vllm.v1.engine.output_processor import RequestState
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from dbuffer.integrations.vllm.core_labels import label_cores, tell_labels
        from dbuffer.integrations.vllm.core_pauses import hold_cores
        from dbuffer.integrations.vllm.weight_calls import watch_core, watch_workers
    except ImportError as error:
        # An old vLLM, or another's fork: it must start as it would without dbuffer.
        logger.warning("this vLLM takes no weight transfer backend (%s): no dbuffer", str(error))
        return
    moved = interfaces.moved_names("vllm")
    if moved:
        # It starts as it would without dbuffer; engines that are to follow a store are refused.
        logger.warning("this vLLM is newer than dbuffer knows, and moved %s", listed(moved))
    try:
        _register(WeightTransferEngineFactory, "backend", "DBufferWeightTransferEngine")
        _register(WeightTransferTrainerFactory, "trainer", "DBufferTrainerWeightTransferEngine")
    except (AttributeError, TypeError) as error:
        logger.warning("this vLLM registers backends in another way (%s): no dbuffer", str(error))
        return
    # What collective_rpc looks for methods on is the wrapper round a worker. The worker's own class
    # would be the wrong place: vLLM refuses an extension whose names its workers have already.
    setattr(WorkerWrapperBase, CALL, _call_the_extension)
    if moved:
        return
    if interfaces.is_newer("vllm"):
        known = interfaces.Record.of("vllm").tested[1]
        log_once(logger, "this vLLM is newer than %s; what dbuffer uses of it is unchanged", known)
    watch_workers(WorkerWrapperBase)
    watch_core(EngineCore)
    hold_cores(EngineCoreProc, DPEngineCoreProc)
    label_cores(EngineCore)
    tell_labels(RequestState)


def log_as_vllm() -> None:
    """Give dbuffer's log vLLM's format and level, unless it is configured already."""
    ours, theirs = logging.getLogger("dbuffer"), logging.getLogger("vllm")
    is_configured = ours.handlers or ours.level or logging.getLogger().handlers
    if is_configured or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    # As vLLM's own: a handler that is added to the root later must not log all of it twice.
    ours.propagate = False


class _Refusal:
    """Stands for both halves of the backend in a vLLM whose interface moved."""

    def __init__(self, *_: Any, **__: Any) -> None:
        interfaces.require("vllm")

    @classmethod
    def trainer_init(cls, *_: Any, **__: Any) -> None:
        interfaces.require("vllm")


def _register(factory: Any, module: str, name: str) -> None:
    try:
        if interfaces.moved_names("vllm"):
            factory.register_engine(BACKEND, _Refusal)
        else:
            factory.register_engine(BACKEND, f"dbuffer.integrations.vllm.{module}", name)
    except ValueError:
        logger.debug("vLLM knows the backend %r already", BACKEND)


def _call_the_extension(wrapper: Any, request: dict[str, Any]) -> Any:
    try:
        interfaces.require("vllm")
    except UnsupportedError as error:
        return encode_answer(as_answer(error))
    from dbuffer.integrations.vllm.rank import WorkerExtension

    # An extension of the engine's own comes first: it may have more to do.
    own = getattr(wrapper.worker, CALL, None)
    return WorkerExtension.dbuffer_call(wrapper.worker, request) if own is None else own(request)
