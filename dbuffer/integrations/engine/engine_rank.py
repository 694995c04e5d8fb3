"""What a receiver needs of the rank that it is in, and of the model that serves there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from dbuffer.errors import EngineBusyError
from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.integrations.engine.plan.images import Packing
from dbuffer.integrations.engine.rank_channel import RankChannel
from dbuffer.integrations.engine.shape_check import ShapeCheck
from dbuffer.weights.targets import LoadedNames

ENDPOINT_ATTR = "_dbuffer_endpoint"
"""The attribute of a model under which it keeps what a follower reaches."""


class AppliedVersion(NamedTuple):
    """A version of a store: the one that an engine has, or one to switch it to."""

    version: int
    history: str | None
    """Which run of versions it belongs to; None: there is no store yet that would say."""

    def is_of_another_run(self, history: str | None) -> bool:
        """Whether versions of this history say nothing about this one."""
        return None not in (self.history, history) and self.history != history


@dataclass(slots=True)
class WeightsState:
    """State of a model's weights beside their version; shared by its successive receivers."""

    is_asleep: bool = False
    """The engine sleeps: the weights may be neither read nor written."""
    is_unknown: bool = False
    """Something else wrote or discarded them: the next update reloads all of them."""
    is_updating: bool = False
    """dbuffer is writing them."""

    def require_awake(self) -> None:
        """Raise :class:`EngineBusyError` while they are asleep."""
        if self.is_asleep:
            raise EngineBusyError(
                "the engine's weights are asleep, and their memory may be gone: wake it up first "
                "(its weights are enough: tags=['weights']), then sync"
            )


class ServingModel(Protocol):
    """The model of one rank, as it serves; called between two steps of the engine."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once.

        They have passed the check of :meth:`EngineRank.make_check`. ``partial``: layers that get
        nothing keep all that they have.
        """

    def load_checkpoint(self) -> None:
        """Swap in the weights that the engine was started with, from where it read them."""

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of this model fail, and say why, until :meth:`serve_again`."""

    def serve_again(self) -> None:
        """Take :meth:`refuse_to_serve` back, after whole weights were loaded."""


class EngineRank:
    """What a receiver needs to know of the rank that it is in; each engine has one of its own."""

    ranks: RankChannel
    """All ranks of the engine."""
    module: torch.nn.Module
    """The model that serves."""
    on_device: bool
    """Its weights are not in main memory."""
    is_stage: bool = False
    """It holds some of the model's layers only: other ranks hold the rest."""
    not_weights: Collection[str] = (ENDPOINT_ATTR,)
    """Attributes of its layers that change while it serves: its caches, and what is ours."""
    wrapper: str | None = None
    """What its layers are called in those that wrap them; None: none is wrapped."""
    packing: Packing | None = None
    """How its layers pack their weights, as far as that is known."""
    instance_id: str = ""
    """As the engine's follower knows it: different after each start, one for all ranks; empty
    where the follower always tells it."""

    def engine_id(self, options: EngineOptions) -> str:
        """The engine's name among the store's receivers; the same on all of its ranks."""
        raise NotImplementedError

    def make_model(self, before: ServingModel | None) -> ServingModel:
        """The model, to swap weights in; ``before`` is what an earlier receiver swapped them in."""
        raise NotImplementedError

    def make_check(self, *, partial: bool) -> ShapeCheck:
        """What tells, while the model serves, whether weights fit it, all or a part of them.

        And what the model's loaders do with them.
        """
        raise NotImplementedError


class ModelState(NamedTuple):
    """What one rank's model has; passed on from one receiver to the next."""

    model: ServingModel
    served: AppliedVersion | None = None
    """Out of the store; None: what the engine was started with."""
    broken: str | None = None
    """Why it refuses to serve."""
    loaded_names: LoadedNames | None = None
    """Which tensors versions contained, of whichever store."""
    weights: WeightsState | None = None
