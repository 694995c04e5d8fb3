"""`load_from_store`: the ``custom_weight_loader`` that receives in each of an engine's processes.

SGLang calls it on all ranks, between two steps. It must not raise: that would end the process, and
with it the engine. What went wrong stands in the engine's record in the store, where who gave the
command reads it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from dbuffer.errors import EngineUnsupportedError
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest
from dbuffer.integrations.engine.rank_receiver import RankReceiver, start_on_all_ranks
from dbuffer.integrations.sglang.commands import Command
from dbuffer.integrations.sglang.rank import SchedulerRank
from dbuffer.records import RecordFile

logger = logging.getLogger(__name__)

_FOLLOWING = "_dbuffer_receiver"
_LAST = "_dbuffer_last_receiver"


def load_from_store(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Do what a follower asks for: begin to follow a store, switch to a version, or stop.

    Args:
        model: SGLang's, of this rank.
        named_tensors: one :class:`~dbuffer.integrations.sglang.commands.Command`.
    """
    command = Command.parse(named_tensors)
    try:
        if command.method == "dbuffer_init":
            _begin(model, command)
        elif command.method == "dbuffer_update":
            _update(model, command)
        elif command.method == "dbuffer_shutdown":
            _end(model)
    # SGLang would end the engine; the ranks have agreed on what it serves, or refuse to.
    except Exception as error:
        logger.exception("%s failed", command.method)
        _leave_word(model, command, error)


def _begin(model: Any, command: Command) -> None:
    # One that was shut down still knows what the model has.
    before = getattr(model, _FOLLOWING, None) or getattr(model, _LAST, None)
    setattr(model, _FOLLOWING, None)
    rank = SchedulerRank(model, command.engine_id, command.names)
    options = EngineOptions.parse(command.arguments["init_info"])
    setattr(model, _FOLLOWING, start_on_all_ranks(rank, options, before))


def _update(model: Any, command: Command) -> None:
    receiver: RankReceiver | None = getattr(model, _FOLLOWING, None)
    if receiver is None:
        raise EngineUnsupportedError("this engine follows no store yet")
    receiver.update(UpdateRequest.parse_or_error(command.arguments["update_info"]))


def _end(model: Any) -> None:
    receiver = getattr(model, _FOLLOWING, None)
    if receiver is not None:
        receiver.close()
        setattr(model, _LAST, receiver)
        setattr(model, _FOLLOWING, None)


def _leave_word(model: Any, command: Command, error: Exception) -> None:
    receiver = getattr(model, _FOLLOWING, None)
    if receiver is not None:
        receiver.record_problem(str(error))
    elif SchedulerRank.is_first() and "init_info" in command.arguments:
        options = EngineOptions.parse(command.arguments["init_info"])
        record = RecordFile(Path(options.read_store), command.engine_id)
        record.write(problem=f"{type(error).__name__}: {error}")
