"""`WorkerExtension`: the methods by which vLLM's workers are reached, over ``collective_rpc``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbuffer.integrations.engine.endpoint import RankEndpoint, answer_of
from dbuffer.integrations.engine.messages import (
    BeginRequest,
    CheckRequest,
    EndRequest,
    RankAnswer,
    RankOutcome,
    RankRequest,
    decode_request,
    encode_answer,
    specs_of,
)
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest
from dbuffer.integrations.vllm.rank import WorkerRank, WorkerRanks


class WorkerExtension:
    """Methods for ``collective_rpc``, on all ranks; vLLM adds them to its worker.

    Start the engine with ``worker_extension_cls="dbuffer.integrations.vllm.WorkerExtension"``.
    Where dbuffer is installed beside vLLM, its plugin adds them without that. A follower uses
    `dbuffer_call` alone; the others are for whoever switches an engine by hand, and raise.
    """

    def dbuffer_call(self: Any, request: dict[str, Any]) -> dict[str, str]:
        """Do what a follower asks for; see :mod:`dbuffer.integrations.engine.messages`."""
        # Nothing may be raised here: vLLM would read the other ranks' answers one call late.
        return encode_answer(answer_of(lambda: _answer(self, decode_request(request))))

    def dbuffer_init(self: Any, init_info: dict[str, Any]) -> None:
        """Begin to follow a store.

        Args:
            init_info: see :class:`EngineOptions`.

        Raises:
            OptionError: (a ``ValueError``) a value is invalid.
            EngineUnsupportedError, EngineUpdateError: the engine cannot follow this store.
        """
        _do(self, lambda: BeginRequest(options=EngineOptions.parse(init_info)))

    def dbuffer_update(self: Any, update_info: dict[str, Any] | None = None) -> None:
        """Switch to a version. Nothing may be generating.

        Args:
            update_info: see :class:`UpdateRequest`. None: the newest.

        Raises:
            EngineUpdateError, EngineBrokenError: see :meth:`RankReceiver.update`.
        """
        _do(self, lambda: UpdateRequest.parse(update_info or {}))

    def dbuffer_check(self: Any, tensors: list[tuple[str, str, list[int]]]) -> str | None:
        """Why such tensors do not fit; None if they do. Nothing is touched.

        Args:
            tensors: name, dtype (``"bfloat16"``) and shape of each.
        """
        return _do(self, lambda: CheckRequest(tensors=specs_of(tensors))).problem or None

    def dbuffer_shutdown(self: Any) -> None:
        """Stop following. The model keeps its weights; to follow again, call dbuffer_init."""
        _do(self, EndRequest)


def _answer(worker: Any, request: RankRequest) -> RankAnswer:
    endpoint = RankEndpoint.of(worker.get_model())
    answer = endpoint.answer(request, lambda: WorkerRank.of(worker))
    if isinstance(request, UpdateRequest) and answer.outcome is RankOutcome.DONE:
        worker.model_runner.reset_lora_state()
    return answer


def _do(worker: Any, make_request: Callable[[], RankRequest]) -> RankAnswer:
    """Do it, and raise on one rank what went wrong on all."""
    answer = RankAnswer()
    with WorkerRanks(worker.vllm_config).raising_once():
        answer = _answer(worker, make_request())
        answer.require_done()
    return answer
