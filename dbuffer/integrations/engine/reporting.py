"""`FollowerReport`: what a follower tells of its engine, to metrics and to the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.engine.metrics import EngineMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """An engine has switched."""

    version: int
    stage_s: float
    """Making it ready on the slowest rank, while the engine served."""
    wait_s: float
    """From seeing it in the store to its being ready on all ranks."""
    pause_s: float
    """From the order to pause to the engine's going on; draining requests included."""
    load_s: float
    """The part of the pause in which ranks agree and load."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The last attempt failed."""

    version: int | None
    """To switch to this version; None: before one was found."""

    def is_another(self, before: Failure | None) -> bool:
        """Whether it begins an incident, and is not one more failure of the one before."""
        if before is None:
            return True
        return None not in (self.version, before.version) and self.version != before.version


class FollowerReport:
    """One engine's metrics and log. A gauge whose value is not known is not there."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._metrics = EngineMetrics(engine_id)
        self._rank_stats: dict[str, dict[str, float]] = {}

    def following(self) -> None:
        """An attempt succeeded, or found nothing to do."""
        self._metrics.set("following", 1)

    def failed(self, failure: Failure, before: Failure | None, *, is_engine_known: bool) -> None:
        """An attempt failed; an incident counts once."""
        self._metrics.add("failures", 1 if failure.is_another(before) else 0)
        self._metrics.set("following", 0)
        if failure.version is None:
            self._metrics.forget("version_available", "lag_versions", "lag_seconds")
        if not is_engine_known:
            self._metrics.forget("version_applied", "lag_versions", "lag_seconds")

    def retried(self) -> None:
        """It is about to be tried again."""
        self._metrics.add("retries")

    def ended(self) -> None:
        """It is followed no longer."""
        self._metrics.set("following", 0)
        self._metrics.forget("version_available", "lag_versions", "lag_seconds")

    def switched(self, switch: Switch) -> None:
        """It serves another version."""
        logger.info(
            "%s serves version %d: ready on all ranks after %.1f ms (staged in %.1f ms), paused "
            "for %.1f ms, %.1f MB",
            self._engine_id,
            switch.version,
            1e3 * switch.wait_s,
            1e3 * switch.stage_s,
            1e3 * switch.pause_s,
            switch.num_bytes / 1e6,
        )
        self._metrics.observe("pause_seconds", switch.pause_s)
        self._metrics.add("bytes", switch.num_bytes)

    def lag(self, *, available: int, applied: int, num_behind: int, age_s: float) -> None:
        """How far it is behind the store."""
        self._metrics.set("version_available", available)
        self._metrics.set("version_applied", applied)
        self._metrics.set("lag_versions", num_behind)
        self._metrics.set("lag_seconds", age_s)

    def ranks(self, records: Iterable[ReceiverRecord]) -> None:
        """Carry what ranks count over into this process's metrics."""
        for record in records:
            before = self._rank_stats.get(record.receiver, {})
            self._rank_stats[record.receiver] = record.stats
            gained = {name: value - before.get(name, 0) for name, value in record.stats.items()}
            self._metrics.add("evictions", gained.get("evictions", 0))
            if gained.get("staged", 0) > 0:
                self._metrics.observe("stage_seconds", gained["stage_s"] / gained["staged"])
