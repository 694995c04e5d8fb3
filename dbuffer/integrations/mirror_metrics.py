"""Prometheus metrics of a mirror."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dbuffer.mirror.mirror import Mirror


def register(mirror: Mirror, registry: CollectorRegistry = REGISTRY) -> None:
    """Show a mirror's state in a registry."""
    registry.register(_MirrorCollector(mirror))


class _MirrorCollector(Collector):
    """Asks the mirror when it is asked itself."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def collect(self) -> Iterator[Metric]:
        stats = self._mirror.stats
        yield GaugeMetricFamily(
            "dbuffer_mirror_elected", "Whether this mirror copies.", float(self._mirror.is_elected)
        )
        yield GaugeMetricFamily(
            "dbuffer_mirror_version", "Newest version copied.", self._mirror.version or 0
        )
        for name, key, text in (
            ("versions", "copied", "Versions copied."),
            ("bytes", "copied_bytes", "Bytes of weights copied."),
            ("seconds", "copy_s", "Time it took."),
            ("failures", "failures", "Attempts that failed."),
        ):
            yield CounterMetricFamily(f"dbuffer_mirror_{name}", text, stats[key])
