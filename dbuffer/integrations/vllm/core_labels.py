"""Let vLLM's engine core tell with each token which weights it came from, and whether it knows.

vLLM's core attaches its label to each step's outputs, and its front ends make spans of tokens from
them. With dbuffer the label that travels is a whole :class:`WeightLabel`; front ends take it apart
again, so that vLLM's own routes and fields show the version alone.

The core drops its label before a call that writes or discards weights without dbuffer. It cannot
tell what other calls do (methods of a worker extension): there the follower's next look drops it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from dbuffer.engine.contract import UNKNOWN_VERSION, WeightLabel
from dbuffer.engine.endpoint import watch
from dbuffer.integrations.vllm.config import CALL, has_backend

KEEPS_WEIGHTS = 1
"""Highest level of sleep after which waking brings the weights back."""
LOADS = ("reload_weights", "reset_weights")
TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
"""Loads too, unless they go through dbuffer's own backend or into a draft model."""
_START_DRAFT = "start_draft_weight_update"

LABEL = "dbuffer_label"
"""Method of the core that returns its label, encoded."""

ADMITTED = "dbuffer_label"
"""Attribute of an output of vLLM: encoded label of the weights of its first token."""

_ENCODED = "dbuffer_encoded_label"
_ATTACHED = "dbuffer_attached_label"
"""Attribute of a core: the encoded label of the weights alone."""
_IS_VOID = "dbuffer_labels_are_void"
"""Attribute of a core: whether what a follower knows of its weights may be of before a load."""


def label_cores(core: Any) -> None:
    """Let cores (``EngineCore``) keep whole labels."""
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
            weight_version = replace(label, newest_run=None, is_attested=False).encode()
        setattr(core, _ATTACHED, weight_version)

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


def watch_core(core: type) -> None:
    """Let vLLM's engine core drop the weight version of a followed engine."""
    watch(core, "sleep", _sleeping)
    watch(core, "collective_rpc", _calling)


def _sleeping(core: Any, level: int = 1, *_: Any, **__: Any) -> AbstractContextManager[None]:
    if level > KEEPS_WEIGHTS:
        _drop_label(core)
    return nullcontext()


def _calling(core: Any, method: Any, *_: Any, **__: Any) -> AbstractContextManager[None]:
    if method == CALL:  # the next label is of a follower that asks the workers now
        core.dbuffer_follows = True
        setattr(core, _IS_VOID, False)
    elif method in LOADS:
        _drop_label(core)
    elif method in (*TRANSFERS, _START_DRAFT):
        _note_transfer(core, method)
    return nullcontext()


def _note_transfer(core: Any, method: str) -> None:
    if method in (TRANSFERS[0], _START_DRAFT):
        core.dbuffer_is_draft = method == _START_DRAFT
    # Through dbuffer's own backend, the weights change in update_weights. The label of the new ones
    # comes with finish_weight_update.
    is_load = method == "update_weights" or not has_backend(core.vllm_config)
    if is_load and not getattr(core, "dbuffer_is_draft", False):
        _drop_label(core)


def _drop_label(core: Any) -> None:
    """Answer as of unknown weights, until a follower that asks the workers anew labels them."""
    if getattr(core, "dbuffer_follows", False) or has_backend(core.vllm_config):
        core.set_weight_version(UNKNOWN_VERSION)
        setattr(core, _IS_VOID, True)


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
