"""`load_from_store`: ``custom_weight_loader`` through which SGLang's processes receive weights.

SGLang calls `load_from_store` on all ranks, between two steps. An error would end the engine, so
`load_from_store` raises none: it writes problems into the engine's record in the store, which the
follower reads.

The first call of `load_from_store` also wraps functions of SGLang, to detect calls that write or
discard weights without dbuffer. A scheduler calls its methods through a table that it fills at its
start, so wrapping those methods later has no effect. dbuffer wraps functions that they call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.scheduler_components import weight_updater as scheduler
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_exec, get_parallel

from dbuffer.engine.contract import WEIGHTS, RankAnswer
from dbuffer.engine.endpoint import (
    RankEndpoint,
    capture_answer,
    falling_asleep,
    loading,
    waking_up,
    watch,
)
from dbuffer.errors import DBufferError, OptionError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.sglang.rank import SchedulerRank
from dbuffer.integrations.sglang.sglang_engine import LOADER, from_tensors
from dbuffer.runtime.trouble import log_once
from dbuffer.store.records import RecordFile

logger = logging.getLogger(__name__)

_LOADS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)


def load_from_store(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Execute a follower's request: follow a store, switch to a version, or stop following.

    ``named_tensors`` encodes the request: SGLang passes only tensors.
    """
    try:
        request = from_tensors(named_tensors)
    except OptionError:
        logger.exception("cannot decode a follower's request")
        return
    if request is None:
        return
    endpoint = RankEndpoint.of(model)

    def answer_request() -> RankAnswer:
        watch_scheduler()
        return endpoint.do(request, lambda: SchedulerRank(model))

    answer = capture_answer(answer_request)
    if isinstance(answer, ReceiverRecord):
        endpoint.following().acknowledge()  # the follower reads the outcome from the store
    if not isinstance(answer, DBufferError):
        return
    logger.error("%s: %s", request.call, answer)
    if endpoint.receiver is not None:
        endpoint.receiver.record_problem(str(answer))
    elif (options := request.options) and get_parallel().tp_group.rank_in_group == 0:
        # This rank follows no store, so no receiver writes the engine's record. The first rank
        # writes the problem into the record, where the follower reads it.
        record = RecordFile(Path(options.read_store), options.engine_id or "")
        record.write(token=options.record_token, problem=str(answer))
        record.close()


def watch_scheduler() -> None:
    """Wrap SGLang's functions that write or discard weights, so that dbuffer notices each call.

    If the functions are wrapped already, do nothing.
    """
    functions: list[tuple[Any, str, Callable[..., AbstractContextManager[None]]]] = [
        *((WeightUpdater, name, functools.partial(_loading, name)) for name in _LOADS),
        # SGLang calls the first function before it releases the memory of weights, and the second
        # after it has restored this memory.
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
    is_lost = not get_exec().features.enable_weights_cpu_backup
    return falling_asleep(model, (WEIGHTS,), is_lost=is_lost)


def _resuming(model: Any, *_: Any) -> AbstractContextManager[None]:
    return waking_up(lambda: model, (WEIGHTS,))
