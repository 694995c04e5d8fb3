"""Double buffers for TorchRL, dbuffer's and TorchRL's: speed, torn reads and killed writers."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import models, report
from benchmarks.measure import median, timed
from benchmarks.models import Shapes
from benchmarks.processes import child, reply, scratch_folder
from benchmarks.targets import Check
from benchmarks.torn_reads import (
    PRELOAD,
    WAYS,
    Kill,
    Ours,
    Race,
    Read,
    Theirs,
    Way,
    kill_writer,
    look,
    race,
    write,
    write_when_told,
)
from benchmarks.transfers import Times, require_memory

_MEMORY_IN_MODELS = 7
"""Memory to require: for source, destination, dbuffer's two buffers, TorchRL's files, and a copy in
each process."""

_ENOUGH_READS = 10
"""Number of reads in a race that is a test."""

_KINDS = ("the version before", "the new version", "an older version", "a mix", "unreadable")


@dataclass(frozen=True, slots=True)
class Delivery:
    """Transfer of one model in one directory, with times in seconds."""

    model: str
    shapes: Shapes
    directory: Path
    rounds: int
    publish: Times = field(default_factory=lambda: defaultdict(list))
    receive: Times = field(default_factory=lambda: defaultdict(list))
    """Times to receive into new memory."""
    load: Times = field(default_factory=lambda: defaultdict(list))
    """Times to receive into existing tensors."""

    @property
    def title(self) -> str:
        """Model, size and directory."""
        return _title(self.model, self.shapes, self.directory)


@dataclass(slots=True)
class Results:
    """All measurements of a run. Races and kills are by the name of the way."""

    deliveries: list[Delivery] = field(default_factory=list)
    races: dict[str, list[Race]] = field(default_factory=lambda: defaultdict(list))
    kills: dict[str, list[Kill]] = field(default_factory=lambda: defaultdict(list))
    num_tried: Counter[str] = field(default_factory=Counter)
    """Number of writers that were started to be killed. Some finished before the kill."""


def main(options: Namespace) -> int:
    """Measure and print. Return 1 if dbuffer broke a guarantee."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    environment = report.begin(options.dir)
    results = Results()
    _deliver_all(results, options.dir, quick=options.quick)
    _race_all(results, options.dir[0], quick=options.quick)
    _kill_all(results, options.dir[0], quick=options.quick)
    found, title = _found(results), "Targets for dbuffer"
    return report.conclude(environment, _check(results), found, options.json, title=title)


# ---------------------------------------------------------------------------------------------
# Publish and receive


def _deliver_all(results: Results, directories: Sequence[Path], *, quick: bool) -> None:
    for delivery in _quick_deliveries(directories) if quick else _deliveries(directories):
        _deliver(delivery)
        results.deliveries.append(delivery)
        print(f"\n{delivery.title}\n\n{_delivery_table(delivery)}", flush=True)


def _deliveries(directories: Sequence[Path]) -> Iterator[Delivery]:
    first, *others = directories
    yield Delivery("Qwen2.5-0.5B, widened", models.qwen2_0_5b(width=1.5), first, rounds=5)
    many = models.qwen3_30b_a3b(narrowing=16)
    yield Delivery("Qwen3-30B-A3B, narrowed", many, first, rounds=2)
    for directory in others:  # smaller models, because a disk that cannot keep up slows both ways
        narrow = models.qwen2_0_5b(width=0.5)
        yield Delivery("Qwen2.5-0.5B, narrowed", narrow, directory, rounds=5)


def _quick_deliveries(directories: Sequence[Path]) -> Iterator[Delivery]:
    dense = models.qwen2_0_5b(width=0.25)
    for directory in directories:
        yield Delivery("Qwen2.5-0.5B, narrowed", dense, directory, rounds=2)
    many = models.qwen3_30b_a3b(narrowing=16, layers=2)
    yield Delivery("Qwen3-30B-A3B, 2 layers", many, directories[0], rounds=1)


def _deliver(delivery: Delivery) -> None:
    """Measure both ways in turns, so that the noise of a shared machine affects both alike.

    The first round does not count, because it makes the files, such as dbuffer's two buffers.
    """
    require_memory(_MEMORY_IN_MODELS * models.num_bytes(delivery.shapes))
    with (
        scratch_folder(delivery.directory) as folder,
        child(write_when_told, WAYS, folder, delivery.shapes) as writer,
        child(_receive_when_told, WAYS, folder, delivery.shapes) as receiver,
    ):
        for connection in (writer, receiver):
            reply(connection)
        numbers = itertools.count(1)
        for count in range(1 + delivery.rounds):
            for way in WAYS:
                for into in (delivery.receive, delivery.load):
                    number = next(numbers)
                    published_s = write(writer, way, number)
                    receiver.send((way.name, into is delivery.load))
                    received_s, read = reply(receiver)
                    if read != Read(number, number):
                        raise RuntimeError(f"{way.name} delivered {read} instead of {number}")
                    if count:
                        delivery.publish[way.name].append(published_s)
                        into[way.name].append(received_s)


def _receive_when_told(
    connection: Connection, ways: Sequence[type[Way]], folder: Path, shapes: Shapes
) -> None:
    """Run as the receiver's process: receive in the requested way; send the time and the result."""
    opened = {way.name: way(folder / way.name) for way in ways}
    destination = models.warm_destination(shapes)
    received: Any = None

    def receive() -> None:
        nonlocal received
        received = opened[name].receive_copy()

    def load() -> None:
        opened[name].load_into(destination)

    connection.send("ready")
    while True:
        name, loads = connection.recv()
        took_s = timed(load if loads else receive)
        connection.send((took_s, look(destination if loads else dict(received.items()), shapes)))
        received = None


# ---------------------------------------------------------------------------------------------
# Torn reads and killed writers


def _race_all(results: Results, directory: Path, *, quick: bool) -> None:
    shapes = models.qwen2_0_5b(width=0.125 if quick else 0.25)
    for _ in range(1 if quick else 3):
        for way in WAYS:
            duration_s = 4.0 if quick else 5.0
            results.races[way.name].append(race(way, directory, shapes, duration_s=duration_s))
    title = _title("One process writes, one reads: Qwen2.5-0.5B, narrowed", shapes, directory)
    print(f"\n{title}\n\n{_races_table(results)}", flush=True)


def _kill_all(results: Results, directory: Path, *, quick: bool) -> None:
    shapes = models.qwen2_0_5b(width=0.25)
    wanted = 3 if quick else 20
    while any(len(results.kills[way.name]) < wanted for way in WAYS):
        for way in WAYS:
            if len(results.kills[way.name]) < wanted:
                results.num_tried[way.name] += 1
                kill = kill_writer(way, directory, shapes, random.random())
                results.kills[way.name] += [] if kill is None else [kill]
    title = _title("A writer is killed in mid-write: Qwen2.5-0.5B, narrowed", shapes, directory)
    print(f"\n{title}\n\n{_kills_table(results)}", flush=True)


# ---------------------------------------------------------------------------------------------
# Tables


def _title(what: str, shapes: Shapes, directory: Path) -> str:
    size = f"{models.num_bytes(shapes) / 1e9:.2f} GB in {len(shapes):,} tensors"
    return f"{what}, {size}, {directory} ({report.filesystem(directory)})"


def _delivery_table(delivery: Delivery) -> str:
    header = ("", "publish ms", "GB/s", "receive ms", "GB/s", "load ms", "GB/s", "samples")
    kinds = (delivery.publish, delivery.receive, delivery.load)
    rows = []
    for way in WAYS:
        cells = []
        for times in kinds:
            time_s = median(times[way.name])
            speed = models.num_bytes(delivery.shapes) / time_s / 1e9
            cells += [f"{1e3 * time_s:.1f}", f"{speed:.2f}"]
        samples = "/".join(str(len(times[way.name])) for times in kinds)
        rows.append((way.name, *cells, samples))
    ratios = [
        cell
        for times in kinds
        for cell in (f"{median(times[Theirs.name]) / median(times[Ours.name]):.2f}", "")
    ]
    rows.append((f"{Theirs.name} / {Ours.name}", *ratios, ""))
    return report.table(header, rows)


def _races_table(results: Results) -> str:
    header = ("", "seconds", "written", "reads", "whole", "torn", "failed", "back", "failed with")
    rows = []
    for way, races in results.races.items():
        counts = _race_counts(races)
        errors = sum((each.errors() for each in races), Counter[str]())
        named = ", ".join(f"{name} {count}" for name, count in errors.most_common())
        seconds = f"{sum(each.duration_s for each in races):.0f}"
        rows.append((way, seconds, *(f"{count}" for count in counts.values()), named))
    return report.table(header, rows)


def _race_counts(races: Sequence[Race]) -> dict[str, int]:
    reads = [read for each in races for read in each.reads]
    return {
        "written": sum(each.num_written for each in races),
        "reads": len(reads),
        "whole": sum(read.is_whole for read in reads),
        "torn": sum(read.is_torn for read in reads),
        "failed": sum(bool(read.error) for read in reads),
        "back": sum(each.count_back() for each in races),
    }


def _kills_table(results: Results) -> str:
    header = ("", "write ms", "killed", *_KINDS, "next write works")
    rows = []
    for way, kills in results.kills.items():
        kinds = Counter(kill.kind for kill in kills)
        works = sum(kill.next_write_works for kill in kills)
        write_ms = f"{1e3 * median(kill.write_s for kill in kills):.1f}"
        counts = [len(kills), *(kinds[kind] for kind in _KINDS), works]
        rows.append((way, write_ms, *(f"{count}" for count in counts)))
    return report.table(header, rows)


def _check(results: Results) -> list[Check]:
    counts = _race_counts(results.races[Ours.name])
    kills = results.kills[Ours.name]
    kinds = Counter(kill.kind for kill in kills)
    whole = kinds["the version before"] + kinds["the new version"]
    works = sum(kill.next_write_works for kill in kills)
    reads, num_kills = counts["reads"], len(kills)
    return [
        Check("reads during writes", f"≥ {_ENOUGH_READS}", f"{reads}", reads >= _ENOUGH_READS),
        *(
            Check(f"reads that {what}", "0", f"{counts[key]}", counts[key] == 0)
            for what, key in (("are torn", "torn"), ("failed", "failed"), ("went back", "back"))
        ),
        Check("whole after SIGKILL", f"{num_kills}", f"{whole}", whole == num_kills),
        Check("next write works", f"{num_kills}", f"{works}", works == num_kills),
    ]


def _found(results: Results) -> dict[str, Any]:
    """Return all results for JSON, with the seconds of each sample and the result of each read."""
    return {
        "deliveries": [_delivery_as_json(delivery) for delivery in results.deliveries],
        "races": {
            way: [_race_as_json(each) for each in races] for way, races in results.races.items()
        },
        "kills": {
            way: {"tried": results.num_tried[way], "killed": [_kill_as_json(k) for k in kills]}
            for way, kills in results.kills.items()
        },
    }


def _delivery_as_json(delivery: Delivery) -> Any:
    return {
        "model": delivery.model,
        "tensors": len(delivery.shapes),
        "bytes": models.num_bytes(delivery.shapes),
        "directory": str(delivery.directory),
        "filesystem": report.filesystem(delivery.directory),
        "publish_s": delivery.publish,
        "receive_s": delivery.receive,
        "load_s": delivery.load,
    }


def _race_as_json(each: Race) -> Any:
    reads = [str(read) for read in each.reads]
    return {"duration_s": each.duration_s, **_race_counts([each]), "found": reads}


def _kill_as_json(kill: Kill) -> Any:
    return {
        "write_s": kill.write_s,
        "killed_after_s": kill.killed_after_s,
        "left": str(kill.left),
        "kind": kill.kind,
        "next_write_error": kill.next_write_error,
        "after_next_write": str(kill.after_next_write),
    }
