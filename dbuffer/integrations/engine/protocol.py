"""`Engine`: what following a store needs of an inference engine, and what it is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dbuffer.integrations.engine.options import EngineOptions

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight: they are kept and go on with the new weights, their caches
computed anew; or waited for; or aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """How an engine was started, as far as it matters here."""

    instance_id: str
    """Another one after each start."""
    num_ranks: int
    configured: EngineOptions | None = None
    """What it was started with; its workers follow already, then."""
    has_backend: bool = False
    """It is a vLLM with ``backend="dbuffer"``: its own weight transfer drives its workers."""


class Engine(Protocol):
    """What following needs of an engine."""

    @property
    def is_server(self) -> bool:
        """It runs apart from this process, and may be started again while it is followed."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...

    def facts(self) -> EngineFacts:
        """How it was started."""
        ...

    def default_id(self, facts: EngineFacts) -> str:
        """Its name among a store's receivers, where nobody gave it one."""
        ...

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all its workers; what each returned."""
        ...

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and forget whatever was computed with the weights it has."""
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
