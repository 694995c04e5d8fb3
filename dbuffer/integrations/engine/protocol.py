"""`Engine`: what following a store needs of an inference engine, and what it is told of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine import messages
from dbuffer.integrations.engine.engine_options import PAUSE_MODES, EngineOptions

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight: they are kept and go on with the new weights, their caches
recomputed; or waited for; or aborted."""


UNKNOWN_VERSION = "unknown"
"""Weight version of an engine whose weights are, or may be, no version of its store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """How an engine was started, as far as it matters here."""

    instance_id: str
    """A different one after each start."""
    name: str
    """What it goes by among a store's receivers, unless a name is given."""
    num_ranks: int
    configured: EngineOptions | None = None
    """The store and so on that it was started with, if with any."""
    replica: str = ""
    """What follows the name that its replicas share, in the name of this one."""
    begins_paused: bool = False
    """Its ranks meet in each step: they may tell each other something only while it is paused, or
    one of them waits in a step for another, which waits for it to tell something."""


class Engine:
    """What following needs of an engine; :meth:`ask` is the one way to its ranks.

    What is not overridden is as with one in this process, which does nothing between two calls.
    """

    is_server: bool = False
    """It runs apart from this process, and may be restarted while it is followed."""
    may_be_left_paused: bool = False
    """Another process may have followed it before, and have died in a switch."""
    pauses: Collection[str] = PAUSE_MODES
    """Which modes of pausing it has."""

    def close(self) -> None:
        """Release what this process holds of it."""

    def require_alive(self) -> None:
        """Raise :class:`EngineEndedError` if it is dead for good; a server may come back."""

    def facts(self) -> EngineFacts:
        """How it was started."""
        raise NotImplementedError

    def ask(self, request: messages.RankRequest) -> list[messages.RankAnswer]:
        """Ask all ranks; what each answers."""
        raise NotImplementedError

    def do(self, request: messages.RankRequest) -> None:
        """Let all ranks do something, or raise what the one answers on which it went worst."""
        messages.worst_of(self.ask(request)).require_done()

    def misfits(self, tensors: Sequence[TensorSpec]) -> list[str]:
        """Why such tensors do not fit, on each rank on which they do not."""
        answers = self.ask(messages.CheckRequest(tensors=tuple(tensors)))
        messages.worst_of(answers).require_done()
        return [
            answer.problem for answer in answers if answer.outcome is messages.RankOutcome.MISFIT
        ]

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        return False

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and drop whatever was computed with the weights it has."""
        raise NotImplementedError

    def resume(self) -> None:
        """Let it go on."""

    def weight_version(self) -> str:
        """What it reports with its responses."""
        raise NotImplementedError

    def set_weight_version(self, version: str) -> None:
        """Let it report this with its responses."""
        raise NotImplementedError
