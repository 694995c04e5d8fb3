"""Let vLLM's engine core tell with each token which weights it came from.

vLLM's core attaches its label to each step's outputs, and its front ends make spans of tokens from
them. With dbuffer the label that travels is a whole :class:`WeightLabel`; front ends take it apart
again, so that vLLM's own routes and fields show the version alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dbuffer.engine.weight_label import UNKNOWN_VERSION, WeightLabel

LABEL = "dbuffer_label"
"""Method of the core that returns its label, encoded."""

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
