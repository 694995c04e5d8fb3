"""How following goes, as Prometheus metrics in the process that follows.

For an engine in this process, and for a server that follows by itself, they are in the registry
that vLLM's own ``/metrics`` shows.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from typing import Any

logger = logging.getLogger(__name__)

GAUGES = {
    "following": "1 while the engine is kept on the newest version, 0 while that fails.",
    "version_applied": "Version that the engine serves; 0: what it was started with.",
    "version_available": "Newest version in the store.",
    "lag_versions": "Versions published and not yet applied.",
    "lag_seconds": "Age of the newest version, while it is not applied.",
}
"""What is not known just now is not there."""

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class EngineMetrics:
    """The metrics of one engine. Without prometheus-client it takes values and keeps none."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._families = _registered()
        # A gauge is there when there is something to say.
        self._metrics = {
            name: family.labels(engine=engine_id)
            for name, family in self._families.items()
            if name not in GAUGES
        }

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name in self._families:
            self._families[name].labels(engine=self._engine_id).set(value)

    def forget(self, *names: str) -> None:
        """Let gauges say nothing any more, until they are set again."""
        for name in names:
            if name not in self._families:
                continue
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # whose files cannot take a gauge back
                self.set(name, math.nan)
            else:
                self._families[name].remove(self._engine_id)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        if name in self._metrics and amount > 0:
            self._metrics[name].inc(amount)

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        if name in self._metrics:
            self._metrics[name].observe(seconds)


@functools.cache
def _registered() -> dict[str, Any]:
    """All metrics, registered once in a process."""
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        logger.warning("no metrics: prometheus-client is not installed")
        return {}

    def gauge(name: str, text: str) -> Any:
        # Of several processes that write files for one /metrics, the last one knows.
        return Gauge(f"dbuffer_{name}", text, ["engine"], multiprocess_mode="mostrecent")

    def counter(name: str, text: str) -> Any:
        return Counter(f"dbuffer_{name}", text, ["engine"])

    def seconds(name: str, text: str) -> Any:
        return Histogram(f"dbuffer_{name}", text, ["engine"], buckets=_BUCKETS_S)

    return {
        **{name: gauge(name, text) for name, text in GAUGES.items()},
        "bytes": counter("bytes", "Bytes of weights applied, per rank."),
        "stage_seconds": seconds("stage_seconds", "Making a version ready, while serving."),
        "pause_seconds": seconds("pause_seconds", "Engine paused for a switch."),
        "retries": counter("retries", "Switches that were tried again."),
        "evictions": counter("evictions", "Versions overwritten while a rank staged them."),
        "failures": counter("failures", "Times that it was not kept on the newest version."),
    }
