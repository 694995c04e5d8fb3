"""Requests to an engine's ranks, and the ranks' answers. Both are sent as JSON.

An answer is None, the engine's record, or an error, whose class tells the engine's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from typing import Any, Literal, Self

from dbuffer import errors
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.format.layout import TensorSpec
from dbuffer.format.manifest import ReceiverRecord, fields_of, made_of
from dbuffer.runtime import options as checks
from dbuffer.runtime.messages import described


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Request to all ranks of an engine.

    * ``begin``: follow a store with these options, and no other store;
    * ``reserve``: keep the version that is ready for the next update, or answer an error;
    * ``update``: switch to a version, and answer with the engine's record;
    * ``acknowledge``: write the engine's record in a thread, and answer with it;
    * ``attest``: collect all ranks' comparisons of their weights, and answer with the record;
    * ``accept``: end the canary's trial of the version, and ``acknowledge`` the version;
    * ``check``: answer an error if the model has no place for some of these tensors;
    * ``forget``: treat the model's weights as unknown, so that the next update reloads them;
    * ``awake``: answer an error if the weights are asleep;
    * ``end``: stop following; the model keeps its weights.
    """

    call: Literal[
        "begin",
        "reserve",
        "update",
        "acknowledge",
        "attest",
        "accept",
        "check",
        "forget",
        "awake",
        "end",
    ]
    _: KW_ONLY
    options: EngineOptions | None = None
    takes_over: bool = True
    """Whether to ``begin`` even if a rank follows another store, or with other options."""
    update: UpdateRequest | None = None
    tensors: tuple[TensorSpec, ...] = ()
    allows_unused: bool = False

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {"call": self.call} | {name: values[name] for name in _ARGUMENTS[self.call]}

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Decode a request, or raise :class:`OptionError`."""
        try:
            parsers = _ARGUMENTS[values["call"]]
            if values.keys() != {"call", *parsers}:
                raise KeyError(*values)
            arguments = {name: parse(values[name]) for name, parse in parsers.items()}
            return cls(values["call"], **arguments)
        except (KeyError, TypeError, AttributeError) as error:
            raise errors.OptionError(
                f"{values!r:.300} is no request of this version of dbuffer ({error!r:.100}): use "
                "the same version in the engine and in its follower"
            ) from None


def specs_of(tensors: Iterable[tuple[str, str, list[int]]]) -> tuple[TensorSpec, ...]:
    """Make :class:`TensorSpec` objects, each from a name, a dtype (``"bfloat16"``) and a shape."""
    return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors)


_ARGUMENTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "begin": {
        "options": EngineOptions.parse,
        "takes_over": partial(checks.flag, "takes_over"),
    },
    "reserve": {"update": UpdateRequest.parse},
    "update": {"update": UpdateRequest.parse},
    "acknowledge": {},
    "attest": {},
    "accept": {},
    "check": {"tensors": specs_of, "allows_unused": partial(checks.flag, "allows_unused")},
    "forget": {},
    "awake": {},
    "end": {},
}

RankAnswer = errors.DBufferError | ReceiverRecord | None

_SEVERITIES: tuple[type[errors.DBufferError], ...] = (
    errors.WeightsMismatchError,
    errors.OptionError,
    errors.UnsupportedError,
    errors.EngineBusyError,
    errors.EngineUpdateError,
    errors.DBufferError,  # any other error: the engine does not answer, or has ended
    errors.EngineBrokenError,
)

_ANSWERS = tuple(kind for kind in _SEVERITIES if kind is not errors.DBufferError)
"""Classes of errors that a rank answers with. After an `EngineBrokenError` the engine refuses to
serve; after all others its weights are unchanged."""


def as_answer(error: Exception) -> errors.DBufferError:
    """Convert an error that a request raised on a rank into the rank's answer."""
    for kind in _ANSWERS:
        if isinstance(error, kind):
            return kind(str(error))
    return errors.EngineUpdateError(described(error))


def worst_of(answers: Sequence[RankAnswer]) -> errors.DBufferError | None:
    """Return the most severe error among the answers, or None if no answer is an error.

    If there are no answers, the request may not have been served: raise `EngineUpdateError`.
    """
    if not answers:
        raise errors.EngineUpdateError("no rank of the engine has answered")
    failures = [answer for answer in answers if isinstance(answer, errors.DBufferError)]
    return max(failures, key=_severity, default=None)


def raise_worst(failures: Sequence[errors.DBufferError]) -> None:
    """Raise the most severe of several engines' errors, with the messages of all errors.

    If there are no errors, do nothing.
    """
    if len(failures) == 1:
        raise failures[0]
    if failures:
        worst = max(failures, key=_severity)
        raise type(worst)("; ".join(dict.fromkeys(map(str, failures)))) from worst


def _severity(error: errors.DBufferError) -> int:
    return next(_SEVERITIES.index(kind) for kind in type(error).__mro__ if kind in _SEVERITIES)


def encode_answer(answer: RankAnswer) -> dict[str, Any]:
    """Encode an answer as JSON; :func:`decode_answer` reads it."""
    if isinstance(answer, ReceiverRecord):
        return {"record": fields_of(answer)}
    return {} if answer is None else {"error": type(answer).__name__, "problem": str(answer)}


def decode_answer(values: Any) -> RankAnswer:
    """Decode an answer, or raise :class:`EngineUpdateError`."""
    kinds = {kind.__name__: kind for kind in _ANSWERS}
    with contextlib.suppress(errors.StoreCorruptError):  # the record has unknown fields
        match values:
            case {"error": str(name), "problem": str(problem)} if name in kinds:
                return kinds[name](problem)
            case {"record": record}:
                return made_of(ReceiverRecord, record)
            case dict() if not values:
                return None
    raise errors.EngineUpdateError(
        f"{values!r:.300} is no answer of this version of dbuffer: use the same version in the "
        "engine and in its follower"
    )
