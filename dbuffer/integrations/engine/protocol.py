"""`Engine`: what following a store needs of an inference engine, and what it is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.messages import (
    BeginRequest,
    CheckRequest,
    EndRequest,
    RankAnswer,
    RankOutcome,
    RankRequest,
    worst_of,
)
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight: they are kept and go on with the new weights, their caches
recomputed; or waited for; or aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """How an engine was started, as far as it matters here."""

    instance_id: str
    """A different one after each start."""
    num_ranks: int
    configured: EngineOptions | None = None
    """The store and so on that it was started with, if with any."""


class Engine(Protocol):
    """What following needs of an engine.

    Four calls reach its ranks: :meth:`begin`, :meth:`update`, :meth:`check` and :meth:`end`. Each
    raises what the ranks answer: ``OptionError``, ``EngineUnsupportedError``,
    ``EngineUpdateError``, ``EngineBrokenError``.
    """

    @property
    def is_server(self) -> bool:
        """It runs apart from this process, and may be restarted while it is followed."""
        ...

    def close(self) -> None:
        """Release what this process holds of it."""
        ...

    def require_alive(self) -> None:
        """Raise :class:`EngineEndedError` if it is dead for good; a server may come back."""
        ...

    def facts(self) -> EngineFacts:
        """How it was started."""
        ...

    def default_id(self, facts: EngineFacts) -> str:
        """Its name among a store's receivers, unless one is given."""
        ...

    def begin(self, request: BeginRequest) -> None:
        """Let its ranks follow a store."""
        ...

    def update(self, request: UpdateRequest) -> None:
        """Let its ranks switch to a version; it is paused."""
        ...

    def check(self, tensors: Sequence[TensorSpec]) -> list[str]:
        """Why such tensors do not fit, on each rank on which they do not."""
        ...

    def end(self) -> None:
        """Let its ranks stop following."""
        ...

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and drop whatever was computed with the weights it has."""
        ...

    def resume(self) -> None:
        """Let it go on."""
        ...

    def weight_version(self) -> str:
        """What it reports with its responses."""
        ...

    def set_weight_version(self, version: str) -> None:
        """Let it report this with its responses."""
        ...


class RankCalls:
    """The four calls to an engine's ranks, over the one way there that a subclass has."""

    def ask(self, request: RankRequest) -> list[RankAnswer]:
        """Ask all ranks; what each answers."""
        raise NotImplementedError

    def begin(self, request: BeginRequest) -> None:
        """See :class:`Engine`, as for the others."""
        worst_of(self.ask(request)).require_done()

    def update(self, request: UpdateRequest) -> None:
        """Switch."""
        worst_of(self.ask(request)).require_done()

    def check(self, tensors: Sequence[TensorSpec]) -> list[str]:
        """Check."""
        answers = self.ask(CheckRequest(tensors=tuple(tensors)))
        worst_of(answers).require_done()
        return [answer.problem for answer in answers if answer.outcome is RankOutcome.MISFIT]

    def end(self) -> None:
        """End."""
        worst_of(self.ask(EndRequest())).require_done()
