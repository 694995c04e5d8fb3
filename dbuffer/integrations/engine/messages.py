"""What an engine's ranks are asked, what each of them answers, and how both travel: as JSON.

An answer says by an :class:`RankOutcome`, never by its wording, what has become of the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from dbuffer.errors import (
    DBufferError,
    EngineBrokenError,
    EngineUnsupportedError,
    EngineUpdateError,
    OptionError,
)
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRequest:
    """Follow a store, after whatever was followed before."""

    options: EngineOptions
    unless_following: bool = False
    """Nothing is done where a rank follows this store already, with the same options."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make one from what :func:`encode_request` made of it."""
        options = EngineOptions.parse(values["options"])
        return cls(options=options, unless_following=values["unless_following"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Tell whether the model has places for such tensors."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make one from what :func:`encode_request` made of it."""
        tensors = (
            TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in values["tensors"]
        )
        return cls(tensors=tuple(tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest:
    """Stop following; the model keeps its weights."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make one from what :func:`encode_request` made of it."""
        return cls(**values)


RankRequest = BeginRequest | UpdateRequest | CheckRequest | EndRequest

_CALLS: dict[str, type[BeginRequest | UpdateRequest | CheckRequest | EndRequest]] = {
    "begin": BeginRequest,
    "update": UpdateRequest,
    "check": CheckRequest,
    "end": EndRequest,
}


def encode_request(request: RankRequest) -> dict[str, Any]:
    """As JSON has it."""
    [call] = [name for name, kind in _CALLS.items() if type(request) is kind]
    return {"call": call, "arguments": asdict(request)}


def decode_request(values: Any) -> RankRequest:
    """The request that was encoded.

    Raises:
        OptionError: (a ``ValueError``) it is none, or has a value that it cannot have.
    """
    try:
        return _CALLS[values["call"]].parse(values["arguments"])
    except (KeyError, TypeError) as error:
        raise OptionError(
            f"{values!r:.300} is no request of this version of dbuffer ({error!r:.100}): use the "
            "same version in the engine and in its follower"
        ) from None


class RankOutcome(enum.Enum):
    """What has become of a request on one rank; the later ones are the worse ones."""

    DONE = "done"
    MISFIT = "misfit"
    """The tensors asked about have no places in the model."""
    INVALID = "invalid"
    """The request itself is wrong."""
    UNSUPPORTED = "unsupported"
    """The engine cannot do it, however often it is asked."""
    REFUSED = "refused"
    """It was not done."""
    BROKEN = "broken"
    """The weights are half loaded, and the engine refuses to serve."""


_ERRORS: dict[RankOutcome, type[DBufferError]] = {
    RankOutcome.INVALID: OptionError,
    RankOutcome.UNSUPPORTED: EngineUnsupportedError,
    RankOutcome.REFUSED: EngineUpdateError,
    RankOutcome.BROKEN: EngineBrokenError,
}
_SEVERITY = list(RankOutcome)


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank answers."""

    outcome: RankOutcome = RankOutcome.DONE
    problem: str = ""

    @classmethod
    def of_error(cls, error: Exception) -> Self:
        """The answer of a rank on which this was raised."""
        for outcome, kind in _ERRORS.items():
            if isinstance(error, kind):
                return cls(outcome, str(error))
        return cls(RankOutcome.REFUSED, f"{type(error).__name__}: {error}")

    def require_done(self) -> None:
        """Raise the error that tells the outcome."""
        if self.outcome in _ERRORS:
            raise _ERRORS[self.outcome](self.problem)


def worst_of(answers: Sequence[RankAnswer]) -> RankAnswer:
    """The answer of the rank on which it went worst; that of the first, if on several."""
    return max(answers, key=lambda answer: _SEVERITY.index(answer.outcome), default=RankAnswer())


def encode_answer(answer: RankAnswer) -> dict[str, str]:
    """As JSON has it."""
    return {"outcome": answer.outcome.value, "problem": answer.problem}


def decode_answer(values: Any) -> RankAnswer:
    """The answer that was encoded.

    Raises:
        EngineUpdateError: it is none.
    """
    try:
        return RankAnswer(RankOutcome(values["outcome"]), str(values["problem"]))
    except (KeyError, TypeError, ValueError):
        raise EngineUpdateError(
            f"{values!r:.300} is no answer of this version of dbuffer: use the same version in the "
            "engine and in its follower"
        ) from None
