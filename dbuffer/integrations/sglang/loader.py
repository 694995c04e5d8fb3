"""`load_from_store`: ``custom_weight_loader`` through which SGLang's processes receive weights.

SGLang calls `load_from_store` on all ranks, between two steps. An error would end the engine, so
`load_from_store` raises none: it writes problems into the engine's record in the store, which the
follower reads.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from dbuffer.engine.contract import RankAnswer
from dbuffer.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.errors import DBufferError, OptionError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.sglang.rank import SchedulerRank
from dbuffer.integrations.sglang.sglang_engine import from_tensors
from dbuffer.integrations.sglang.weight_calls import watch_scheduler
from dbuffer.store.records import RecordFile

logger = logging.getLogger(__name__)


def load_from_store(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Execute a follower's request: follow a store, switch to a version, or stop following.

    ``named_tensors`` encodes the request: SGLang passes only tensors.
    """
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
        # Without a receiver, nothing else would write the record.
        record = RecordFile(Path(options.read_store), options.engine_id or "")
        record.write(token=options.record_token, problem=str(answer))
        record.close()
