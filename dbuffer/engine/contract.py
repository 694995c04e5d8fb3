"""The contract of an engine: `Engine` where it is driven, `EngineRank` in each of its processes.

A follower calls `facts` and a `begin` request once. For each version it then calls a `reserve`
request, `pause`, an `update` request, `set_weight_version`, `resume`, and an `acknowledge` request.

The engine labels its responses with a `WeightLabel`. If its weights are its checkpoint's, another
program's, or lost in a sleep, its record names no version, and its label is `UNKNOWN_VERSION`.
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
"""Label of an engine whose weights are not a version of its store."""


def served_by(record: ReceiverRecord | None) -> Lineage | None:
    """Return the version that an engine's record says it serves, or None if it serves none."""
    return None if record is None or record.is_broken else record.lineage


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Label of an engine's responses: the version of its weights, and the version's metadata."""

    version: str = UNKNOWN_VERSION
    """Number of the version; another text if the weights did not come from the store."""
    run: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the version, such as the trainer's ``step``."""
    newest_run: str | None = None
    """Run of the version that the engine is getting ready, if it is another run than ``run``."""
    is_attested: bool = False
    """Whether a comparison while the engine served found its weights equal to the version's."""

    @classmethod
    def of(
        cls,
        version: Lineage | None,
        metadata: Mapping[str, Any],
        newest: int | VersionId | None = None,
        *,
        is_attested: bool = False,
    ) -> Self:
        """Make the label of an engine that has ``version`` and gets ``newest`` ready, if given."""
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
        values = {
            "version": self.version,
            "run": self.run,
            "metadata": self.metadata,
            "newest_run": self.newest_run,
            "attested": self.is_attested,
        }
        return {name: value for name, value in values.items() if value}

    def encode(self) -> str:
        """Return the label as a single text: the version, and the other values as JSON."""
        values = self.as_json()
        values.pop("version", None)  # absent if it is empty
        return f"{self.version} {json.dumps(values)}" if values else self.version

    @classmethod
    def decode(cls, text: str) -> Self:
        """Parse a text of :meth:`encode`; any other text becomes the label's ``version``."""
        version, _, further = text.partition(" ")
        try:
            values = json.loads(further) if further else {}
            values["is_attested"] = values.pop("attested", False)
            return cls(version, **values)
        except (ValueError, TypeError, AttributeError):
            return cls(text)


def describe_weights(version: Lineage | None) -> str:
    """Describe an engine's weights for a message: a version, or (None) no version."""
    if version is None:
        return "weights from outside the store (its checkpoint, or another load)"
    return f"version {version.id.number}"


PauseMode = Literal["keep", "wait", "abort", "in_place"]
"""Treatment of requests in flight: finish them first (``wait``), ``abort`` them, ``keep`` them and
recompute their caches with the new weights, or keep their caches too (``in_place``)."""

PAUSE_MODES = ("keep", "wait", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about one start of an engine."""

    instance_id: str
    name: str
    """Name among a store's receivers, if the options have no ``engine_id``."""
    num_ranks: int
    configured: EngineOptions | None = None
    replica: str = ""
    """Suffix of this replica's name; all replicas of an engine share the part before it."""
    begins_paused: bool = False
    """Whether the ranks wait for each other in each step. Following then begins in a pause:
    otherwise one rank could wait in a step while another waits in a gather, forever."""


class Engine:
    """An engine that can follow a store. :meth:`call` is the only way to its ranks."""

    is_server: bool = False
    """Whether the engine runs outside this process. It can then be restarted while it is followed,
    and a follower that dies in a switch leaves it paused."""
    has_own_pause: bool = False
    """Whether the engine tells a follower's pause from pauses of other programs: only
    :meth:`resume` ends the follower's pause, and it ends no other."""
    pauses: Collection[str] = PAUSE_MODES

    def close(self) -> None:
        """Close this process's connections to the engine."""

    def require_alive(self) -> None:
        """Raise :class:`EngineEndedError` if the engine is dead and cannot be restarted."""

    def is_idle(self) -> bool:
        """Whether the engine's event loop is not running, so that no call would be answered."""
        return False

    def require_pause(self, mode: PauseMode) -> None:
        """Raise if this kind of engine, or the way it was started, excludes a pause mode."""
        checks.choice("pause", mode, self.pauses)

    def facts(self) -> EngineFacts:
        raise NotImplementedError

    def call(self, request: messages.RankRequest) -> list[messages.RankAnswer]:
        return [messages.decode_answer(answer) for answer in self.send(request.as_json())]

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request in JSON to all ranks; return the answer of each rank, in JSON."""
        raise NotImplementedError

    def do(self, request: messages.RankRequest) -> ReceiverRecord | None:
        """Send a request to all ranks; return the engine's record if a rank answers with it.

        Raise the worst error that a rank answers with.
        """
        answers = self.call(request)
        if (worst := messages.worst_of(answers)) is not None:
            raise worst
        return next((answer for answer in answers if isinstance(answer, ReceiverRecord)), None)

    def is_paused(self) -> bool | None:
        """Return whether the engine is paused, by any process, or None if that is unknown."""
        return None

    def pause(self, mode: PauseMode) -> None:
        """Stop before the next step, and drop all caches computed with the present weights.

        With ``"in_place"`` keep the caches: requests in flight continue with them.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """End the pause of this follower, or a pause that a killed follower left."""

    def weight_version(self) -> str:
        raise NotImplementedError

    def set_weight_version(self, label: WeightLabel) -> None:
        """Set the label of the engine's responses. Some engines show only its version."""
        raise NotImplementedError


ENDPOINT_ATTR = "_dbuffer_endpoint"
"""Attribute of a model that holds its :class:`RankEndpoint`."""

ASLEEP = (
    "the engine's weights are asleep, and their memory may be gone: wake it up first (its weights "
    "are enough: tags=['weights']), then sync"
)


def require_unchanged(before: Mapping[str, object], present: Mapping[str, object]) -> None:
    """Raise :class:`UnsupportedError` if a layer or parameter of a model was replaced."""
    if replaced := [name for name, form in before.items() if present.get(name) != form]:
        raise UnsupportedError(
            f"something replaced {listed(replaced)} since following began, and the engine cannot "
            "load into the replacements: restart the engine"
        )


def tied_to(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, for each parameter, the name of the first parameter in the same memory.

    A load into one of two parameters that share memory changes both.
    """
    first: dict[tuple[torch.device, int], str] = {}
    return {
        name: first.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        for name, tensor in parameters.items()
    }


class EngineRank:
    """One rank of an engine, and its model. Each integration has a subclass.

    Its methods are called between two steps of the engine.
    """

    ranks: RankChannel
    module: torch.nn.Module
    """The model that serves, with its draft as a :class:`DraftedModel` if the draft follows too.
    :meth:`make_check` can replace it."""
    device: torch.device
    is_pipeline_stage: bool = False
    """Whether this rank has only some of the model's layers, and other ranks have the others."""
    not_weights: Collection[str] = (ENDPOINT_ATTR,)
    """Attributes of layers that serving changes, such as caches, and dbuffer's own attributes."""
    packing: Packing | None = None
    """The engine's way of packing layers, or None if dbuffer does not support it."""
    instance_id: str | None = None
    """Id of this start of the engine, the same on all ranks. Used if the follower sends none."""

    @property
    def on_device(self) -> bool:
        return self.device.type != "cpu"

    def engine_id(self, options: EngineOptions) -> str:
        raise NotImplementedError

    def make_check(self) -> ShapeCheck:
        """Return a check of published tensors against the model. It may run while serving."""
        raise NotImplementedError

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Load the weights of a version, which have passed the check of :meth:`make_check`.

        If this fails, the caller must repair the model. ``partial``: the tensors are for some
        layers only; the other layers keep their weights.
        """
        raise NotImplementedError

    def require_reloadable(self) -> None:
        """Raise :class:`UnsupportedError` if :meth:`load` cannot fill every tensor in use."""

    def load_checkpoint(self) -> None:
        """Load the weights that the engine was started with, from their original place."""
        raise NotImplementedError

    def load_draft_checkpoint(self) -> None:
        """Load the weights that the draft of a :class:`DraftedModel` was started with."""
        raise NotImplementedError

    def refuse_to_serve(self, reason: str) -> None:
        """Make every step of the model fail with this reason, until :meth:`serve_again`."""
        raise NotImplementedError

    def serve_again(self) -> None:
        """Undo :meth:`refuse_to_serve`, after all weights were loaded."""


@dataclass(slots=True)
class ModelState:
    """State of one rank's model: the version of its weights, and whether they may be used.

    The model's endpoint keeps the state, so it outlives each receiver.
    """

    version: Lineage | None = None
    """Version of `store` that the model has, or None if its weights are not a version."""
    metadata: dict[str, Any] = field(default_factory=dict)
    store: str | None = None
    must_reload: bool = False
    """Whether something other than dbuffer wrote the weights. The next update then reloads all of
    them. If False, the model has `version`, or the weights of the engine's start."""
    broken: str | None = None
    is_asleep: bool = False
    """Whether the weights are asleep. Sleeping weights must be neither read nor written."""
    is_updating: bool = False

    def note_loaded(self, version: Lineage | None, store: str, metadata: Mapping[str, Any]) -> None:
        self.version, self.store, self.must_reload = version, store, False
        self.metadata = metadata_for_record(metadata)

    def note_foreign_load(self) -> None:
        self.version, self.must_reload, self.metadata = None, True, {}

    def version_of(self, store: str) -> Lineage | None:
        return self.version if self.store == store else None

    def require_awake(self) -> None:
        if self.is_asleep:
            raise EngineBusyError(ASLEEP)
