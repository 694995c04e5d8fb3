"""`FollowerReport`: a follower's Prometheus metrics and log.

The metrics are in prometheus-client's default registry, which vLLM's ``/metrics`` shows.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from dbuffer.engine.contract import Switch
from dbuffer.errors import DBufferError
from dbuffer.format.lineage import Lineage, VersionId, number_of
from dbuffer.format.manifest import Lag, Manifest, lag_between, step_in
from dbuffer.runtime.extras import needed_for

logger = logging.getLogger(__name__)

GAUGES = {
    "following": "1 while the engine is kept on the newest version, 0 while that fails.",
    "version_applied": "Version that the engine serves; 0 on its first weights.",
    "version_attested": "Version that the engine serves, once its weights were found equal to it.",
    "version_available": "Newest version in the store.",
    "lag_versions": "Versions published and not yet applied.",
    "lag_steps": "Trainer's steps between the applied version and the newest.",
    "lag_seconds": "Age of the newest version, while it is not applied.",
}
"""Gauges and their descriptions, by name. If a gauge's value is unknown, the gauge is removed."""

RUN = "run"
"""Name of a gauge with a label of the same name. The gauge is 1 for the run (start of the sender)
of the version that the engine serves."""

_NO_LAGS: dict[str, None] = dict.fromkeys(("lag_versions", "lag_steps", "lag_seconds"))

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class FollowerReport:
    """Metrics and log of one engine's follower. If prometheus-client is missing, only the log."""

    def __init__(self) -> None:
        self._engine_id = ""
        self._families: dict[str, Any] = {}
        """Metrics by name; empty before :meth:`begin`."""
        self._run: str | None = None

    def begin(self, engine_id: str) -> None:
        """Begin to report, under this engine's name.

        Until this call, other methods report nothing.
        """
        self._engine_id = engine_id
        self._families = _registered()
        for name in self._families.keys() - GAUGES.keys() - {RUN}:
            self._metric(name)  # counters start at 0; gauges are added with their first value

    def following(self) -> None:
        self._set(following=1)

    def failed(self, version: int | None, *, is_engine_known: bool) -> None:
        """Report a failed attempt to switch to ``version``, or (if None) to look for a version."""
        self._add("failures")
        self._set(following=0)
        if version is None:
            self._set(version_available=None, **_NO_LAGS)
        if not is_engine_known:
            self._set(version_applied=None, version_attested=None, **_NO_LAGS)
            self._set_run(None)

    def ended(self) -> None:
        self._set(following=0, version_available=None, **_NO_LAGS)

    def switched(self, switch: Switch) -> None:
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
        self._observe("stage_seconds", switch.stage_s)
        self._observe("pause_seconds", switch.pause_s)
        self._add("bytes", switch.num_bytes)

    def lag(
        self,
        applied: Lineage | None,
        metadata: Mapping[str, Any],
        goal: int | VersionId | None,
        goal_manifest: Manifest | None,
        *,
        is_attested: bool,
    ) -> None:
        """Report how far the engine is behind the ``goal``, the store's version to switch to."""
        version = 0 if applied is None else applied.id.number
        newest = version if goal is None else number_of(goal)
        has_newest = goal is None and step_in(metadata) is not None
        lag, age_s = Lag(max(0, newest - version), 0 if has_newest else None), 0.0
        if goal_manifest is not None:
            age_s = max(0.0, time.time() - goal_manifest.published_at)
            lag = lag_between(applied, metadata, goal_manifest.lineage, goal_manifest.metadata)
        self._set(
            version_available=newest,
            version_applied=version,
            version_attested=version if is_attested else None,
            lag_versions=lag.versions,
            lag_steps=lag.steps,
            lag_seconds=age_s,
        )
        self._set_run(None if applied is None else applied.id.run)

    def _set_run(self, run: str | None) -> None:
        if RUN in self._families and run != self._run:
            for of_run, value in ((self._run, 0), (run, 1)):
                if of_run is not None:
                    self._families[RUN].labels(self._engine_id, of_run).set(value)
            self._run = run

    def _metric(self, name: str) -> Any:
        return self._families[name].labels(engine=self._engine_id)

    def _set(self, **values: float | None) -> None:
        """Set gauges by their names. Remove a gauge if its value is unknown (None)."""
        # Set NaN: prometheus-client cannot remove a gauge from the files of several processes.
        unknown = math.nan if "PROMETHEUS_MULTIPROC_DIR" in os.environ else None
        for name in values.keys() & self._families.keys():
            value = unknown if values[name] is None else values[name]
            if value is None:
                self._families[name].remove(self._engine_id)
            else:
                self._metric(name).set(value)

    def _add(self, name: str, amount: float = 1) -> None:
        if name in self._families:
            self._metric(name).inc(amount)

    def _observe(self, name: str, seconds: float) -> None:
        if name in self._families:
            self._metric(name).observe(seconds)


@functools.cache
def _registered() -> dict[str, Any]:
    try:
        with needed_for("/metrics"):
            from prometheus_client import Counter, Gauge, Histogram
    except DBufferError as error:
        logger.warning("no metrics: %s", str(error))
        return {}

    def gauge(name: str, text: str, *labels: str) -> Any:
        # If several processes write files for the same /metrics, use the newest value.
        all_labels = ["engine", *labels]
        return Gauge(f"dbuffer_{name}", text, all_labels, multiprocess_mode="mostrecent")

    def counter(name: str, text: str) -> Any:
        return Counter(f"dbuffer_{name}", text, ["engine"])

    def seconds(name: str, text: str) -> Any:
        return Histogram(f"dbuffer_{name}", text, ["engine"], buckets=_BUCKETS_S)

    return {
        **{name: gauge(name, text) for name, text in GAUGES.items()},
        RUN: gauge(RUN, "1 for the run of the version that the engine serves, 0 for others.", RUN),
        "bytes": counter("bytes", "Bytes of weights applied, per rank."),
        "stage_seconds": seconds("stage_seconds", "Making a version ready on the first rank."),
        "pause_seconds": seconds("pause_seconds", "Engine paused for a switch."),
        "failures": counter("failures", "Failed attempts to switch to the newest version."),
    }
