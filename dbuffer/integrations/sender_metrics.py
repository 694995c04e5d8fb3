"""What a sender has published, and how a mirror does, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.resident import ResidentModel
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender


def register(
    sender: WeightSender | ShardedWeightSender | ResidentModel,
    registry: CollectorRegistry = REGISTRY,
) -> None:
    """Show what a sender counts in a registry; of a sharded one, rank 0's will do."""

    def collect() -> Iterator[Metric]:
        stats = sender.stats
        for name, key, text in (
            ("versions", "versions", "Versions published."),
            ("bytes", "bytes", "Bytes of their weights."),
            ("deltas", "deltas", "Those to which a delta leads from the version before."),
            ("delta_bytes", "delta_bytes", "Bytes of the deltas."),
            ("seconds", "publish_s", "Time that publishing took."),
        ):
            yield CounterMetricFamily(f"dbuffer_sender_{name}", text, stats[key])

    registry.register(_Collector(collect))


def register_mirror(mirror: Mirror, registry: CollectorRegistry = REGISTRY) -> None:
    """Show a mirror's state in a registry."""

    def collect() -> Iterator[Metric]:
        stats = mirror.stats
        yield GaugeMetricFamily(
            "dbuffer_mirror_elected", "Whether this mirror copies.", float(mirror.is_elected)
        )
        yield GaugeMetricFamily(
            "dbuffer_mirror_version", "Newest version copied.", mirror.version or 0
        )
        for name, key, text in (
            ("versions", "copied", "Versions copied."),
            ("bytes", "copied_bytes", "Bytes of weights copied."),
            ("seconds", "copy_s", "Time it took."),
            ("failures", "failures", "Attempts that failed."),
        ):
            yield CounterMetricFamily(f"dbuffer_mirror_{name}", text, stats[key])

    registry.register(_Collector(collect))


class _Collector(Collector):
    """Asks a sender or a mirror when it is asked itself."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()
