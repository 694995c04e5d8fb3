"""Interfaces of an engine: `Engine` in the process that drives it, `EngineRank` in each worker.

To begin, a follower calls `facts` and sends a `begin` request. To switch to a version, it sends
`reserve`, calls `pause`, sends `update`, calls `set_weight_version` and `resume`, and sends
`acknowledge`.

The engine labels its responses with a `WeightLabel`. If its weights are not a version of the store,
the engine's record in the store names no version, and its label is `UNKNOWN_VERSION`. Examples are
weights of the engine's checkpoint, weights that another program loaded, and weights that were
discarded in a sleep.

Requests to ranks, and the ranks' answers, are sent as JSON. An answer is None, the engine's record,
or an error, whose class tells the engine's state.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import torch

from dbuffer import errors
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.format.layout import TensorSpec
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import ReceiverRecord, fields_of, made_of, metadata_for_record
from dbuffer.runtime import options as checks
from dbuffer.runtime.messages import described

if TYPE_CHECKING:
    from dbuffer.engine.plan.copy_plan import Packing
    from dbuffer.engine.rank_channel import RankChannel
    from dbuffer.engine.shape_check import ShapeCheck


UNKNOWN_VERSION = "unknown"
"""Label of an engine whose weights are not a version of the store that it follows."""


def served_by(record: ReceiverRecord | None) -> Lineage | None:
    """Return the version that an engine's record says it serves, or None if it serves none."""
    return None if record is None or record.is_broken else record.lineage


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Label of an engine's responses: the version of its weights, and the version's metadata."""

    version: str = UNKNOWN_VERSION
    """Number of the version, as text. Any other text: the weights are not a version of the
    store."""
    run: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the version, such as the trainer's ``step``."""
    newest_run: str | None = None
    """Run (start of a sender) of the version that the engine is to load next, if not `run`."""
    attested_at: float | None = None
    """Time, in seconds since the epoch, of the comparison that found the engine's weights equal to
    the published version, or None if there was no such comparison yet."""

    @classmethod
    def of(
        cls,
        version: Lineage | None,
        metadata: Mapping[str, Any],
        newest: int | VersionId | None = None,
        *,
        attested_at: float | None = None,
    ) -> Self:
        """Make the label of an engine that serves ``version``. The store's newest is ``newest``."""
        if version is None:
            return cls()
        run, number = version.id
        newest_run = newest.run if isinstance(newest, VersionId) and newest.run != run else None
        return cls(str(number), run, metadata, newest_run, attested_at)

    @property
    def number(self) -> int | None:
        """The version's number, or None if the weights did not come from a store."""
        is_number = self.version.isascii() and self.version.isdecimal()
        return int(self.version) if is_number else None

    def as_json(self) -> dict[str, Any]:
        values = {
            "version": self.version,
            "run": self.run,
            "metadata": self.metadata,
            "newest_run": self.newest_run,
            "attested": self.attested_at is not None,
            "attested_at": self.attested_at,
        }
        return {name: value for name, value in values.items() if value}

    def encode(self) -> str:
        """Return the label as a single text: the version, and the other values as JSON."""
        values = self.as_json()
        values.pop("version", None)  # absent if it is empty
        return f"{self.version} {json.dumps(values)}" if values else self.version

    @classmethod
    def decode(cls, text: str) -> Self:
        """Parse a text from :meth:`encode`. Any other text becomes the label's ``version``."""
        version, _, further = text.partition(" ")
        try:
            values = json.loads(further) if further else {}
            values.pop("attested", None)  # `attested_at` implies it
            return cls(version, **values)
        except (ValueError, TypeError, AttributeError):
            return cls(text)


def describe_weights(version: Lineage | None) -> str:
    """Return a phrase for messages, such as "version 3". Pass None for weights of no version."""
    if version is None:
        return "weights from outside the store (the engine's checkpoint, or another load)"
    return f"version {version.id.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A switch of an engine to a version."""

    version: int
    stage_s: float
    """Seconds to get the version ready on the engine's first rank, while the engine served."""
    wait_s: float
    """Seconds from the time the follower saw the version in the store until all ranks had it
    ready."""
    pause_s: float
    """Seconds from the call to pause to the end of the call to resume, including waits for
    requests."""
    load_s: float
    """Part of ``pause_s`` that the ranks take to agree on the version and load it."""
    num_bytes: int
    """Bytes that the first rank loaded."""


PauseMode = Literal["keep", "wait", "abort", "in_place"]
"""Treatment of requests in flight during a switch: finish them first (``wait``), ``abort`` them,
``keep`` them and recompute their KV caches with the new weights, or keep requests and caches
(``in_place``)."""

PAUSE_MODES = ("keep", "wait", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine that stay the same until the engine is restarted."""

    instance_id: str
    name: str
    """Default name of the engine among a store's receivers. The option ``engine_id`` overrides
    it."""
    num_ranks: int
    configured: EngineOptions | None = None
    replica: str = ""
    """Suffix of this replica's name. The names of an engine's replicas differ only in the
    suffix."""
    begins_paused: bool = False
    """Whether following must begin in a pause, because the ranks wait for each other in each step.
    Without a pause, one rank could wait in a step for a rank that waits for dbuffer's messages."""


class Engine:
    """Inference engine that can follow a store.

    All requests to its ranks go through :meth:`call`. A subclass can override it.
    """

    is_server: bool = False
    """Whether the engine is a server outside this process. A server can be restarted while it is
    followed, and it stays paused if its follower dies in a switch."""
    has_own_pause: bool = False
    """Whether the engine tells a follower's pause apart from other programs' pauses, so that
    :meth:`resume` ends only the follower's pause."""
    pauses: Collection[str] = PAUSE_MODES
    scores_prompts: bool = False
    """Whether the engine has :meth:`prompt_logprobs`."""

    def close(self) -> None:
        """Close this process's connections to the engine."""

    def require_alive(self) -> None:
        """Raise :class:`EngineEndedError` if the engine is dead and cannot be restarted."""

    def is_idle(self) -> bool:
        """Whether the engine's event loop is not running, so that no call would be answered."""
        return False

    def require_pause(self, mode: PauseMode) -> None:
        """Raise an error if this engine, as it was started, does not support a pause mode."""
        checks.choice("pause", mode, self.pauses)

    def facts(self) -> EngineFacts:
        raise NotImplementedError

    def call(self, request: RankRequest) -> list[RankAnswer]:
        return [decode_answer(answer) for answer in self.send(request.as_json())]

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request in JSON to all ranks; return the answer of each rank, in JSON."""
        raise NotImplementedError

    def do(self, request: RankRequest) -> ReceiverRecord | None:
        """Send a request to all ranks; return the engine's record, if a rank answers with a record.

        If ranks answer with errors, raise the most severe error.
        """
        answers = self.call(request)
        if (worst := worst_of(answers)) is not None:
            raise worst
        return next((answer for answer in answers if isinstance(answer, ReceiverRecord)), None)

    def is_paused(self) -> bool | None:
        """Return whether any process has paused the engine, or None if that is unknown."""
        return None

    def pause(self, mode: PauseMode) -> None:
        """Pause the engine before its next step, and drop the caches made with the present weights.

        With ``"in_place"``, keep the caches, so that requests in flight continue with them.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """End the pause of this follower, or a pause that a killed follower left."""

    def prompt_logprobs(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[float]:
        """Return the log-probabilities of all prompts' tokens, in one list.

        A prompt's first token has no log-probability, and is left out. A log-probability can be
        NaN. Raise :class:`EngineUnreachableError` if the engine does not answer.
        """
        raise NotImplementedError

    def weight_version(self) -> str:
        raise NotImplementedError

    def set_weight_version(self, label: WeightLabel) -> None:
        """Set the label that the engine's responses carry. Some engines only carry its version."""
        raise NotImplementedError


ENDPOINT_ATTR = "_dbuffer_endpoint"
"""Attribute of a model that holds its :class:`RankEndpoint`."""

WEIGHTS = "weights"
"""Name of the weights among the parts of an engine that can sleep, as in vLLM and SGLang."""

ASLEEP = (
    "the engine's weights are asleep, and their memory may be gone: wake the engine up (with "
    "tags=['weights'], only its weights), then sync"
)


class EngineRank:
    """One rank of an engine, and its model. Each integration has a subclass.

    The methods are called between two steps of the engine.
    """

    ranks: RankChannel
    module: torch.nn.Module
    """The model that serves. If versions also update its draft, a :class:`DraftedModel` of both.
    :meth:`make_check` can replace this attribute."""
    device: torch.device
    is_pipeline_stage: bool = False
    """Whether this rank has only some of the model's layers, and other ranks have the others."""
    not_weights: Collection[str] = (ENDPOINT_ATTR,)
    """Names of layers' attributes that are not weights: caches that serving fills, and dbuffer's
    own."""
    packing: Packing | None = None
    """The engine's way of packing (reordering or quantizing) loaded weights, or None if dbuffer
    does not support it."""
    instance_id: str | None = None
    """Id of this start of the engine, the same on all ranks. Used if the follower sends no id."""
    reports_sleep: bool = True
    """Whether :class:`RankEndpoint` learns of each part of the engine's device memory that falls
    asleep or wakes up. If not, ``staging="auto"`` does not use that memory."""

    @property
    def on_device(self) -> bool:
        return self.device.type != "cpu"

    def engine_id(self, options: EngineOptions) -> str:
        raise NotImplementedError

    def make_check(self) -> ShapeCheck:
        """Return an object that checks whether published tensors fit the model.

        The check may run while the model serves.
        """
        raise NotImplementedError

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Load the tensors of a version, which the check of :meth:`make_check` has accepted.

        If loading fails, the model can have a mix of two versions, and the caller must load a
        version again. ``partial``: whether the tensors fill only some layers. The other layers
        then keep their weights.
        """
        raise NotImplementedError

    def require_reloadable(self) -> None:
        """Raise :class:`UnsupportedError` if :meth:`load` cannot fill some tensor of the model."""

    def read_checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Read the checkpoint that the engine was started with. Its files must still exist."""
        raise NotImplementedError

    def read_draft_checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights that a :class:`DraftedModel`'s draft had at the engine's start."""
        raise NotImplementedError

    def draft_rank(self) -> EngineRank:
        """Return an `EngineRank` for this rank's draft model, which follows a store of its own.

        Raise :class:`UnsupportedError` if the engine has no draft model that can do this.
        """
        raise errors.UnsupportedError(
            "draft_store needs an engine with a draft model that can follow a store, and this "
            "engine has none"
        )

    def refuse_to_serve(self, reason: str) -> None:
        """Make every step of the model fail with this reason, until :meth:`serve_again`."""
        raise NotImplementedError

    def serve_again(self) -> None:
        """Undo :meth:`refuse_to_serve`, after all weights were loaded."""


@dataclass(slots=True)
class ModelState:
    """State of one rank's model: the version of its weights, and whether they may be used.

    The model's :class:`RankEndpoint` keeps the state when a new receiver replaces the old one.
    """

    version: Lineage | None = None
    """Version of `store` that the model has, or None if its weights are not a version."""
    metadata: dict[str, Any] = field(default_factory=dict)
    store: str | None = None
    must_reload: bool = False
    """Whether code other than dbuffer's wrote the weights, so that the next update must reload all
    of them. If False, the model has `version`, or the weights of the engine's start."""
    broken: str | None = None
    asleep: set[str] = field(default_factory=set)
    """Parts of the engine's device memory that are asleep: `WEIGHTS`, and the engine's names for
    others."""
    is_updating: bool = False

    @property
    def is_asleep(self) -> bool:
        """Whether the weights are asleep. Sleeping weights must be neither read nor written."""
        return WEIGHTS in self.asleep

    def note_loaded(self, version: Lineage | None, store: str, metadata: Mapping[str, Any]) -> None:
        self.version, self.store, self.must_reload = version, store, False
        self.metadata = metadata_for_record(metadata)

    def note_foreign_load(self) -> None:
        self.version, self.must_reload, self.metadata = None, True, {}

    def version_of(self, store: str) -> Lineage | None:
        return self.version if self.store == store else None

    def require_awake(self) -> None:
        if self.is_asleep:
            raise errors.EngineBusyError(ASLEEP)


Call = Literal[
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


class RankRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request to all ranks of an engine.

    * ``begin``: follow the options' store, in place of any other store; answer with the engine's
      record;
    * ``reserve``: keep the version that is ready until the next update; if it is not ready any
      more, answer an error;
    * ``update``: switch to a version, and answer with the engine's record;
    * ``acknowledge``: write the engine's record in a thread, and answer with the record;
    * ``attest``: record whether each rank's weights equal the version; answer with the record;
    * ``accept``: end the canary's trial of the version, and ``acknowledge`` the version;
    * ``check``: answer an error if the model has no place for some of the request's tensors;
    * ``forget``: treat the model's weights as unknown, so that the next update reloads them;
    * ``awake``: answer an error if the weights are asleep;
    * ``end``: stop following; the model keeps its weights.
    """

    call: Call
    options: EngineOptions | None = None
    takes_over: bool = True
    """Whether to ``begin`` even if a rank follows another store, or with other options."""
    update: UpdateRequest | None = None
    tensors: tuple[TensorSpec, ...] = ()
    allows_unused: bool = False
    of_draft: bool = False
    """Whether the request is for the engine's draft model, which follows a store of its own."""

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Decode a request, or raise :class:`OptionError`."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise unknown_request(values, error) from None


msgspec.json.Decoder(RankRequest)  # otherwise msgspec analyzes it at its first use, in any thread


def unknown_request(values: Any, problem: object = "") -> errors.OptionError:
    return errors.OptionError(
        f"{values!r:.300} is no request of this version of dbuffer ({problem}): use the same "
        "version in the engine and in its follower"
    )


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
