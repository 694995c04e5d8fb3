"""`WorkerExtension`: the method by which vLLM's workers are reached, over ``collective_rpc``."""

from __future__ import annotations

from typing import Any

from dbuffer.integrations.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.integrations.engine.messages import RankAnswer, RankRequest, encode_answer
from dbuffer.integrations.vllm.rank import WorkerRank


class WorkerExtension:
    """A method for ``collective_rpc``, on all ranks; vLLM adds it to its worker.

    Start the engine with ``worker_extension_cls="dbuffer.integrations.vllm.WorkerExtension"``.
    Where dbuffer is installed beside vLLM, its plugin adds it without that.
    """

    def dbuffer_call(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a follower asks for; see :mod:`dbuffer.integrations.engine.messages`."""
        # Nothing may be raised here: vLLM would read the other ranks' answers one call late.
        return encode_answer(capture_answer(lambda: _do(self, RankRequest.parse(request))))


def _do(worker: Any, request: RankRequest) -> RankAnswer:
    model = worker.get_model()
    answer = RankEndpoint.of(model).do(
        request, lambda: WorkerRank(worker.vllm_config, model, worker.device)
    )
    if request.call == "update":
        worker.model_runner.reset_lora_state()
    return answer
