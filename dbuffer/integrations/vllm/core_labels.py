"""Labels of vLLM's engine core: each token of an output names the weights that it came from.

vLLM's core attaches its weight version to the outputs of each step, and its front ends turn these
into spans of tokens. With dbuffer the core attaches an encoded :class:`WeightLabel`, which front
ends decode, so that vLLM's routes and fields still show the version alone.

Before a call that writes or discards weights without dbuffer, the core sets its label to unknown.
If a method of a worker extension writes weights, the follower does so at its next poll.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dbuffer.engine.contract import UNKNOWN_VERSION, WeightLabel
from dbuffer.engine.endpoint import watch
from dbuffer.integrations.vllm.config import CALL, has_backend

KEEPS_WEIGHTS = 1
"""Highest level of sleep that keeps a copy of the weights."""
RELOADS = ("reload_weights", "reset_weights")
TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
_WRITES = {True: (*RELOADS, "update_weights"), False: (*RELOADS, *TRANSFERS)}
"""Calls after which the label is unknown. Key: whether the backend is dbuffer's, whose
``finish_weight_update`` sets the new label."""

LABEL = "dbuffer_label"
READY = "dbuffer_ready"
"""Method of the core that returns whether the engine is ready. With True, it becomes ready."""

ADAPTER = "dbuffer_adapter"
"""Attribute of a LoRA request: name and label of an adapter that follows a store."""

ADMITTED = "dbuffer_label"
"""Attribute of vLLM's outputs: encoded label of the weights of the first token."""


@dataclass(slots=True)
class _CoreState:
    label: str | None = None
    """Encoded label, or None before the first one was set."""
    label_of_outputs: str | None = None
    """Encoded label that outputs get: without fields that change while the weights stay."""
    is_followed: bool = False
    is_void: bool = False
    """Whether weights were written since a follower last called the workers."""
    is_ready: bool = False


def _state_of(core: Any) -> _CoreState:
    state: _CoreState = vars(core).setdefault("dbuffer_state", _CoreState())
    return state


def label_cores(core: Any) -> None:
    """Let the class of cores, ``EngineCore``, keep labels, and drop them before foreign loads."""
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
    if method == CALL:  # a follower asks the workers for their version
        state = _state_of(core)
        state.is_followed, state.is_void = True, False
    elif method in _WRITES[has_backend(core.vllm_config)]:
        _drop_label(core)
    return nullcontext()


def _drop_label(core: Any) -> None:
    """Set the label to unknown until a follower has called the workers and set a label."""
    state = _state_of(core)
    if state.is_followed or has_backend(core.vllm_config):
        core.set_weight_version(UNKNOWN_VERSION)
        state.is_void = True


def tell_labels(request_state: Any) -> None:
    """Let the outputs of a front end, which ``RequestState`` makes, have decoded labels."""
    if not hasattr(request_state, "track_weight_version"):  # before vLLM 0.32
        return
    make_output, make_state = request_state._new_completion_output, request_state.__init__  # noqa: SLF001
    if hasattr(make_output, ADMITTED):
        return

    def make_named_state(state: Any, *args: Any, **kwargs: Any) -> None:
        make_state(state, *args, **kwargs)
        # By the name of each version, vLLM's metrics would get one more series a version.
        state.lora_name, _ = getattr(state.lora_request, ADAPTER, (state.lora_name, None))

    def make_labeled_output(state: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_output(state, *args, **kwargs)
        _, of_adapter = getattr(state.lora_request, ADAPTER, (None, None))
        if state.weight_version_starts:
            encoded = of_adapter.encode() if of_adapter else state.weight_version_starts[0][0]
            setattr(output, ADMITTED, encoded)
        for span in output.weight_versions or ():
            label = of_adapter or WeightLabel.decode(span.version)
            span.version = label.version
            span.run, span.metadata = label.run, label.metadata
        return output

    setattr(make_labeled_output, ADMITTED, True)
    request_state.__init__ = make_named_state
    request_state._new_completion_output = make_labeled_output  # noqa: SLF001
