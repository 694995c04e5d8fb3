"""Prometheus metrics of a sender."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dbuffer.publish.resident import ResidentModel
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender


def register(
    sender: WeightSender | ShardedWeightSender | ResidentModel,
    registry: CollectorRegistry = REGISTRY,
) -> None:
    """Show what a sender counts in a registry; of a sharded one, rank 0's will do."""
    registry.register(_SenderCollector(sender))


class _SenderCollector(Collector):
    """Asks the sender when it is asked itself."""

    def __init__(self, sender: WeightSender | ShardedWeightSender | ResidentModel) -> None:
        self._sender = sender

    def collect(self) -> Iterator[Metric]:
        stats = self._sender.stats
        for name, key, text in (
            ("versions", "versions", "Versions published."),
            ("bytes", "bytes", "Bytes of their weights."),
            ("deltas", "deltas", "Those to which a delta leads from the version before."),
            ("delta_bytes", "delta_bytes", "Bytes of the deltas."),
            ("seconds", "publish_s", "Time that publishing took."),
        ):
            yield CounterMetricFamily(f"dbuffer_sender_{name}", text, stats[key])
