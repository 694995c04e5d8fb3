"""`versions_of`: the versions that generated the tokens of an engine's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbuffer.engine.contract import WeightLabel
from dbuffer.errors import OptionError


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Range of an output's tokens, and the version that generated these tokens."""

    version: int | None
    """Number of the version, or None if the weights did not come from a store."""
    start: int
    end: int
    run: str | None = None
    """Run of the version, or None if the engine does not report it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the version, or an empty mapping if the engine does not report it."""


def versions_of(output: Any) -> list[VersionSpan]:
    """Return the versions that generated the tokens of a finished output, in the tokens' order.

    ``output`` has a single completion. From vLLM, it is a ``CompletionOutput`` or a
    ``RequestOutput``; from SGLang, the dictionary that ``generate`` returns; from a server, a
    response or one of its ``choices``, as JSON or as an object of OpenAI's client.

    Raises:
        OptionError: (a ``ValueError``) the output has no versions: it is not finished, its engine
            does not follow a store, or the request to the server did not ask for versions.
    """
    spans = _fields_of(output).get("weight_versions")
    if spans is not None:
        return [_span(_values_of(span)) for span in spans]
    raise OptionError(
        f"{output!r:.200} does not tell its versions: pass a finished output of vLLM 0.32 or "
        "SGLang, or a choice of a response whose request had the header X-Weight-Versions: true"
    )


def _fields_of(output: Any) -> Mapping[str, Any]:
    """Return an output's fields, including its only completion's fields and its metadata."""
    fields = _values_of(output)
    for inner in ("outputs", "choices"):
        several = fields.get(inner)
        if isinstance(several, Sequence) and len(several) == 1:
            fields = {**fields, **_values_of(several[0])}
        elif several is not None:
            raise OptionError(f"{len(several)} outputs: pass a single one of the {inner}")
    for inner in ("meta_info", "metadata"):  # SGLang's own routes; its OpenAI routes
        if isinstance(fields.get(inner), Mapping):
            fields = {**fields, **fields[inner]}
    return fields


def _values_of(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, Mapping):
        return thing
    if hasattr(thing, "model_dump"):  # an OpenAI client's object, which keeps unknown fields too
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
