"""Senders of all kinds, tripped up at random; another process checks what they publish, bit by bit.

A run is a sequence of stores, each with several senders one after another: one process or up to
four ranks, of which each holds a part; on local and network mounts; with and without deltas. Every
attempt to publish has a number, which is in the metadata and decides every bit. What is published
under that number is compared with that record, as another process reads it: after each attempt, and
after a sender was made.

On some attempts one rank is tripped up: it describes other weights, or an error, an interrupt or a
kill comes before a random call. Ranks do not wait for each other between attempts, so that one that
is ahead of the others is found out.

``DBUFFER_SEED`` repeats a run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import dbuffer
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.testing.moments import at_call, die
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.children import Child
from tests.support.patterns import bits
from tests.support.soak import is_soak, patience_s
from tests.support.worlds import Failure, World

VERSIONS = 20_000 if is_soak() else 40
"""Published, and compared, in a run."""

SIZE = 4
ROWS = 24
"""Of what is sharded: a multiple of each number of ranks."""


# What is published: a function of the attempt's number


class Label(NamedTuple):
    """Label in a version's metadata, which decides its bits."""

    attempt: int
    layout: int
    """Which of two sets of shapes."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, in the order in which they are published."""
        width = 48 + 16 * self.layout
        return {
            "sparse": self._changing("sparse", (ROWS, width), one_in=16),
            "dense": self._changing("dense", (ROWS, 10), one_in=1).view(torch.float32),
            "columns": self._changing("columns", (5, ROWS), one_in=4),
            "bytes": self._changing("bytes", (ROWS, 8), one_in=8).view(torch.uint8),
            "doubles": self._changing("doubles", (ROWS, 4), one_in=4).view(torch.float64),
            "pairs": self._changing("pairs", (ROWS, 8), one_in=8).view(torch.complex128),
            # Few of the attempts change it, and then too much for a delta.
            "still": self._at("still", (ROWS, 128), self.attempt // 16),
            "plain": self._changing("plain", (40,), one_in=2).view(torch.bfloat16),
            "small": self._changing("small", (1,), one_in=1),
        }

    def _changing(self, name: str, shape: tuple[int, ...], one_in: int) -> torch.Tensor:
        place = torch.arange(torch.Size(shape).numel())
        changed_at = self.attempt - (self.attempt - place) % one_in
        return self._bits(name, changed_at, place).view(shape)

    def _at(self, name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
        place = torch.arange(torch.Size(shape).numel())
        return self._bits(name, torch.full_like(place, number), place).view(shape)

    def _bits(self, name: str, number: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        salt = sum(name.encode()) + self.layout
        return ((number + 1) * 2654435761 + place * 40503 + salt * 97).to(torch.int32)


def differing(found: dict[str, torch.Tensor], label: Label) -> str | None:
    """Name the tensors that differ from the record; None if none does."""
    right = label.weights()
    if list(found) != list(right):
        return f"tensors {list(found)}"
    unlike = [
        name
        for name, tensor in right.items()
        if found[name].dtype is not tensor.dtype
        or found[name].shape != tensor.shape
        or bits(found[name]) != bits(tensor)
    ]
    return ", ".join(unlike) or None


# The process that checks


class Seen(NamedTuple):
    """The newest version of a store."""

    version: int = 0
    attempt: int = 0


class Question(NamedTuple):
    """Which store to look at, and how."""

    store: Path
    mount: str
    is_late: bool
    """Whether by a reader that has just come."""


def check(connection: Connection, address: str) -> None:
    """Compare the newest version of stores with the record, for whoever connects."""
    eyes = Eyes()
    with Listener(address, family="AF_UNIX", backlog=8) as listener:
        connection.send(None)
        while True:
            with listener.accept() as client, contextlib.suppress(EOFError, ConnectionError):
                while True:
                    client.send(eyes.answer(client.recv()))


class Eyes:
    """The readers of one store, and what they have seen of all."""

    def __init__(self) -> None:
        self._readers: dict[tuple[Path, str], dbuffer.WeightReceiver] = {}
        self._targets: dict[tuple[Path, str], tuple[int, dict[str, torch.Tensor]]] = {}
        self._last: dict[Path, Seen] = {}
        self._checked: set[tuple[Path, Seen]] = set()
        self._held: tuple[contextlib.ExitStack, dbuffer.WeightSnapshot, Label] | None = None
        """A snapshot that is held while later versions are published."""

    def answer(self, question: Question) -> tuple[Seen | str, int]:
        """Answer a question: the version there, or its fault; and how many were compared so far."""
        try:
            seen = self._look(question)
            last = self._last.get(question.store, Seen())
            assert seen == last or (seen > last and seen.attempt > last.attempt), (last, seen)
        except Exception as error:
            return f"{question}: {type(error).__name__}: {error}", 0
        self._last[question.store] = seen
        if seen.version:
            self._checked.add((question.store, seen))
        return seen, len(self._checked)

    def _look(self, question: Question) -> Seen:
        mount = question.mount
        while True:
            os.environ[filesystem.MOUNT_VARIABLE] = mount
            try:
                return self._look_at_once(question._replace(mount=mount))
            except dbuffer.StoreAccessError as error:
                # The newest version is of the sender before this one, on a mount of another kind.
                if "DBUFFER_MOUNT=network" not in str(error):
                    raise
            mount = "local" if mount == "network" else "network"

    def _look_at_once(self, question: Question) -> Seen:
        while True:
            # By a send that goes on; one with other shapes was still to come a moment ago.
            with contextlib.suppress(dbuffer.SnapshotEvictedError, dbuffer.WeightsMismatchError):
                if question.is_late:
                    with dbuffer.WeightReceiver(question.store) as reader:
                        return self._read(reader)[0]
                return self._follow(question)

    def _read(self, reader: dbuffer.WeightReceiver) -> tuple[Seen, Label | None]:
        try:
            with reader.open(timeout_s=0) as snapshot:
                label = Label(*snapshot.metadata["label"])
                unlike = differing(snapshot.tensors, label)
                seen = Seen(snapshot.version, label.attempt)
        except (dbuffer.WaitTimeoutError, dbuffer.StoreNotFoundError):
            return Seen(), None
        assert unlike is None, f"{seen} differs in {unlike}"
        return seen, label

    def _follow(self, question: Question) -> Seen:
        """As who goes on from what it has, where deltas tell."""
        key = question.store, question.mount
        if key not in self._readers:
            self.close()
            self._readers[key] = dbuffer.WeightReceiver(question.store)
        reader = self._readers[key]
        seen, label = self._read(reader)
        if label is None:
            return seen
        if self._targets.get(key, (None,))[0] != label.layout:
            tensors = {name: torch.zeros_like(one) for name, one in label.weights().items()}
            self._targets[key] = label.layout, tensors
        target = self._targets[key][1]
        version = reader.load_into(target)
        if version == seen.version:
            unlike = differing(target, label)
            assert unlike is None, f"{seen} as it was loaded differs in {unlike}"
        self._let_go()
        if len(self._checked) % 3 == 0:  # else publishes would never rewrite a file
            leave = contextlib.ExitStack()
            snapshot = leave.enter_context(reader.open(timeout_s=0))
            self._held = leave, snapshot, Label(*snapshot.metadata["label"])
        return seen

    def _let_go(self) -> None:
        if self._held is not None:
            leave, snapshot, label = self._held
            self._held = None
            unlike = differing(snapshot.tensors, label)
            with contextlib.suppress(dbuffer.SnapshotEvictedError, dbuffer.VersionRegressedError):
                leave.close()
            assert unlike is None, f"what was held of {label} now differs in {unlike}"

    def close(self) -> None:
        self._let_go()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._targets.clear()


class Checker:
    """The process that checks, for who asks it about one sender."""

    def __init__(self, address: str, plan: Plan) -> None:
        self._client = Client(address, family="AF_UNIX")
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self.num_versions = 0

    def look(self) -> Seen:
        """The newest version, which is right."""
        plan, is_late = self._plan, self._rng.random() < 0.4
        self._client.send(Question(plan.store, plan.mount, is_late))
        assert self._client.poll(TIMEOUT_S), "nothing was answered"
        answer, num_versions = self._client.recv()
        assert isinstance(answer, Seen), answer
        self.num_versions = num_versions
        return answer

    def close(self) -> None:
        self._client.close()


# What is done to one rank


class Trip(NamedTuple):
    """How one rank is tripped up in an attempt."""

    rank: int
    kind: str
    """``refuse``: it gives other weights; ``raise``, ``interrupt``, ``kill``: at a call of C."""
    number: int
    """Before which call; or which of `REFUSED`."""


class Plan(NamedTuple):
    """One sender's life; the same on all ranks."""

    store: Path
    seed: int
    kind: str
    """``one`` or ``sharded``."""
    size: int
    mount: str
    options: dict[str, Any]
    labels: list[Label]
    trips: dict[int, Trip]
    """By the attempt."""

    def has_lost_a_rank(self, before: int) -> bool:
        """Whether that may be so in an attempt."""
        trips = (trip for attempt, trip in self.trips.items() if attempt < before)
        return self.kind == "sharded" and any(trip.kind != "refuse" for trip in trips)


REFUSED: list[Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]] = [
    lambda weights: (weights | {"plain": torch.zeros(3)}, {}),
    lambda weights: (weights | {"plain": weights["plain"].to(torch.float32)}, {}),
    lambda weights: (weights | {"more": torch.empty(2, device="meta")}, {}),
    lambda weights: (weights | {"small": "none"}, {}),
    lambda weights: (weights, {"version": 0}),
]
FOR_ALL = REFUSED[2:]
"""Refusals that one process makes, too."""


def go_wrong(kind: str) -> None:
    if kind == "kill":
        die()
    if kind == "interrupt":
        raise KeyboardInterrupt
    raise random.choice([OSError, MemoryError, RuntimeError, ValueError])("tripped up")


@contextlib.contextmanager
def tripped(trip: Trip | None) -> Iterator[None]:
    """Let something go wrong before a call of C in the block, if it has so many."""
    if trip is not None and trip.kind in ("raise", "interrupt", "kill"):
        at_call(trip.number, functools.partial(go_wrong, trip.kind), None)
    try:
        yield
    finally:
        sys.setprofile(None)


# Trainers


groups: dict[int, Any] = {}
meshes: dict[int, DeviceMesh] = {}


def make_groups(rank: int) -> None:
    sys.setswitchinterval(1e-5)  # so that threads meet
    for size in range(1, SIZE + 1):
        group = distributed.new_group(list(range(size)))
        if rank < size:
            groups[size] = group
            meshes[size] = DeviceMesh.from_group(group, "cpu")


class Trainer:
    """Weights that a rank holds, and the sender that publishes them."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.sender: Any = None
        self._hold(plan.labels[0])
        options = {"reader_timeout_s": 0.0, "num_threads": 1, **plan.options}
        if plan.kind == "sharded":
            self.sender = dbuffer.ShardedWeightSender(
                plan.store, group=groups[plan.size], rank_timeout_s=30.0, **options
            )
        else:
            self.sender = dbuffer.WeightSender(plan.store, **options)

    def _hold(self, label: Label) -> None:
        """Hold other weights, which do not share memory with those before."""
        self.label = label
        self.module = nn.Module()
        for name, tensor in self._parts(label).items():
            self.module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def train(self, label: Label) -> None:
        """Change the weights where they lie, or hold others."""
        if label.layout != self.label.layout:
            self._hold(label)
        self.label = label
        own = dict(self.module.named_parameters())
        for name, part in self._parts(label).items():
            own[name].copy_(part)

    def publish(self, trip: Trip | None) -> int:
        """Publish them; return the version."""
        options: dict[str, Any] = {"metadata": {"label": list(self.label)}}
        weights = self._weights()
        if trip is not None and trip.kind == "refuse":
            among = REFUSED if self.plan.size > 1 else FOR_ALL
            weights, more = among[trip.number % len(among)](weights)
            options |= more
        with tripped(trip):
            return self.sender.send(weights, **options).version

    def _weights(self) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor, Shard  # takes as long as torch

        weights: dict[str, Any] = dict(self.module.named_parameters())
        for name, tensor in weights.items():
            if (dimension := self._split_at(name)) is not None:
                mesh, ways = meshes[self.plan.size], [Shard(dimension)]
                weights[name] = DTensor.from_local(tensor.data, mesh, ways, run_check=False)
        return weights

    def _parts(self, label: Label) -> dict[str, torch.Tensor]:
        parts = label.weights()
        for name, tensor in parts.items():
            if (dimension := self._split_at(name)) is not None:
                parts[name] = tensor.chunk(self.plan.size, dimension)[self.rank].clone()
        return parts

    def _split_at(self, name: str) -> int | None:
        """Along which dimension it is sharded, if it is."""
        if self.plan.kind != "sharded" or name in ("plain", "small"):
            return None
        if name != "columns":
            return 0
        # Where ranks write files of their own, it would be gathered by the trainer's collectives.
        return 1 if self.plan.mount == "local" else None


Went = dict[int, int | None]
"""Versions by the attempt; None: it was not published."""


def live(rank: int, plan: Plan, address: str) -> tuple[Went, int]:
    """One sender's life on one rank; how attempts went, and how many versions were compared."""
    if rank >= plan.size:
        return {}, 0
    random.seed(plan.seed)
    TIMING.keep_superseded_s = 0.0
    os.environ[filesystem.MOUNT_VARIABLE] = plan.mount
    with contextlib.ExitStack() as stack:
        checker = None
        if rank == 0:
            checker = stack.enter_context(contextlib.closing(Checker(address, plan)))
        trainer = Trainer(plan, rank)
        try:
            went = {each.attempt: make_attempt(trainer, checker, each) for each in plan.labels}
        finally:
            with contextlib.suppress(dbuffer.DBufferError, OSError, MemoryError, RuntimeError):
                trainer.sender.close()
        if checker is None:
            return went, 0
        checker.look()
        return went, checker.num_versions


def make_attempt(trainer: Trainer, checker: Checker | None, label: Label) -> int | None:
    plan, trip = trainer.plan, trainer.plan.trips.get(label.attempt)
    mine = trip if trip is not None and trip.rank == trainer.rank else None
    before = None if checker is None else checker.look()
    version, error = None, ""
    try:
        trainer.train(label)
        if checker is not None:
            checker.look()
        version = trainer.publish(mine)
    except (KeyboardInterrupt, dbuffer.DBufferError, *TRIPPED_UP) as caught:
        error = f"{type(caught).__name__}: {caught}"
    if trip is None and not plan.has_lost_a_rank(label.attempt):
        assert version is not None, f"{label} was not tripped up: {error}"
    if trip is not None and trip.kind == "refuse" and not plan.has_lost_a_rank(label.attempt):
        assert error.startswith(("InvalidWeightsError", "VersionError")), (trip, error)
    if before is not None and checker is not None:
        seen = checker.look()
        # Numbers may skip the number of a commit that failed, which readers may know.
        is_later = seen.version > before.version and seen.attempt == label.attempt
        if version is not None:
            assert is_later, (before, seen, version, label)
            assert seen.version == version, (before, seen, version, label)
        elif trip is None or trip.kind == "refuse":
            assert seen == before, (before, seen, label, error)
        else:
            assert is_later or seen == before, (before, seen, label, error)
    return version


TRIPPED_UP = (OSError, MemoryError, RuntimeError, ValueError)


# Worlds


class Worlds:
    """Processes to be ranks, which are made anew where one was killed."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory, self._address = directory, address
        self._world: World | None = None

    def run(self, plan: Plan) -> tuple[dict[int, Went], int]:
        """One sender's life: how attempts went by rank, and how many versions were compared."""
        if self._world is None:
            self._world = World(self._directory, SIZE)
            self._world.run(make_groups)
        world = self._world
        world.begin(live, plan, self._address)
        may_die = {trip.rank for trip in plan.trips.values() if trip.kind == "kill"}
        went, num_versions, has_died = {}, 0, False
        for rank in range(SIZE):
            if rank in may_die and not world.ranks[rank].has_sent():
                has_died = True
                continue
            outcome = world.outcome(rank)
            assert not isinstance(outcome, Failure), f"rank {rank}: {outcome.traceback}"
            went[rank] = outcome[0]
            num_versions = max(num_versions, outcome[1])
        if has_died:
            self.close()
        return went, num_versions

    def close(self) -> None:
        if self._world is not None:
            self._world.__exit__()
            self._world = None


def require_one_story(went: dict[int, Went]) -> None:
    """See that ranks which published an attempt published it as the same version."""
    versions: Went = {}
    for version_of in went.values():
        for attempt, version in version_of.items():
            if version is not None:
                assert versions.setdefault(attempt, version) == version, went


def make_plan(rng: random.Random, store: Path, first: int) -> Plan:
    """A sender's life, at random, from this attempt on."""
    kind = rng.choice(["one", "sharded", "sharded", "sharded"])
    mount = rng.choice(["local", "network"])
    size = rng.randint(1, SIZE) if kind == "sharded" else 1
    options = {"delta": rng.random() < 0.7, "checksum": rng.random() < 0.5}
    attempts = range(first, first + rng.randint(8, 20))
    layout = rng.random() < 0.2
    labels = []
    for attempt in attempts:
        if rng.random() < 0.03:
            layout = not layout
        labels.append(Label(attempt, int(layout)))
    ways = ["refuse", "refuse", "raise", "raise", "interrupt", "interrupt", "kill"]
    trips: dict[int, Trip] = {}
    for attempt in sorted(rng.sample(attempts, rng.randint(0, 4))):
        way = rng.choice(ways)
        number = int(10 ** rng.uniform(0, 3.7))
        trips[attempt] = Trip(rng.randrange(size), way, number)
        if way == "kill" or (way != "refuse" and kind == "sharded"):
            # What comes after it shows whether ranks are out of step.
            labels = labels[: attempt - first + 3]
            break
    return Plan(store, rng.randrange(1 << 30), kind, size, mount, options, labels, trips)


@pytest.mark.timeout(patience_s())
def test_every_version_is_what_was_given_whatever_trips_a_sender_up(
    shm_path, tmp_path, record_property, monkeypatch
):
    monkeypatch.delenv(filesystem.MOUNT_VARIABLE, raising=False)
    seed = int(os.environ.get("DBUFFER_SEED") or random.randrange(1 << 30))
    print(f"DBUFFER_SEED={seed}")
    rng = random.Random(seed)
    address, num_versions = str(tmp_path / "checker"), 0
    with Child(check, address) as checker, contextlib.ExitStack() as stack:
        checker.receive()
        worlds = Worlds(tmp_path, address)
        stack.callback(worlds.close)
        for number in itertools.count():
            store, first = shm_path / f"{number}", 1
            for _ in range(rng.randint(2, 6)):
                plan = make_plan(rng, store, first)
                print(plan)
                first = plan.labels[-1].attempt + 1
                num_versions = run_plan(worlds, plan, address)
            shutil.rmtree(store)
            if num_versions >= VERSIONS:
                break
    record_property("versions of worlds that are tripped up", num_versions)


def run_plan(worlds: Worlds, plan: Plan, address: str) -> int:
    """Live a sender's life, and look at what it left; how many versions were compared so far."""
    went, num_versions = worlds.run(plan)
    require_one_story(went)
    with contextlib.closing(Checker(address, plan)) as checker:
        checker.look()
        return max(num_versions, checker.num_versions)
