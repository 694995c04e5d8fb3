"""`versions_of`: the weight versions that generated the tokens of an engine's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbuffer.engine.contract import WeightLabel
from dbuffer.errors import OptionError


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Range of tokens in an output, and the weight version that generated these tokens."""

    version: int | None
    """Number of the version, or None if the engine's weights did not come from a store."""
    start: int
    end: int
    run: str | None = None
    """Id of the version's run (all versions of one sender process), or None if not reported."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the version, or an empty mapping if the engine reports no metadata."""


def versions_of(output: Any) -> list[VersionSpan]:
    """Return the weight versions that generated a finished output, in the order of its tokens.

    ``output`` must have a single completion. It can be a ``CompletionOutput`` or ``RequestOutput``
    of vLLM, or the dictionary that SGLang's ``generate`` returns. For a server, it is a response or
    one of the response's ``choices``, as JSON or as an object of OpenAI's client.

    Raises:
        OptionError: (a ``ValueError``) the output has no versions: it is not finished, its engine
            does not follow a store, or the request to the server did not ask for versions.
    """
    spans = _fields_of(output).get("weight_versions")
    if spans is not None:
        return [_span(_values_of(span)) for span in spans]
    raise OptionError(
        f"{output!r:.200} has no weight versions: pass a finished output of vLLM 0.32 or SGLang. "
        "For a server's response, send the request with the header X-Weight-Versions: true, and "
        "pass one of the response's choices"
    )


def _fields_of(output: Any) -> Mapping[str, Any]:
    fields = _values_of(output)
    for inner in ("outputs", "choices"):
        several = fields.get(inner)
        if isinstance(several, Sequence) and len(several) == 1:
            fields = {**fields, **_values_of(several[0])}
        elif several is not None:
            raise OptionError(f"there are {len(several)} {inner}: pass one of them")
    for inner in ("meta_info", "metadata"):  # keys of SGLang's own routes, and of its OpenAI routes
        if isinstance(fields.get(inner), Mapping):
            fields = {**fields, **fields[inner]}
    return fields


def _values_of(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, Mapping):
        return thing
    if hasattr(thing, "model_dump"):  # OpenAI's client keeps fields that it does not know
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
