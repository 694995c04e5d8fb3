"""What a receiver needs of the rank that it is in, and of the model that serves there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.options import EngineOptions
from dbuffer.integrations.engine.plan.images import Packing
from dbuffer.integrations.engine.plan.recording import Recording
from dbuffer.integrations.engine.ranks import Ranks
from dbuffer.store.buffer import are_apart
from dbuffer.weights.targets import LoadedNames

KEPT_AS = "_dbuffer_endpoint"
"""The attribute of a model under which it keeps what a follower reaches."""


class Served(NamedTuple):
    """A version of a store: the one that an engine has, or one to switch it to."""

    version: int
    history: str | None
    """Which run of versions it belongs to; None: not known, or published in format 1."""

    def is_of_another_run(self, history: str | None) -> bool:
        """Whether versions of this history say nothing about this one."""
        return are_apart(self.history, history)


class ServingModel(Protocol):
    """The model of one rank, as it serves; called between two steps of the engine."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once.

        Args:
            tensors: names and tensors; what the check of :meth:`EngineRank.make_check` let pass.
            partial: layers that get nothing keep all that they have.
        """
        ...

    def load_checkpoint(self) -> None:
        """Swap in the weights that the engine was started with, from where it read them."""
        ...

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of this model fail, and say why, until :meth:`serve_again`."""
        ...

    def serve_again(self) -> None:
        """Take :meth:`refuse_to_serve` back, after whole weights were loaded."""
        ...


class FitCheck(Protocol):
    """Whether weights fit a model, and what its loaders do with them."""

    def __call__(self, specs: Sequence[TensorSpec], /) -> Recording:
        """Refuse tensors that do not fit.

        Raises:
            WeightsMismatchError: a name or a shape is not the model's, or a tensor is missing.
        """
        ...

    def loaded(self, name: str, tensors: Mapping[str, torch.Tensor], /) -> torch.Tensor:
        """What the loaders make of some tensors with data, in the parameter of this name."""
        ...


class EngineRank(Protocol):
    """What a receiver needs to know of the rank that it is in."""

    @property
    def ranks(self) -> Ranks:
        """All ranks of the engine."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The model that serves."""
        ...

    @property
    def not_weights(self) -> Collection[str]:
        """Attributes of its layers that change while it serves: its caches, and what is ours."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How its layers pack their weights, as far as that is known."""
        ...

    @property
    def on_device(self) -> bool:
        """Its weights are not in main memory."""
        ...

    @property
    def instance_id(self) -> str:
        """As the engine's follower knows it: different after each start, one for all ranks."""
        ...

    def engine_id(self, options: EngineOptions) -> str:
        """The engine's name among the store's receivers; the same on all of its ranks."""
        ...

    def make_model(self, before: ServingModel | None) -> ServingModel:
        """The model, to swap weights in; ``before`` is what an earlier receiver swapped them in."""
        ...

    def make_check(self, *, partial: bool) -> FitCheck:
        """What tells, while the model serves, whether weights fit it, all or a part of them.

        And what the model's loaders do with them.
        """
        ...


class Serving(NamedTuple):
    """What one rank's model has; passed on from one receiver to the next."""

    model: ServingModel
    served: Served | None = None
    """Out of the store; None: what the engine was started with."""
    broken: str | None = None
    """Why it refuses to serve."""
    loaded_names: LoadedNames | None = None
    """Which tensors versions contained, of whichever store."""
