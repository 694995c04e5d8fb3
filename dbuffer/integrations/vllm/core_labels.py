"""Let vLLM's engine core tell with each token which weights it came from, and whether it knows.

vLLM's core attaches its label to each step's outputs, and its front ends make spans of tokens from
them. With dbuffer the label that travels is a whole :class:`WeightLabel`. Front ends take it apart
again, so that vLLM's own routes and fields show the version alone.

The core drops its label before a call that writes or discards weights without dbuffer. It cannot
tell what other calls do (methods of a worker extension): there the follower's next look drops it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dbuffer.engine.contract import UNKNOWN_VERSION, WeightLabel
from dbuffer.engine.endpoint import watch
from dbuffer.integrations.vllm.config import CALL, has_backend

KEEPS_WEIGHTS = 1
"""Highest level of sleep after which waking brings the weights back."""
RELOADS = ("reload_weights", "reset_weights")
TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
"""Calls of a weight transfer, which may be dbuffer's."""
_WRITES = {True: (*RELOADS, "update_weights"), False: (*RELOADS, *TRANSFERS)}
"""Calls that write weights, by whether the transfer is dbuffer's: the label of the weights that
it wrote comes with ``finish_weight_update``."""

LABEL = "dbuffer_label"
"""Method of the core that returns its label, encoded."""
READY = "dbuffer_ready"
"""Method of the core that returns whether its first API server has called it with True."""

ADMITTED = "dbuffer_label"
"""Attribute of an output of vLLM: encoded label of the weights of its first token."""


@dataclass(slots=True)
class _CoreState:
    """Label of a core's weights, and state of its followers."""

    label: str | None = None
    """Encoded label, if one was set."""
    label_of_outputs: str | None = None
    """Encoded label of the weights alone: requests in flight keep theirs when the rest changes."""
    is_followed: bool = False
    is_void: bool = False
    """Whether a label that a follower sets may be of weights before a load."""
    is_ready: bool = False


def _state_of(core: Any) -> _CoreState:
    state: _CoreState = vars(core).setdefault("dbuffer_state", _CoreState())
    return state


def label_cores(core: Any) -> None:
    """Let cores (``EngineCore``) keep whole labels, and drop them before other loads."""
    if hasattr(core, LABEL):
        return
    set_version = core.set_weight_version

    def set_weight_version(core: Any, weight_version: str) -> None:
        state, label = _state_of(core), WeightLabel.decode(weight_version)
        if label.run is not None and state.is_void:
            label = WeightLabel()
        set_version(core, label.version)
        state.label = label.encode()
        state.label_of_outputs = replace(label, newest_run=None, is_attested=False).encode()

    def get_label(core: Any) -> str:
        return str(_state_of(core).label or core.get_weight_version())

    def attach_label(core: Any, outputs: dict[int, Any]) -> None:
        label = _state_of(core).label_of_outputs or core.get_weight_version()
        for output in outputs.values():
            output.weight_version = label

    def is_ready(core: Any, is_ready: bool = False) -> bool:
        state = _state_of(core)
        state.is_ready |= is_ready
        return state.is_ready

    core.set_weight_version = set_weight_version
    setattr(core, LABEL, get_label)
    setattr(core, READY, is_ready)
    if hasattr(core, "_attach_weight_version"):
        core._attach_weight_version = attach_label  # noqa: SLF001
    watch(core, "sleep", _sleeping)
    watch(core, "collective_rpc", _calling)


def _sleeping(core: Any, level: int = 1, *_: Any, **__: Any) -> AbstractContextManager[None]:
    if level > KEEPS_WEIGHTS:
        _drop_label(core)
    return nullcontext()


def _calling(core: Any, method: Any, *_: Any, **__: Any) -> AbstractContextManager[None]:
    if method == CALL:  # the next label is of a follower that asks the workers now
        state = _state_of(core)
        state.is_followed, state.is_void = True, False
    elif method in _WRITES[has_backend(core.vllm_config)]:
        _drop_label(core)
    return nullcontext()


def _drop_label(core: Any) -> None:
    """Answer as of unknown weights, until a follower that asks the workers anew labels them."""
    state = _state_of(core)
    if state.is_followed or has_backend(core.vllm_config):
        core.set_weight_version(UNKNOWN_VERSION)
        state.is_void = True


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
