"""Requests to an engine's ranks, and their answers; both travel as JSON.

An answer is None, or an error whose class, never its wording, says what has become of the engine.
The outcome of an update is in the engine's record in the store; its answer says that it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dbuffer import errors
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.engine_options import EngineOptions, UpdateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRequest:
    """Follow a store, in place of the one that was followed before."""

    options: EngineOptions
    if_idle: bool = False
    """Nothing is done where a rank follows this store already, with the same options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Tell whether the model has places for such tensors."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """Treat the model's weights as unknown: the next update reloads all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwakeRequest:
    """Do nothing, or answer that the weights are asleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest:
    """Stop following; the model keeps its weights."""


RankRequest = (
    BeginRequest | UpdateRequest | CheckRequest | ForgetRequest | AwakeRequest | EndRequest
)

RankAnswer = errors.DBufferError | None
"""Answer of one rank: its error, or None where the request was done."""

_CALLS = {
    BeginRequest: "begin",
    UpdateRequest: "update",
    CheckRequest: "check",
    ForgetRequest: "forget",
    AwakeRequest: "awake",
    EndRequest: "end",
}


def specs_of(tensors: Iterable[tuple[str, str, list[int]]]) -> tuple[TensorSpec, ...]:
    """Make specs of the name, dtype (``"bfloat16"``) and shape of each tensor, as JSON has them."""
    return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors)


def encode_request(request: RankRequest) -> dict[str, Any]:
    """Encode a request as JSON."""
    return {"call": _CALLS[type(request)], "arguments": asdict(request)}


def decode_request(values: Any) -> RankRequest:
    """Decode a request.

    Raises:
        OptionError: (a ``ValueError``) it is none, or has a value that it cannot have.
    """
    try:
        match values["call"], values["arguments"]:
            case "begin", {"options": options, "if_idle": bool(unless)}:
                return BeginRequest(options=EngineOptions.parse(options), if_idle=unless)
            case "update", arguments:
                return UpdateRequest.parse(arguments)
            case "check", {"tensors": tensors}:
                return CheckRequest(tensors=specs_of(tensors))
            case "forget", {}:
                return ForgetRequest(**values["arguments"])
            case "awake", {}:
                return AwakeRequest(**values["arguments"])
            case "end", {}:
                return EndRequest(**values["arguments"])
        raise KeyError(values["call"])
    except (KeyError, TypeError) as error:
        raise errors.OptionError(
            f"{values!r:.300} is no request of this version of dbuffer ({error!r:.100}): use the "
            "same version in the engine and in its follower"
        ) from None


_ANSWERS: tuple[type[errors.DBufferError], ...] = (
    errors.WeightsMismatchError,
    errors.OptionError,
    errors.UnsupportedError,
    errors.EngineBusyError,
    errors.EngineUpdateError,
    errors.EngineBrokenError,
)
"""Errors that a rank answers with, from least to worst. After any but the last one the weights are
as they were."""


def as_answer(error: Exception) -> errors.DBufferError:
    """Return the answer of a rank on which a request raised an error."""
    for kind in _ANSWERS:
        if isinstance(error, kind):
            return kind(str(error))
    return errors.EngineUpdateError(f"{type(error).__name__}: {error}")


def worst_of(answers: Sequence[RankAnswer]) -> RankAnswer:
    """Return the worst answer; the first of several that are as bad.

    Raises:
        EngineUpdateError: no rank has answered, so that nothing is known to be done.
    """
    if not answers:
        raise errors.EngineUpdateError("no rank of the engine has answered")
    return max(answers, key=lambda answer: -1 if answer is None else _ANSWERS.index(type(answer)))


def encode_answer(answer: RankAnswer) -> dict[str, str]:
    """Encode an answer as JSON."""
    return {} if answer is None else {"error": type(answer).__name__, "problem": str(answer)}


def decode_answer(values: Any) -> RankAnswer:
    """Decode an answer."""
    kinds = {kind.__name__: kind for kind in _ANSWERS}
    match values:
        case {"error": str(name), "problem": str(problem)} if name in kinds:
            return kinds[name](problem)
        case dict() if not values:
            return None
    raise errors.EngineUpdateError(
        f"{values!r:.300} is no answer of this version of dbuffer: use the same version in the "
        "engine and in its follower"
    )
