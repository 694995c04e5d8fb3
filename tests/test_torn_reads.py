"""Guarantee 1, no mix, and 2, forward only: one writer at full speed, four readers.

Three layers keep a read whole, and each is tested with those before it switched off. A fourth
case switches off all three and must see torn reads: without it, nothing here would prove that
the readers could have seen one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support import SMALL, Child, Pattern, Step, at_step, without_flock

import dbuffer
from dbuffer import filesystem
from dbuffer.buffer import DoubleBuffer
from dbuffer.receiver import WeightReceiver
from dbuffer.tensors import Copier

NUM_PUBLISHES = 2000
NUM_READERS = 4
WEIGHTS = Pattern(num_tensors=64, numel=2048)  # 16 KiB each, 1 MiB in all


@dataclass(frozen=True)
class Layers:
    """What keeps readers from mixing versions."""

    locks: bool
    generations: bool
    checksums: bool


LOCKS = Layers(locks=True, generations=True, checksums=False)
GENERATIONS = Layers(locks=False, generations=True, checksums=False)
CHECKSUMS = Layers(locks=False, generations=False, checksums=True)
NOTHING = Layers(locks=False, generations=False, checksums=False)


def switch_off_what_is_not_in(layers: Layers) -> None:
    if not layers.locks:
        without_flock()
    if not layers.generations:
        DoubleBuffer.is_unchanged = lambda self, held: True


def count_detections(counts: Counter[str]) -> None:
    """Count how often each layer has found a reader and a writer on one buffer."""

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> bool:
            result: bool = function(*args, **kwargs)
            counts[name] += not result
            return result

        setattr(owner, name, counting)

    counted(filesystem, "try_lock")
    counted(DoubleBuffer, "is_unchanged")
    counted(WeightReceiver, "_is_right")


def copy_with_pauses(rng: random.Random, longest_s: float) -> None:
    """Make some copies take longer than two publishes, so that the writer comes round."""

    def in_parallel(self: Copier, work: Any, slices: Any) -> None:
        end = max(last for _, last in slices)
        pauses = rng.sample(range(end), 3) if rng.random() < 0.5 else ()
        for index in range(end):
            if index in pauses:
                time.sleep(rng.uniform(0, longest_s))
            work(index, index + 1)

    Copier.in_parallel = in_parallel


def write(connection: Connection, store: Path, layers: Layers) -> None:
    counts: Counter[str] = Counter()
    switch_off_what_is_not_in(layers)
    count_detections(counts)
    with dbuffer.WeightSender(store, checksum=layers.checksums, num_threads=1) as sender:
        sender.send(WEIGHTS.weights(1))
        connection.send("published")
        connection.recv()
        for version in range(2, NUM_PUBLISHES + 1):
            sender.send(WEIGHTS.weights(version))
    connection.send(counts)


def read(connection: Connection, store: Path, layers: Layers, seed: int) -> None:
    """Load the newest version again and again; send what came of it."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    switch_off_what_is_not_in(layers)
    count_detections(counts)
    # A writer that respects locks waits for the readers, and 2,000 publishes are to end in seconds.
    copy_with_pauses(rng, 0.001 if layers.locks else 0.01)
    longest_delay_s = 0.04 if layers.locks else 0.01
    target = WEIGHTS.empty()
    versions: list[int] = []
    connection.send("ready")
    with dbuffer.WeightReceiver(store, verify=layers.checksums, num_threads=1) as receiver:
        while not versions or versions[-1] < NUM_PUBLISHES:
            holds = layers.locks and rng.random() < 0.3
            if holds:
                found = hold(receiver, rng)
            else:
                found = receiver.load_into(target), WEIGHTS.version_of(target)
            if found[0] is None:
                time.sleep(0.001)
                continue
            counts["reads"] += 1
            counts["mixes"] += found[0] != found[1]
            versions.append(found[0])
            time.sleep(rng.choice((0, rng.uniform(0, longest_delay_s))))
    counts["steps back"] = sum(b < a for a, b in itertools.pairwise(versions))
    connection.send(counts)


def hold(receiver: WeightReceiver, rng: random.Random) -> tuple[int, int | None]:
    """Look at a snapshot twice, with a pause in between."""
    with receiver.open() as snapshot:
        first = WEIGHTS.version_of(snapshot.tensors)
        time.sleep(rng.uniform(0, 0.001))
        second = WEIGHTS.version_of(snapshot.tensors)
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
        return writer.receive(), [reader.receive() for reader in readers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "detector"),
    [
        pytest.param(LOCKS, "try_lock", id="locks"),
        pytest.param(GENERATIONS, "is_unchanged", id="generations alone"),
        pytest.param(CHECKSUMS, "_is_right", id="checksums alone"),
    ],
)
def test_no_reader_mixes_versions_or_goes_back(store: Path, layers: Layers, detector: str) -> None:
    written, read = run(store, layers)
    for counts in read:
        assert counts["mixes"] == 0
        assert counts["steps back"] == 0
        assert counts["reads"] >= 5
    assert sum(counts[detector] for counts in (written, *read)) > 0, "nothing was put to the test"


@pytest.mark.slow
def test_without_any_layer_readers_do_mix_versions(store: Path) -> None:
    """The control: readers as slow as these do see torn weights when nothing keeps them whole."""
    _, read = run(store, NOTHING)
    assert sum(counts["mixes"] for counts in read) > 0


LOOKS = {
    "before the pointer": Step("call", "DoubleBuffer.newest_pointer", nth=2),
    "between pointer and manifest": Step("call", "DoubleBuffer.manifest"),
    "between manifest and file": Step("call", "open_regular", nth=4),
    "between file and lock": Step("call", "try_lock"),
    "between lock and second look": Step("return", "try_lock"),
    "after the second look": Step("return", "DoubleBuffer.manifest", nth=2),
}


@pytest.mark.parametrize("step", LOOKS.values(), ids=LOOKS)
def test_writer_that_comes_round_while_a_reader_takes_hold(store: Path, step: Step) -> None:
    """Two publishes between any two looks of the reader: it must end up with what it says."""
    came_round = []

    def publish_twice() -> None:
        for version in (3, 4):
            sender.send(SMALL.weights(version))
        came_round.append(True)

    with (
        dbuffer.WeightSender(store, reader_timeout_s=0.05, num_threads=1) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        contextlib.ExitStack() as leave,
    ):
        for version in (1, 2):
            sender.send(SMALL.weights(version))
        receiver.wait_for_version(1)
        at_step(step, publish_twice)
        snapshot = leave.enter_context(receiver.open())
        sys.setprofile(None)
        assert came_round
        assert SMALL.version_of(snapshot.tensors) == snapshot.version
        if snapshot.version == 4:
            leave.close()
        else:
            with pytest.raises(dbuffer.SnapshotEvictedError):
                leave.close()
