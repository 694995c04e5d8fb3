"""The contract of an engine: `Engine` where it is driven, `EngineRank` in each of its processes.

A follower calls `Engine`: `facts`; `call` with a `begin`; for each version `pause`, `call` with an
`update`, `set_weight_version`, `resume`, `call` with an `acknowledge`; at the end `close`. Each
call reaches the `RankEndpoint` of every rank, which makes an `EngineRank`, asks it for a
`ShapeCheck`, and in an update lets it load. `ModelState` says which version its weights are.

The engine's responses tell its version by a `WeightLabel`. If its weights did not come from its
store (but from the checkpoint of its start, another load, or a sleep), its record names no version,
and its label is :data:`UNKNOWN_VERSION`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from dbuffer.engine import messages
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import EngineBusyError, UnsupportedError
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import ReceiverRecord, metadata_for_record
from dbuffer.runtime import options as checks
from dbuffer.runtime.messages import listed

if TYPE_CHECKING:
    from dbuffer.engine.plan.images import Packing
    from dbuffer.engine.rank_channel import RankChannel
    from dbuffer.engine.shape_check import ShapeCheck

UNKNOWN_VERSION = "unknown"
"""Label of an engine without a version."""


def served_by(record: ReceiverRecord | None) -> Lineage | None:
    """Return the version that an engine serves by its record, or None if it is of no store."""
    return None if record is None or record.is_broken else record.lineage


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Label under which an engine answers: a version, and its publisher's metadata."""

    version: str = UNKNOWN_VERSION
    """Number of the version; or another text, of weights that did not come from the store."""
    run: str | None = None
    """Run of the version."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the version, a trainer's ``step`` for instance."""
    newest_run: str | None = None
    """Run of the store's newest version while the engine gets it ready; None if it is ``run``."""
    is_attested: bool = False
    """Whether the weights were seen to be the version's, while the engine served."""

    @classmethod
    def of(
        cls,
        version: Lineage | None,
        metadata: Mapping[str, Any],
        newest: int | VersionId | None = None,
        *,
        is_attested: bool = False,
    ) -> Self:
        """Make the label of an engine that has this version; ``newest`` is the next one."""
        if version is None:
            return cls()
        run, number = version.id
        newest_run = newest.run if isinstance(newest, VersionId) and newest.run != run else None
        return cls(str(number), run, metadata, newest_run, is_attested)

    @property
    def number(self) -> int | None:
        """The version's number, or None if the weights did not come from a store."""
        is_number = self.version.isascii() and self.version.isdecimal()
        return int(self.version) if is_number else None

    def as_json(self) -> dict[str, Any]:
        """Return it as responses show it, without unknown values."""
        values = {
            "version": self.version,
            "run": self.run,
            "metadata": self.metadata,
            "newest_run": self.newest_run,
            "attested": self.is_attested,
        }
        return {name: value for name, value in values.items() if value}

    def encode(self) -> str:
        """Return it as one text: the version, and JSON of all further values."""
        values = self.as_json()
        del values["version"]
        return f"{self.version} {json.dumps(values)}" if values else self.version

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read the text of :meth:`encode`; any other text is a version's label by itself."""
        version, _, further = text.partition(" ")
        try:
            values = json.loads(further) if further else {}
            values["is_attested"] = values.pop("attested", False)
            return cls(version, **values)
        except (ValueError, TypeError, AttributeError):
            return cls(text)


def describe_weights(version: Lineage | None) -> str:
    """Describe an engine's weights, which are this version of its store, or of no version."""
    if version is None:
        return "weights from outside the store (its checkpoint, or another load)"
    return f"version {version.id.number}"


PauseMode = Literal["keep", "wait", "abort", "in_place"]
"""Treatment of requests in flight: they are kept and go on with the new weights, their caches
recomputed; or waited for; or aborted; or kept with their caches."""

PAUSE_MODES = ("keep", "wait", "abort")
"""Modes of an engine unless it says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine's start that a follower needs."""

    instance_id: str
    """Id of this start of the engine."""
    name: str
    """Name among a store's receivers, unless the options give one."""
    num_ranks: int
    configured: EngineOptions | None = None
    """Options that the engine was started with, if with any."""
    replica: str = ""
    """Suffix of this replica's name, after the name that its replicas share."""
    begins_paused: bool = False
    """Whether its ranks meet in each step. Following then begins in a pause: otherwise one waits in
    a step for another, which waits in a gather for it."""


class Engine:
    """An engine that can follow a store; :meth:`call` is the one way to its ranks.

    The defaults fit an engine in this process, which does nothing between two calls.
    """

    is_server: bool = False
    """Whether it runs apart from this process: it may be restarted while it is followed, or be left
    paused by a follower that dies in a switch."""
    has_own_pause: bool = False
    """Whether it tells a follower's pause from any other: a resume by others does not end it, and
    :meth:`resume` ends no other."""
    pauses: Collection[str] = PAUSE_MODES
    """Modes of pausing that its kind has."""

    def close(self) -> None:
        """Release this process's connections to it."""

    def require_alive(self) -> None:
        """Raise :class:`EngineEndedError` if it is dead for good; a server may come back."""

    def is_idle(self) -> bool:
        """Whether it answers no call before its program goes on: its event loop is not running."""
        return False

    def require_pause(self, mode: PauseMode) -> None:
        """Raise unless it can be paused so.

        Raises:
            OptionError: its kind cannot.
            UnsupportedError: this engine cannot, as it was started.
        """
        checks.choice("pause", mode, self.pauses)

    def facts(self) -> EngineFacts:
        """Return the facts about its start."""
        raise NotImplementedError

    def call(self, request: messages.RankRequest) -> list[messages.RankAnswer]:
        """Send a request to all ranks; return the answer of each."""
        return [messages.decode_answer(answer) for answer in self.send(request.as_json())]

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request in JSON to all ranks; return the answer of each, in JSON."""
        raise NotImplementedError

    def do(self, request: messages.RankRequest) -> ReceiverRecord | None:
        """Let all ranks do something, or raise the worst of their errors.

        Return the engine's record, if a rank answers with it.
        """
        answers = self.call(request)
        if (worst := messages.worst_of(answers)) is not None:
            raise worst
        return next((answer for answer in answers if isinstance(answer, ReceiverRecord)), None)

    def is_paused(self) -> bool | None:
        """Return whether it is paused, by this follower or another process, or None if unknown."""
        return None

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and drop every cache computed with the present weights.

        With ``"in_place"``, drop none: requests in flight go on with theirs.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """End the pause of this follower, or of a killed one."""

    def weight_version(self) -> str:
        """Return the version in the label that it reports with its responses."""
        raise NotImplementedError

    def set_weight_version(self, label: WeightLabel) -> None:
        """Set the label that it reports with its responses; some engines report all of it."""
        raise NotImplementedError


ENDPOINT_ATTR = "_dbuffer_endpoint"
"""Attribute of a model that holds its :class:`RankEndpoint`."""

ASLEEP = (
    "the engine's weights are asleep, and their memory may be gone: wake it up first (its weights "
    "are enough: tags=['weights']), then sync"
)


def require_unchanged(before: Mapping[str, object], present: Mapping[str, object]) -> None:
    """Raise :class:`UnsupportedError` if a model's layers and parameters are not as they were."""
    if replaced := [name for name, form in before.items() if present.get(name) != form]:
        raise UnsupportedError(
            f"something replaced {listed(replaced)} since following began, and the engine cannot "
            "load into the replacements: restart the engine"
        )


def tied_to(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return for each parameter the first one in the same memory, which may be itself.

    A load into one of two parameters that share memory changes both.
    """
    first: dict[tuple[torch.device, int], str] = {}
    return {
        name: first.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        for name, tensor in parameters.items()
    }


class EngineRank:
    """The rank that a receiver runs in, with its model; each engine subclasses it.

    It lives as long as the model. Its methods are called between two steps of the engine.
    """

    ranks: RankChannel
    """All ranks of the engine."""
    module: torch.nn.Module
    """The model that serves."""
    device: torch.device
    """Device of its weights."""
    is_pipeline_stage: bool = False
    """Whether it holds some of the model's layers only, and other ranks hold the rest."""
    not_weights: Collection[str] = (ENDPOINT_ATTR,)
    """Attributes of its layers that change while it serves: its caches, and dbuffer's own."""
    packing: Packing | None = None
    """Packing of its layers, if it is known."""
    instance_id: str | None = None
    """Id of this start of the engine, one for all ranks, if its follower does not send it."""

    @property
    def on_device(self) -> bool:
        """Whether its weights are outside of main memory."""
        return self.device.type != "cpu"

    def engine_id(self, options: EngineOptions) -> str:
        """Return the engine's name among the store's receivers; the same on all of its ranks."""
        raise NotImplementedError

    def make_check(self) -> ShapeCheck:
        """Return a check of weights against the model, for use while the model serves."""
        raise NotImplementedError

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once.

        They have passed the check of :meth:`make_check`. ``partial``: these are for some layers
        only, and the others keep all that they have.
        """
        raise NotImplementedError

    def require_reloadable(self) -> None:
        """Raise :class:`UnsupportedError` if :meth:`load` cannot fill all that computes.

        Something may have replaced a layer or a parameter since following began.
        """

    def load_checkpoint(self) -> None:
        """Swap in the weights that the engine was started with, from where it read them."""
        raise NotImplementedError

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of the model fail, and say why, until :meth:`serve_again`."""
        raise NotImplementedError

    def serve_again(self) -> None:
        """Take :meth:`refuse_to_serve` back, after whole weights were loaded."""


@dataclass(slots=True)
class ModelState:
    """State of one rank's model: its weights, and whether they may be used.

    It belongs to the model's endpoint, and outlives each receiver. The engine's record is written
    from it, and the engine's label from the record.
    """

    version: Lineage | None = None
    """Version of `store` that the weights are, or None if they are no version."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of `version`, for the engine's record."""
    store: str | None = None
    must_reload: bool = False
    """Whether something else than dbuffer wrote the weights, so that the next update reloads all of
    them. Otherwise they are `version`, or the weights of the engine's start."""
    broken: str | None = None
    """Why the model refuses to serve."""
    is_asleep: bool = False
    """Whether the engine sleeps: the weights may be neither read nor written."""
    is_updating: bool = False
    """Whether dbuffer is writing them."""

    def note_loaded(self, version: Lineage | None, store: str, metadata: Mapping[str, Any]) -> None:
        """Record that dbuffer loaded a version of a store, or the checkpoint (None)."""
        self.version, self.store, self.must_reload = version, store, False
        self.metadata = metadata_for_record(metadata)

    def note_foreign_load(self) -> None:
        """Record that something else wrote the weights."""
        self.version, self.must_reload, self.metadata = None, True, {}

    def version_of(self, store: str) -> Lineage | None:
        """Return the version of this store that the model has."""
        return self.version if self.store == store else None

    def require_awake(self) -> None:
        """Raise :class:`EngineBusyError` while the weights are asleep."""
        if self.is_asleep:
            raise EngineBusyError(ASLEEP)
