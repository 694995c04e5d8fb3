"""Answers of pooling models: each is of one version, or an error.

They have no tokens that could tell several versions. vLLM keeps the rows of a preempted request,
and adds all rows to them again; and its engine ends if a document's query was dropped, or if a
pooling request is aborted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

ENDED = (
    "this request was ended before it was answered, as by a switch to other weights: send it again"
)
"""Message of the error of a request that is answered with :func:`_no_answer`."""

_ATTR = "dbuffer_mends"


def mend_workers() -> None:
    """Let vLLM's workers answer with rows of one version, or with none."""
    from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
    from vllm.v1.worker.gpu_input_batch import InputBatch

    _replace(InputBatch, "add_request", _forgetting_rows)
    _replace(LateInteractionRunner, "postprocess_pooler_output", _without_orphans)


def mend_core(process: type) -> None:
    """Let a core (``EngineCoreProc``) abort requests of pooling models without harm."""
    _replace(process, "_send_abort_outputs_to_client", _aborting_pooled)


def tell_ended(request_state: type) -> None:
    """Let a front end's outputs (of ``RequestState``) have an error if they have no answer."""
    _replace(request_state, "_new_request_output", _telling_ended)


def _replace(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap a method of a class, once, if the class has it."""
    method = getattr(owner, name, None)
    if method is not None and not hasattr(method, _ATTR):
        wrapped = functools.wraps(method)(wrap(method))
        setattr(wrapped, _ATTR, True)
        setattr(owner, name, wrapped)


def _no_answer() -> torch.Tensor:
    """Return the output of a request that was ended."""
    return torch.empty(0)


def _is_no_answer(output: torch.Tensor | None) -> bool:
    return output is not None and output.shape == (0,)  # rows of a real one have a width


def _forgetting_rows(add_request: Any) -> Any:
    def add_to_batch(batch: Any, request: Any) -> Any:
        # Preempted, as every request is by a switch: its first token is computed again.
        if request.num_computed_tokens == 0 and request.pooling_params is not None:
            request.pooling_states.clean()
        return add_request(batch, request)

    return add_to_batch


def _without_orphans(postprocess: Any) -> Any:
    """Answer documents whose query a switch has dropped with no element."""

    def postprocess_pooler_output(
        runner: Any,
        raw_pooler_output: Any,
        pooling_params: list[Any],
        req_ids: list[str],
        finished_mask: list[bool],
    ) -> Any:
        late = [params.late_interaction_params for params in pooling_params]
        queries = {*runner._query_cache, *_keys(late, "cache_query")}  # noqa: SLF001
        orphans = [
            index
            for index, (one, is_finished) in enumerate(zip(late, finished_mask, strict=True))
            if is_finished and not queries.issuperset(_keys([one], "score_doc"))
        ]
        if orphans:
            raw_pooler_output = list(raw_pooler_output)
        for index in orphans:
            raw_pooler_output[index] = None  # which is passed over
        outputs = postprocess(runner, raw_pooler_output, pooling_params, req_ids, finished_mask)
        for index in orphans:
            outputs[index] = _no_answer()
        return outputs

    return postprocess_pooler_output


def _keys(late: list[Any], mode: str) -> list[Any]:
    """List the keys of the queries that requests of one mode (vLLM's) store or score by."""
    return [one.query_key for one in late if one is not None and one.mode == mode]


def _aborting_pooled(send: Any) -> Any:
    def send_abort_outputs(core: Any, req_ids: list[str], client_index: int) -> None:
        if core.vllm_config.model_config.runner_type != "pooling":
            send(core, req_ids, client_index)
            return
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        # Without a pooling output, the front end takes them for requests that generate, and ends.
        outputs = [
            EngineCoreOutput(one, [], pooling_output=_no_answer(), finish_reason=FinishReason.ABORT)
            for one in req_ids
        ]
        told = EngineCoreOutputs(finished_requests=set(req_ids), outputs=outputs)
        core.output_queue.put_nowait((client_index, told))

    return send_abort_outputs


def _telling_ended(make_output: Any) -> Any:
    def make_request_output(
        state: Any, request_id: str, outputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        made = make_output(state, request_id, outputs, *args, **kwargs)
        if _is_no_answer(getattr(outputs[0], "data", None)) and _has_room_for_an_error(made):
            from vllm.outputs import RequestError

            made.error = RequestError("ended", ENDED, retryable=True)
        return made

    return make_request_output


def _has_room_for_an_error(output: Any) -> bool:
    """Whether an output has the field (vLLM 0.32), and no error in it."""
    return getattr(output, "error", ENDED) is None
