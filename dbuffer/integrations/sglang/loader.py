"""`load_from_store`: the ``custom_weight_loader`` that receives weights in an engine's processes.

SGLang calls it on all ranks, between two steps. It must not raise an error, which would end the
engine. It writes problems into the engine's record in the store instead, which the follower reads.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from dbuffer.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.engine.messages import RankAnswer
from dbuffer.errors import DBufferError, OptionError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.sglang.rank import SchedulerRank
from dbuffer.integrations.sglang.sglang_engine import from_tensors
from dbuffer.integrations.sglang.weight_calls import watch_scheduler
from dbuffer.store.records import RecordFile

logger = logging.getLogger(__name__)


def load_from_store(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Execute a follower's request: start to follow a store, switch to a version, or stop."""
    try:
        request = from_tensors(named_tensors)
    except OptionError:
        logger.exception("a request of the follower cannot be read")
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
        # There is no receiver, so write the record that a receiver would write.
        record = RecordFile(Path(options.read_store), options.engine_id or "")
        record.write(token=options.record_token, problem=str(answer))
        record.close()
