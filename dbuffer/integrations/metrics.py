"""Prometheus metrics of a sender or a mirror."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.resident import ResidentModel
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender

Source: TypeAlias = WeightSender | ShardedWeightSender | ResidentModel | Mirror

_OF_SENDERS = {
    "versions": ("versions", "Versions published."),
    "bytes": ("bytes", "Bytes of their weights."),
    "deltas": ("deltas", "Those to which a delta leads from the version before."),
    "delta_bytes": ("delta_bytes", "Bytes of the deltas."),
    "seconds": ("publish_s", "Time that publishing took."),
}
_OF_MIRRORS = {
    "versions": ("copied", "Versions copied."),
    "bytes": ("copied_bytes", "Bytes of weights copied."),
    "seconds": ("copy_s", "Time it took."),
    "failures": ("failures", "Attempts that failed."),
}


def register(source: Source, registry: CollectorRegistry = REGISTRY) -> None:
    """Show the counts of a sender or a mirror in a registry; of a sharded sender, on rank 0."""
    registry.register(_Collector(source))


class _Collector(Collector):
    """Collector that reads the counts whenever the registry is read."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        source, kind, counters = self._source, "sender", _OF_SENDERS
        if isinstance(source, Mirror):
            kind, counters = "mirror", _OF_MIRRORS
            yield GaugeMetricFamily(
                "dbuffer_mirror_elected", "Whether this mirror copies.", float(source.is_elected)
            )
            yield GaugeMetricFamily(
                "dbuffer_mirror_version", "Newest version copied.", source.version or 0
            )
        for name, (key, text) in counters.items():
            yield CounterMetricFamily(f"dbuffer_{kind}_{name}", text, source.stats[key])
