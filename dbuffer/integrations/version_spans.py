"""`versions_of`: the version of each token of an engine's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbuffer.engine.contract import WeightLabel
from dbuffer.errors import OptionError


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Range of an output's tokens, and the version that they came from."""

    version: int | None
    """Number of the version, or None if the weights did not come from a store."""
    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""
    run: str | None = None
    """Run of the version, or None if the engine does not tell it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that the version was published with; empty if the engine does not tell."""


def versions_of(output: Any) -> list[VersionSpan]:
    """Return the versions that the tokens of one finished output came from, in their order.

    Args:
        output: of vLLM, a ``CompletionOutput``, or a ``RequestOutput`` of one; of SGLang, the
            dictionary that ``generate`` returns; of a server of either, one of the response's
            ``choices``, or a response with one choice, as JSON or as OpenAI's client returns it.

    Raises:
        OptionError: (a ``ValueError``) the output does not tell: it is not finished, its engine
            has no versions, or (a server that follows) the request did not ask for them.
    """
    spans = _fields_of(output).get("weight_versions")
    if spans is not None:
        return [_span(_values_of(span)) for span in spans]
    raise OptionError(
        f"{output!r:.200} does not tell its versions: give a finished output of vLLM 0.32 or "
        "SGLang, or a choice of a response whose request had the header X-Weight-Versions: true"
    )


def _fields_of(output: Any) -> Mapping[str, Any]:
    """Find the fields about versions, whichever engine or server the output is from."""
    fields = _values_of(output)
    for inner in ("outputs", "choices"):
        several = fields.get(inner)
        if isinstance(several, Sequence) and len(several) == 1:
            fields = {**fields, **_values_of(several[0])}
        elif several is not None:
            raise OptionError(f"{len(several)} outputs: give one of its {inner}")
    for inner in ("meta_info", "metadata"):  # SGLang's own routes; its OpenAI routes
        if isinstance(fields.get(inner), Mapping):
            fields = {**fields, **fields[inner]}
    return fields


def _values_of(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, Mapping):
        return thing
    if hasattr(thing, "model_dump"):  # of OpenAI's client, which keeps fields that it does not know
        values: Mapping[str, Any] = thing.model_dump()
        return values
    return getattr(thing, "__dict__", {})


def _span(values: Mapping[str, Any]) -> VersionSpan:
    label = WeightLabel.decode(values["version"])
    return VersionSpan(
        label.number,
        values["start"],
        values["end"],
        values.get("run", label.run),
        values.get("metadata", label.metadata),
    )
