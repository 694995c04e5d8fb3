"""Labels in vLLM's engine core, which tell which weights generated each token of an output.

vLLM's engine core attaches its weight version to the outputs of each step, and vLLM's front end
turns these versions into spans of tokens. dbuffer makes the core attach an encoded
:class:`WeightLabel` instead. The front end decodes the label, so that vLLM's own routes and fields
show the plain version.

Before a call that writes or discards weights without dbuffer, the core sets its label to unknown.
If a method of a worker extension writes weights, the follower sets the label to unknown at its next
poll.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dbuffer.engine.contract import UNKNOWN_VERSION, WeightLabel
from dbuffer.engine.endpoint import watch
from dbuffer.integrations.vllm.config import CALL, has_backend

KEEPS_WEIGHTS = 1
"""Highest sleep level at which vLLM keeps a copy of the weights."""
RELOADS = ("reload_weights", "reset_weights")
TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
_WRITES = {True: (*RELOADS, "update_weights"), False: (*RELOADS, *TRANSFERS)}
"""Methods of workers that make the label unknown. Key: whether the weight transfer backend is
dbuffer's, which sets the new label in ``finish_weight_update``."""

LABEL = "dbuffer_label"
READY = "dbuffer_ready"
"""Method of the core that returns whether the engine is ready. The argument True makes it ready."""

ADAPTER = "dbuffer_adapter"
"""Attribute of a LoRA request: name and label of an adapter that follows a store."""

ADMITTED = "dbuffer_label"
"""Attribute of vLLM's outputs: encoded label of the weights that generated the first token."""


@dataclass(slots=True)
class _CoreState:
    label: str | None = None
    label_of_outputs: str | None = None
    """Encoded label for outputs, without the fields that can change while the weights stay."""
    is_followed: bool = False
    is_void: bool = False
    """Whether vLLM wrote weights after the last call of a follower to the workers."""
    is_ready: bool = False


def _state_of(core: Any) -> _CoreState:
    state: _CoreState = vars(core).setdefault("dbuffer_state", _CoreState())
    return state


def label_cores(core: Any) -> None:
    """Make ``EngineCore`` keep a label, and set it to unknown before writes without dbuffer.

    ``core`` is vLLM's class ``EngineCore``.
    """
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
    state = _state_of(core)
    if state.is_followed or has_backend(core.vllm_config):
        core.set_weight_version(UNKNOWN_VERSION)
        state.is_void = True


def tell_labels(request_state: Any) -> None:
    """Make outputs of vLLM's front end carry decoded labels.

    ``request_state`` is vLLM's class ``RequestState``, which makes the outputs.
    """
    if not hasattr(request_state, "track_weight_version"):  # before vLLM 0.32
        return
    make_output, make_state = request_state._new_completion_output, request_state.__init__  # noqa: SLF001
    if hasattr(make_output, ADMITTED):
        return

    def make_named_state(state: Any, *args: Any, **kwargs: Any) -> None:
        make_state(state, *args, **kwargs)
        # Name the adapter in vLLM's metrics: a name for each version would add a series for each
        # version.
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
