"""`Engine`: the calls by which a follower drives an inference engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.engine import messages
from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.integrations.engine.weight_label import WeightLabel
from dbuffer.runtime import options as checks

PauseMode = Literal["keep", "wait", "abort", "in_place"]
"""Treatment of requests in flight: they are kept and go on with the new weights, their caches
recomputed; or waited for; or aborted; or kept with their caches."""

PAUSE_MODES = ("keep", "wait", "abort")
"""Modes of an engine of which nothing else is said."""


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
    """Whether it must be paused when following begins. Ranks that meet in each step can exchange
    messages only in a pause: otherwise one waits in a step for another, which waits for it."""


class Engine:
    """An engine that can follow a store; :meth:`call` is the one way to its ranks.

    The defaults fit an engine in this process, which does nothing between two calls.
    """

    is_server: bool = False
    """Whether it runs apart from this process, and may be restarted while it is followed."""
    may_be_left_paused: bool = False
    """Whether another process may have followed it before, and have died in a switch."""
    has_own_pause: bool = False
    """Whether it tells a follower's pause from any other: a resume by others does not end it, and
    :meth:`resume` ends no other."""
    pauses: Collection[str] = PAUSE_MODES
    """Modes of pausing that its kind has."""

    def close(self) -> None:
        """Release what this process holds of it."""

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
        raise NotImplementedError

    def do(self, request: messages.RankRequest) -> ReceiverRecord | None:
        """Let all ranks do something, or raise the worst of their errors.

        Return the engine's record, if a rank answers with it.
        """
        answers = self.call(request)
        worst = messages.worst_of(answers)
        if worst is not None:
            raise worst
        return messages.record_in(answers)

    def is_paused(self) -> bool | None:
        """Whether it is paused, by this follower or by another process; None: it does not tell."""
        return None

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and drop every cache computed with the present weights.

        With ``"in_place"``, drop none: requests in flight go on with theirs.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """End the pause of this follower, or of one that was killed."""

    def weight_version(self) -> str:
        """Return the version in the label that it reports with its responses."""
        raise NotImplementedError

    def set_weight_version(self, label: WeightLabel) -> None:
        """Set the label that it reports with its responses; some engines report all of it."""
        raise NotImplementedError
