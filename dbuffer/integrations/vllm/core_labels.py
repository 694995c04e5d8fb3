"""Let vLLM's engine core tell with each token which weights it came from, and admit by them.

vLLM's core attaches its label to each step's outputs, and its front ends make spans of tokens from
them. With dbuffer the label that travels is a whole :class:`WeightLabel`; front ends take it apart
again, so that vLLM's own routes and fields show the version alone.

Requests and switches meet in the core's queue, so a requirement that is compared there, when a
request comes and whenever the label changes, holds for each token that the request gets.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dbuffer.engine.weight_label import UNKNOWN_VERSION, WeightLabel
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.admission import Admission
from dbuffer.integrations.vllm.config import BACKEND
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

LABEL = "dbuffer_label"
"""Method of the core that returns its label, encoded."""

STOP_REASON = "weight_version"
"""``stop_reason`` of a request that was ended because of the weights."""

ADMITTED = "dbuffer_label"
"""Attribute of an output of vLLM: encoded label of the weights of its first token."""

_ENCODED = "dbuffer_encoded_label"
_ATTACHED = "dbuffer_attached_label"
"""Attribute of a core: the encoded label of the weights alone."""
_IS_VOID = "dbuffer_labels_are_void"
"""Attribute of a core: whether what a follower knows of its weights may be of before a load."""


def as_core_takes(label: WeightLabel) -> str:
    """Return a label for the core of an engine that this process, or one of its children, runs."""
    from vllm.v1.engine.core import EngineCore

    # An engine's processes load the plugins that this one has.
    return label.encode() if hasattr(EngineCore, LABEL) else label.version


def extra_args_with(extra_args: dict[str, Any] | None, admission: Admission) -> dict[str, Any]:
    """Return sampling parameters' ``extra_args`` that carry a requirement to the core."""
    return {**(extra_args or {}), BACKEND: admission.as_json()}


def label_cores(core: Any, process: Any) -> None:
    """Let cores (``EngineCore``, ``EngineCoreProc``) keep whole labels, and admit by them."""
    if hasattr(core, LABEL):
        return
    set_version, attach = core.set_weight_version, getattr(core, "_attach_weight_version", None)

    def set_weight_version(core: Any, weight_version: str) -> None:
        label = WeightLabel.decode(weight_version)
        if label.run is not None and getattr(core, _IS_VOID, False):
            label, weight_version = WeightLabel(), UNKNOWN_VERSION
        set_version(core, label.version)
        setattr(core, _ENCODED, weight_version)
        if label.newest_run is not None or label.is_attested:
            # Requests in flight keep their weights in both cases.
            label = replace(label, newest_run=None, is_attested=False)
            weight_version = label.encode()
        setattr(core, _ATTACHED, weight_version)
        _end_unmet(core, label)

    def get_label(core: Any) -> str:
        return str(getattr(core, _ENCODED, core.get_weight_version()))

    def attach_label(core: Any, outputs: dict[int, Any]) -> None:
        encoded = getattr(core, _ATTACHED, core.get_weight_version())
        for output in outputs.values():
            output.weight_version = encoded

    core.set_weight_version = set_weight_version
    setattr(core, LABEL, get_label)
    if attach is not None:
        core._attach_weight_version = attach_label  # noqa: SLF001
    process.add_request = _admitting(process.add_request)


def drop_label(core: Any) -> None:
    """Answer as of unknown weights, until a follower that asks the workers anew labels them."""
    core.set_weight_version(UNKNOWN_VERSION)
    setattr(core, _IS_VOID, True)


def note_follower(core: Any) -> None:
    """Believe the next label: it is of a follower that asks the workers now."""
    setattr(core, _IS_VOID, False)


def tell_labels(request_state: Any) -> None:
    """Let a front end's outputs (of ``RequestState``) tell the weights of their tokens."""
    if not hasattr(request_state, "track_weight_version"):  # before vLLM 0.32
        return
    make_output = request_state._new_completion_output  # noqa: SLF001
    if hasattr(make_output, ADMITTED):
        return

    def make_labeled_output(state: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_output(state, *args, **kwargs)
        if state.weight_version_starts:
            setattr(output, ADMITTED, state.weight_version_starts[0][0])
        for span in output.weight_versions or ():
            label = WeightLabel.decode(span.version)
            span.version = label.version
            span.run, span.metadata = label.run, label.metadata
        return output

    setattr(make_labeled_output, ADMITTED, True)
    request_state._new_completion_output = make_labeled_output  # noqa: SLF001


def _admitting(add_request: Callable[..., None]) -> Callable[..., None]:
    def add_admitted_request(core: Any, request: Any, request_wave: int = 0) -> None:
        has_requirement = _requirement_of(request) is not None  # most have none
        if has_requirement and _is_refused(request, WeightLabel.decode(getattr(core, LABEL)())):
            _tell_ended(core, [request])
        else:
            add_request(core, request, request_wave)

    return add_admitted_request


def _requirement_of(request: Any) -> object:
    """Return what a request carries as its requirement, from whomever; None: nothing."""
    parameters = request.sampling_params
    return ((parameters and parameters.extra_args) or {}).get(BACKEND)


def _is_refused(request: Any, label: WeightLabel) -> bool:
    """Whether a request does not take the weights of this label."""
    requirement = _requirement_of(request)
    if requirement is None:
        return False
    try:
        admission = Admission.of_json(requirement)
    except OptionError as error:
        # From a client: an error raised here would end the engine.
        log_once(logger, "requests with invalid extra_args[%r] are ended", BACKEND)
        logger.debug("request %s: %s", request.request_id, str(error))
        return True
    return admission is not None and admission.refusal(label) is not None


def _end_unmet(core: Any, label: WeightLabel) -> None:
    """End requests that do not take these weights, before a token is computed with them."""
    if not hasattr(core, "output_queue"):  # in the caller's own process, where nobody asks so
        return
    unmet = [one for one in core.scheduler.requests.values() if _is_refused(one, label)]
    if unmet:
        from vllm.v1.request import RequestStatus

        ids = [request.request_id for request in unmet]
        core.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        _tell_ended(core, unmet)


def _tell_ended(core: Any, requests: Iterable[Any]) -> None:
    """Tell the front ends that these requests have ended because of the weights."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    by_client = defaultdict(list)
    for request in requests:
        by_client[request.client_index].append(request.request_id)
    for client, ids in by_client.items():
        outputs = [
            EngineCoreOutput(one, [], finish_reason=FinishReason.ABORT, stop_reason=STOP_REASON)
            for one in ids
        ]
        told = EngineCoreOutputs(outputs=outputs, finished_requests=set(ids))
        core.output_queue.put_nowait((client, told))
