"""Guarantee 1, no mix, and 2, forward only: one writer at full speed, four readers.

Three layers keep a read whole, and each is tested with those before it switched off. A fourth
case switches off all three and must see torn reads: without it, nothing here would prove that
the readers could have seen one.

Across a network none of them is needed: no file is written twice, and none goes while somebody
says that he reads it. Here a file that was removed answers as a file server would.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.format import chain, layout
from dbuffer.io.copier import Copier
from dbuffer.receive.reader import VersionReader
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.open_version import OpenStoreVersion, OvertakenError
from dbuffer.testing.moments import LOOKS, at_call
from dbuffer.testing.patterns import Sparse
from tests.support.children import Child
from tests.support.patterns import SMALL, Pattern, publish
from tests.support.soak import IN_SOAKS_ALONE, Record, is_soak, patience_s
from tests.support.stores import without_flock

NUM_PUBLISHES = 20_000 if is_soak() else 50
NUM_PUBLISHES_ACROSS_A_NETWORK = 6_000 if is_soak() else 30
"""Each takes longer: three files are flushed, and three directories."""
NUM_READERS = 4
IDLE_S = 0.005
"""Pause of a reader that finds nothing new."""
NUM_THREADS = 3
"""In each process, at once."""
WEIGHTS = Pattern(num_tensors=64, numel=2048)  # 16 KiB each, 1 MiB in all
CHANGING = Sparse(num_tensors=64, numel=2048, one_in=64)  # as large


@dataclass(frozen=True)
class Layers:
    """What keeps readers from mixing versions."""

    locks: bool = False
    generations: bool = False
    checksums: bool = False
    announces: bool | None = None
    """Across a network: whether readers say what they read."""
    delta: bool = False
    """Whether versions differ little, and what differs is published."""

    @property
    def pattern(self) -> Pattern:
        return CHANGING if self.delta else WEIGHTS

    @property
    def is_network(self) -> bool:
        return self.announces is not None

    @property
    def keeps_snapshots_whole(self) -> bool:
        """Or nothing is kept whole. A snapshot's checksums are compared as it is opened only."""
        return not self.checksums and not self.is_network

    @property
    def num_publishes(self) -> int:
        return NUM_PUBLISHES_ACROSS_A_NETWORK if self.is_network else NUM_PUBLISHES


EACH_LAYER = {
    "locks": (Layers(locks=True, generations=True), "try_lock"),
    "generations alone": (Layers(generations=True), "is_unchanged"),
    "checksums alone": (Layers(checksums=True), "verify"),
}
"""Layers, and the one of them that must have found a reader and a writer on one buffer."""


def switch_off_what_is_not_in(layers: Layers) -> None:
    if not layers.locks:
        without_flock()
    if not layers.generations:
        OpenStoreVersion.is_unchanged = lambda self: True
    if layers.is_network:
        os.environ["DBUFFER_MOUNT"] = "network"
        layout.SPAN_BYTES = 32 * 1024  # so that a reader is in the middle of a file for long
        TIMING.keep_superseded_s = 0.0
        os.pread, os.preadv = stale_if_removed(os.pread), stale_if_removed(os.preadv)
    if layers.announces is False:
        WeightReceiver._announce = lambda self, version: None


def stale_if_removed(function: Any) -> Any:
    """A file server knows no file that has no name."""

    def call(descriptor: int, *arguments: Any) -> Any:
        if os.fstat(descriptor).st_nlink == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return function(descriptor, *arguments)

    return call


def count_detections(counts: Counter[str]) -> None:
    """Count how often each layer has found a reader and a writer on one buffer."""

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> bool:
            try:
                result: bool = function(*args, **kwargs)
            except OvertakenError:
                counts[name] += 1
                raise
            counts[name] += result is False
            return result

        setattr(owner, name, counting)

    counted(filesystem, "try_lock")
    counted(OpenStoreVersion, "is_unchanged")
    counted(VersionReader, "verify")
    counted(OpenStoreVersion, "wait_after_loss")
    count_threads(counts)


def copy_with_pauses(rng: random.Random, longest_s: float) -> None:
    """Make some copies take longer than two publishes, so that the writer comes round.

    All threads copy at once, and each has pauses of its own.
    """
    in_parallel = Copier.in_parallel

    def in_parallel_with_pauses(self: Copier, work: Any, slices: Any) -> None:
        end = max((last for _, last in slices), default=0)
        pauses = {}
        if rng.random() < 0.5:
            pauses = {at: rng.uniform(0, longest_s) for at in rng.sample(range(end), min(3, end))}

        def work_slowly(first: int, end: int) -> None:
            for index in range(first, end):
                time.sleep(pauses.get(index, 0))
                work(index, index + 1)

        in_parallel(self, work_slowly, slices)

    Copier.in_parallel = in_parallel_with_pauses


def count_threads(counts: Counter[str]) -> None:
    """Count the copies that more than one thread has made."""
    in_parallel = Copier.in_parallel

    def counting(self: Copier, work: Any, slices: Any) -> None:
        threads = set()

        def work_seen(first: int, end: int) -> None:
            threads.add(threading.get_ident())
            work(first, end)

        in_parallel(self, work_seen, slices)
        counts["concurrent copies"] += len(threads) > 1

    Copier.in_parallel = counting


def write(connection: Connection, store: Path, layers: Layers) -> None:
    counts: Counter[str] = Counter()
    switch_off_what_is_not_in(layers)
    count_detections(counts)
    chain.MAX_CHAIN = 8
    with dbuffer.WeightSender(
        store,
        checksum=layers.checksums or (layers.delta and layers.is_network),
        delta=layers.delta,
        num_threads=NUM_THREADS,
    ) as sender:
        sender.send(layers.pattern.weights(1))
        connection.send("published")
        connection.recv()
        # So often that readers on a slow machine come to an end several times.
        between_pauses = min(50, layers.num_publishes // 8)
        for version in range(2, layers.num_publishes + 1):
            sent_s = sender.send(layers.pattern.weights(version)).duration_s
            if version % between_pauses == 0:
                time.sleep(max(0.02, min(10 * sent_s, 0.2)))
    connection.send(counts)


def read(connection: Connection, store: Path, layers: Layers, seed: int) -> None:
    """Load the newest version again and again; send what came of it."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    switch_off_what_is_not_in(layers)
    count_detections(counts)
    # A writer that respects locks waits for the readers, and all publishes are to end in seconds.
    copy_with_pauses(rng, 0.001 if layers.locks else 0.01)
    longest_delay_s = 0.04 if layers.locks else 0.01
    pattern = layers.pattern
    target = pattern.empty()
    versions: list[int] = []
    connection.send("ready")
    verify = "auto" if layers.delta and layers.is_network else layers.checksums
    with dbuffer.WeightReceiver(store, verify=verify, num_threads=NUM_THREADS) as receiver:
        while not versions or versions[-1] < layers.num_publishes:
            holds = layers.keeps_snapshots_whole and rng.random() < 0.3
            try:
                if holds:
                    pause_s = rng.uniform(0, 0.001 if layers.locks else 0.02)
                    found = hold(receiver, pause_s, pattern)
                else:
                    found = receiver.load_into(target), pattern.version_of(target)
            except dbuffer.SnapshotEvictedError:
                counts["evicted"] += 1
                continue
            if found[0] is None:
                time.sleep(IDLE_S)
                continue
            counts["reads"] += 1
            counts["mixes"] += found[0] != found[1]
            counts["torn snapshots"] += holds and found[0] != found[1]
            versions.append(found[0])
            time.sleep(rng.choice((0, rng.uniform(0, longest_delay_s))))
    counts["steps back"] = sum(b < a for a, b in itertools.pairwise(versions))
    connection.send(counts)


def hold(receiver: WeightReceiver, pause_s: float, pattern: Pattern) -> tuple[int, int | None]:
    """Look at a snapshot twice, with a pause in between."""
    with receiver.open() as snapshot:
        first = pattern.version_of(snapshot.tensors)
        time.sleep(pause_s)
        second = pattern.version_of(snapshot.tensors)
        return snapshot.version, first if first == second else None


def run(store: Path, layers: Layers) -> tuple[Counter[str], list[Counter[str]]]:
    """What the writer and each reader have counted."""
    with contextlib.ExitStack() as children:
        writer = children.enter_context(Child(write, store, layers))
        assert writer.receive() == "published"
        readers = [
            children.enter_context(Child(read, store, layers, seed)) for seed in range(NUM_READERS)
        ]
        for reader in readers:
            assert reader.receive() == "ready"
        writer.send("go")
        return writer.receive(patience_s()), [reader.receive() for reader in readers]


def require_reads(read: list[Counter[str]]) -> None:
    """Require enough reads to show something; on a busy machine one reader may have few of them."""
    assert all(counts["reads"] > 0 for counts in read)
    assert sum(counts["reads"] for counts in read) >= 5 * len(read)


def tell(read: list[Counter[str]], layers: Layers, record_property: Record) -> None:
    record_property("versions published to readers at full speed", layers.num_publishes)
    record_property("reads of them, of which none was torn", sum(c["reads"] for c in read))


@pytest.mark.parametrize("case", EACH_LAYER)
@pytest.mark.parametrize("delta", [False, pytest.param(True, marks=IN_SOAKS_ALONE)])
def test_no_reader_mixes_versions_or_goes_back(store, case, delta, record_property):
    layers, detector = EACH_LAYER[case]
    layers = replace(layers, delta=delta)
    written, read = run(store, layers)
    tell(read, layers, record_property)
    for counts in read:
        assert counts["mixes"] == 0
        assert counts["steps back"] == 0
    require_reads(read)
    assert sum(counts[detector] for counts in (written, *read)) > 0, "nothing was put to the test"
    # On a busy machine one reader may have few reads, and each of them by one thread.
    assert written["concurrent copies"] > 0
    assert sum(counts["concurrent copies"] for counts in read) > 0
    if not layers.locks and layers.keeps_snapshots_whole:
        assert sum(counts["evicted"] for counts in read) > 0, "no snapshot was put to the test"


@pytest.mark.parametrize("delta", [False, True])
def test_across_a_network_no_reader_mixes_versions_or_loses_its_file(store, delta, record_property):
    layers = Layers(announces=True, delta=delta)
    _, read = run(store, layers)
    tell(read, layers, record_property)
    for counts in read:
        assert counts["mixes"] == 0
        assert counts["steps back"] == 0
        assert counts["wait_after_loss"] == 0, "a file went while a reader said that it reads it"
    require_reads(read)


def test_across_a_network_readers_that_say_nothing_lose_files_and_try_again(store):
    """The control; and what happens to readers that may not write a record."""
    _, read = run(store, Layers(announces=False))
    for counts in read:
        assert counts["mixes"] == 0
        assert counts["steps back"] == 0
    assert sum(counts["wait_after_loss"] for counts in read) > 0


def test_without_any_layer_readers_do_mix_versions(store):
    """The control: readers as slow as these do see torn weights when nothing keeps them whole."""
    _, read = run(store, Layers())
    assert sum(counts["mixes"] - counts["torn snapshots"] for counts in read) > 0
    assert sum(counts["torn snapshots"] for counts in read) > 0


def test_writer_that_comes_round_while_a_reader_takes_hold(shm_path):
    """Two publishes between any two looks of the reader: it must end up with what it says."""
    for number in itertools.count(1):
        if not come_round(shm_path / f"{number}", number):
            break
    assert number > 15


def come_round(store: Path, number: int) -> bool:
    """Publish twice before that call of a reader that takes hold; False: it makes fewer."""
    came_round = []

    def publish_twice() -> None:
        publish(sender, 3, 4)
        came_round.append(True)

    with (
        dbuffer.WeightSender(store, reader_timeout_s=0.05, num_threads=1) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        contextlib.ExitStack() as leave,
    ):
        publish(sender, 1, 2)
        receiver.wait_for_version(1)
        at_call(number, publish_twice, LOOKS)
        snapshot = leave.enter_context(receiver.open())
        sys.setprofile(None)
        assert SMALL.version_of(snapshot.tensors) == snapshot.version
        if snapshot.version == 4 or not came_round:
            leave.close()
        else:
            with pytest.raises(dbuffer.SnapshotEvictedError):
                leave.close()
    return bool(came_round)
