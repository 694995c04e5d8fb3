"""Prometheus metrics of a sender or of a mirror (a process that copies a store)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dbuffer.errors import DBufferError
from dbuffer.format.manifest import Lag
from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender
from dbuffer.runtime import options

Sender: TypeAlias = WeightSender | ShardedWeightSender
Source: TypeAlias = Sender | Mirror

_OF_SENDERS = {
    "versions": ("versions", "Versions published."),
    "bytes": ("bytes", "Bytes of the published versions' weights."),
    "deltas": ("deltas", "Versions published with a delta."),
    "delta_bytes": ("delta_bytes", "Bytes of the deltas."),
    "seconds": ("publish_s", "Time spent publishing."),
}
_OF_MIRRORS = {
    "versions": ("copied", "Versions copied."),
    "bytes": ("copied_bytes", "Bytes of weights copied."),
    "seconds": ("copy_s", "Time spent copying."),
    "failures": ("failures", "Failed attempts to copy."),
}


def register(source: Source, registry: CollectorRegistry = REGISTRY) -> Collector:
    """Add the metrics of a sender or a mirror to a registry of Prometheus.

    The metrics of a sender include the lags of its receivers. For a sharded sender, call this on
    rank 0. ``registry.unregister`` removes the returned collector, for instance before you register
    a new sender.

    Raises:
        OptionError: the registry already has the metrics of another sender or mirror.
    """
    collector = _Collector(source)
    try:
        registry.register(collector)
    except ValueError:  # the registry already has metrics with these names
        rule = (
            "a registry without metrics of another sender or mirror: make a registry for each, or "
            "unregister the earlier collector first"
        )
        options.refuse("registry", registry, rule)
    return collector


class _Collector(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        return self.collect()

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
            requests = CounterMetricFamily(
                "dbuffer_mirror_requests", "Requests to a bucket.", labels=["kind"]
            )
            for request, number in source.requests.items():
                requests.add_metric([request], number)
            yield requests
        else:
            run = GaugeMetricFamily("dbuffer_sender_run", "1, labeled by run.", labels=["run"])
            run.add_metric([source.run], 1)
            yield run
            yield from _lags(source)
        for name, (key, text) in counters.items():
            yield CounterMetricFamily(f"dbuffer_{kind}_{name}", text, source.stats[key])


def _lags(sender: Sender) -> Iterator[Metric]:
    lags: dict[str, Lag] = {}
    with contextlib.suppress(DBufferError):  # the next publish raises this error
        lags = sender.receiver_lags()
    versions = GaugeMetricFamily(
        "dbuffer_receiver_lag_versions",
        "Published versions that a receiver has not applied yet.",
        labels=["receiver"],
    )
    steps = GaugeMetricFamily(
        "dbuffer_receiver_lag_steps",
        "Trainer's steps between a receiver's version and the newest version.",
        labels=["receiver"],
    )
    for receiver, lag in lags.items():
        versions.add_metric([receiver], lag.versions)
        if lag.steps is not None:
            steps.add_metric([receiver], lag.steps)
    yield from (versions, steps)
