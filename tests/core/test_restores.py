"""Random restores of a store, beside receivers, mirrors and pins, against a model.

The model is a list of all versions, each with the version before it. Senders publish into a store,
one after another, and are killed. The store is copied at some steps and put back at others, whole
or in part, in several ways; clocks are set. After each step, receivers and a mirror reach the
newest version, and its id names the tensors that they have. A receiver is refused if its version
is not in the past of the newest, and else never. Acknowledgements are true.

``DBUFFER_SEED`` repeats a run.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.moments import CHANGING_CALLS, at_call, die
from dbuffer.testing.patterns import Sparse
from dbuffer.testing.waiting import until
from tests.support.children import Child
from tests.support.soak import Record, is_soak
from tests.support.stores import back_up, copy_over, remove_store, rename, replace

VERSIONS = 500 if is_soak() else 40
"""Versions that are published in each world."""

WORLDS = 5 if is_soak() else 1
"""Worlds for each kind of mount."""

PATTERN = Sparse(num_tensors=4, numel=64)

NAMED_RUNS = 64
"""Runs that a lineage names: it may not tell how a version of another one is related."""

SOON_S = 20.0
"""Nothing takes longer to notice the newest version."""

AWAY = (
    dbuffer.SnapshotEvictedError,
    dbuffer.StoreAccessError,
    dbuffer.StoreCorruptError,
    dbuffer.StoreNotFoundError,
    dbuffer.WaitTimeoutError,
)
"""Errors of a reader while its store is removed, and copied file by file."""


@dataclass(eq=False, kw_only=True)
class Version:
    """A version that was published."""

    index: int
    """Its place in the list, which its metadata repeats."""
    content: int
    """Index of the version that first had its tensors."""
    number: int
    parent: Version | None
    """The newest version when its sender began, or the sender's last one."""
    num_runs: int
    """Number of senders in its past, its own included."""
    id: dbuffer.VersionId | None = None

    def at(self, number: int) -> Version | None:
        """Return the version of a number in its past; itself, too."""
        version: Version | None = self
        while version is not None and version.number > number:
            version = version.parent
        return version if version is not None and version.number == number else None

    def is_upon(self, other: Version) -> bool:
        """Whether the other is in its past, or itself."""
        return self.at(other.number) is other

    def is_far_from(self, other: Version) -> bool:
        """Whether lineages may not tell how the two are related."""
        return abs(self.num_runs - other.num_runs) >= NAMED_RUNS

    def __repr__(self) -> str:
        return f"<{self.index}: number {self.number}, run {self.num_runs}, id {self.id}>"


@dataclass(eq=False)
class Backup:
    """Copy of a store, with its newest version and its pins."""

    path: Path
    newest: Version
    pins: set[Version]


class Loader:
    """A receiver that loads into one target, and what this target holds."""

    def __init__(self, world: World, store: Path, name: str) -> None:
        self._world = world
        self.receiver = dbuffer.WeightReceiver(
            store, receiver_id=name, num_threads=1, poll_interval_s=0.02
        )
        self._target = PATTERN.empty()
        self.has: Version | None = None
        self._seen: Version | None = None
        """Newest version when it last looked at its store."""
        self.is_recorded = False
        """Whether its record can have been written since the store was put back."""

    def look(self) -> None:
        """Load the newest version, or be told that its own is none of its past."""
        newest, seen = self._world.newest, self._seen
        try:
            number = self.receiver.load_into(self._target)
        except dbuffer.VersionRegressedError as error:
            assert seen is not None, "it was started over"
            if not seen.is_far_from(newest):
                assert not newest.is_upon(seen), f"from {seen} to {newest}: {error}"
                assert error.is_forked is not seen.is_upon(newest), f"from {seen} to {newest}"
            assert PATTERN.version_of(self._target) == self.has.content
            if self._world.rng.random() < 0.7:
                self.start_over()
                self.look()
            return
        assert seen is None or newest.is_upon(seen), f"{seen} was replaced by {newest} silently"
        if number is None:
            assert self.has is newest, f"it has {self.has}, and is told that {newest} is no newer"
        else:
            assert number == newest.number
            self.has, self.is_recorded = newest, True
        self._seen = newest
        found = PATTERN.version_of(self._target)
        assert found == newest.content, f"it has the tensors of {found}, and says {newest}"

    def start_over(self) -> None:
        self.receiver.follow_fork()
        self._seen = None


class Follower(threading.Thread):
    """A receiver that follows the store in a thread, and starts over when it is told to."""

    def __init__(self, store: Path) -> None:
        super().__init__(name="test-follower", daemon=True)
        self._store = store
        self._ends = threading.Event()
        self.seen: list[tuple[int, int | None, tuple[str, int]]] = []
        """Of each version: index in its metadata, the version of its tensors, id."""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with dbuffer.WeightReceiver(
                self._store, receiver_id="follower", num_threads=1, poll_interval_s=0.02
            ) as receiver:
                while not self._ends.is_set():
                    self._follow(receiver)
        except BaseException as error:
            self.error = error

    def _follow(self, receiver: dbuffer.WeightReceiver) -> None:
        try:
            for snapshot in receiver.follow(stop_event=self._ends):
                content = PATTERN.version_of(dict(snapshot.tensors))
                seen = (snapshot.metadata["n"], content, snapshot.id)
                snapshot.metadata.clear()  # it is the snapshot's own
                if not self.seen or self.seen[-1] != seen:
                    self.seen.append(seen)
        except dbuffer.VersionRegressedError:
            receiver.follow_fork()
        except AWAY:
            self._ends.wait(0.01)

    def close(self) -> None:
        self._ends.set()
        self.join(SOON_S)
        assert not self.is_alive()


class World:
    """A store, all that works with it, and the model."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store, self._local = directory / "store", directory / "local"
        self._directory = directory
        self._view = DoubleBuffer(self.store)
        self.steps: list[str] = []
        self.offset_s = 0.0
        """Error of the clock in seconds."""
        self.versions: list[Version] = []
        self._ids: dict[tuple[str, int], Version] = {}
        self._newest: Version | None = None
        self._pins: set[Version] = set()
        """Versions that are pinned: nothing may remove them."""
        self._backups: list[Backup] = []
        self._copies: list[Backup] = []
        """Copies of the mirror's store."""
        self._sender: dbuffer.WeightSender | None = None
        self._last: Version | None = None
        """Parent of the sender's next version."""
        self._num_runs = 0
        """Number of runs in the past of the sender's next version, its own included."""
        self.num_reads = 0
        self._newcomers: dict[Path, dbuffer.WeightReceiver] = {}
        self._begin()
        self._publish()
        self._mirror: dbuffer.Mirror | None = None
        self._follower: Follower | None = None
        self._start_watchers()
        self._loaders = [Loader(self, self.store, f"loader-{number}") for number in range(3)]
        self._behind_mirror = Loader(self, self._local, "behind-mirror")

    @property
    def newest(self) -> Version:
        assert self._newest is not None
        return self._newest

    # Senders

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "keep": rng.choice([0, 0, 1, 3, 8]),
            "delta": rng.random() < 0.4,
            "checksum": rng.choice([True, "auto"]),
            "reader_timeout_s": 2.0,
            "num_threads": 1,
        }

    def _begin(self) -> None:
        """End the sender, and begin another one: a run."""
        self._end()
        self._sender = dbuffer.WeightSender(self.store, **self._options())
        self._last = self._newest
        self._num_runs = 1 + (self._last.num_runs if self._last else 0)

    def _end(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _next_index(self) -> int:
        return len(self.versions)

    def _add(self, number: int, content: int | None = None) -> Version:
        """Add a version to the model, as the newest one."""
        index, before = self._next_index(), self._last
        assert before is None or number > before.number
        content = index if content is None else content
        version = Version(
            index=index, content=content, number=number, parent=before, num_runs=self._num_runs
        )
        self.versions.append(version)
        self._newest = self._last = version
        return version

    def _publish(self) -> None:
        if self._sender is None:
            self._begin()
        sender, index = self._sender, self._next_index()
        assert sender is not None
        options: dict[str, Any] = {"metadata": {"n": index}}
        if self.rng.random() < 0.1 and self._last is not None:
            options["version"] = self._last.number + self.rng.randint(1, 3)
        weights = PATTERN.weights(index)
        try:
            if self.rng.random() < 0.2:
                publication = sender.send(weights, wait=False, **options).wait()
            else:
                publication = sender.send(weights, **options)
        except dbuffer.WriterSupersededError:
            self.steps.append("superseded")
            self._end()  # the store was put back under it
            return
        self._name(self._add(publication.version), publication.id)

    def _republish(self) -> None:
        if self._sender is None or self._last is not self._newest:
            self._begin()
        assert self._sender is not None
        number = max(1, self.newest.number - self.rng.randint(0, 6))
        original = self.newest.at(number)
        try:
            published = self._sender.republish(number, metadata={"n": self._next_index()})
        except (dbuffer.VersionError, dbuffer.WriterSupersededError):
            return
        assert original is not None, f"there is no {number} in the past of {self.newest}"
        self._add(published.version, original.content)

    def _kill(self) -> None:
        """Let a sender begin in another process, and be killed at a random step."""
        self._end()
        number, is_early = self.rng.randint(1, 60), self.rng.random() < 0.3
        index = self._next_index()
        arguments = (self.store, self._options(), index, number, is_early)
        with Child(publish_and_die, *arguments) as child:
            child.wait()
        found = self._look(self.store)
        if found[0] == index:
            self._last = self._newest
            self._num_runs = 1 + self.newest.num_runs
            self._add(found[2][1])

    # Backups

    def _back_up(self) -> None:
        number = self.rng.randrange(3)
        path = self._directory / f"backup-{number}"
        shutil.rmtree(path, ignore_errors=True)
        self._backups = [each for each in self._backups if each.path != path]
        back_up(self.store, path)
        self._backups.append(Backup(path, self.newest, set(self._pins)))

    def _put_back(self) -> None:
        if not self._backups:
            return self._back_up()
        rng, backup = self.rng, self.rng.choice(self._backups)
        way = rng.choice(["over", "in place", "replace", "rename", "grown", "kept", "receivers"])
        if way in ("replace", "rename") and rng.random() < 0.3:
            way = "newest alone"
        self.steps.append(f"put back {backup.newest} by {way}")
        for loader in self._loaders:
            loader.is_recorded = False
        if way in ("in place", "kept", "receivers", "newest alone") or rng.random() < 0.7:
            self._end()
        if way in ("in place", "over"):
            # By default into files that others may have mapped.
            options = ["--remove-destination"] if way == "over" else []
            with self._no_watchers():
                copy_over(self.store, backup.path, *options)
        elif way in ("replace", "rename"):
            {"replace": replace, "rename": rename}[way](self.store, backup.path)
        elif way == "grown":
            self._put_back_grown(backup)
        else:
            with self._no_watchers():
                self._put_back_part(backup, way)
            return None
        if way == "over":
            self._pins |= backup.pins
        elif way == "in place":  # also into files that lost versions have in common with these
            self._pins = backup.pins | set(filter(backup.newest.is_upon, self._pins))
        else:
            self._pins = set(backup.pins)
        if way != "grown":
            self._newest = backup.newest
        return None

    def _put_back_grown(self, backup: Backup) -> None:
        """Put back a copy into which another sender has published meanwhile."""
        path = self._directory / "grown"
        back_up(backup.path, path)
        self._end()
        with dbuffer.WeightSender(path, **self._options()) as sender:
            self._last, self._num_runs = backup.newest, 1 + backup.newest.num_runs
            for _ in range(self.rng.randint(1, 4)):
                index = self._next_index()
                self._add(sender.send(PATTERN.weights(index), metadata={"n": index}).version)
        lost = self._directory / "lost"
        self.store.rename(lost)
        path.rename(self.store)
        shutil.rmtree(lost)

    def _put_back_part(self, backup: Backup, way: str) -> None:
        if way == "newest alone":
            buffer = DoubleBuffer(backup.path).pointer().buffer
            manifest = DoubleBuffer(backup.path).undamaged_manifest(buffer)
            if manifest.anchor is not None:
                return  # its weights are in other files, too
            parts = ["CURRENT", buffer]
            self._newest = backup.newest
        else:
            parts = [way]
        is_over = self.rng.random() < 0.5
        for part in parts:
            source, target = backup.path / part, self.store / part
            if not source.exists():
                continue
            if target.is_dir() and not is_over:
                shutil.rmtree(target)
            if source.is_dir():
                target.mkdir(mode=0o700, exist_ok=True)
                copy_over(target, source, "--remove-destination")
            else:
                target.unlink()
                back_up(source, target)
        if way == "kept" and not is_over:
            self._pins &= backup.pins

    def _begin_anew(self) -> None:
        """Remove the store, and begin it again."""
        self._end()
        remove_store(self.store)
        self._newest = None
        self._pins = set()
        for loader in self._loaders:
            loader.is_recorded = False
        self._begin()
        self._publish()

    def _put_back_mirror(self) -> None:
        """Copy the mirror's store, or put it back, while no mirror runs."""
        with self._no_watchers():
            path = self._directory / "local-backup"
            if path.exists() and self.rng.random() < 0.7:
                self.rng.choice([copy_over, replace, rename])(self._local, path)
            elif self._local.exists():
                shutil.rmtree(path, ignore_errors=True)
                back_up(self._local, path)

    def _set_clock(self) -> None:
        self.offset_s = self.rng.choice([0.0, -86400.0, -60.0, 61.0, 300.0, 86400.0])

    # Others

    def _pin(self) -> None:
        version = self.newest.at(max(1, self.newest.number - self.rng.randint(0, 3)))
        if version is None:
            return
        with contextlib.suppress(dbuffer.VersionError):
            kept.pin(self._view, version.number)
            self._pins.add(version)

    def _unpin(self) -> None:
        ours = [version for version in self._pins if self.newest.is_upon(version)]
        if ours:
            version = self.rng.choice(sorted(ours, key=lambda each: each.index))
            kept.unpin(self._view, version.number)
            self._pins.discard(version)

    def _start_watchers(self) -> None:
        """Start a mirror and a follower."""
        self._mirror = dbuffer.Mirror(
            self.store, self._local, poll_interval_s=0.02, num_threads=1, reader_timeout_s=2.0
        ).start()
        self._follower = Follower(self.store)
        self._follower.start()

    def _stop_watchers(self) -> None:
        assert self._mirror is not None
        assert self._follower is not None
        self._mirror.close()
        self._follower.close()
        self._check_followed()

    @contextlib.contextmanager
    def _no_watchers(self) -> Iterator[None]:
        self._stop_watchers()
        yield
        self._start_watchers()

    # A step, and what must hold after it

    def step(self) -> None:
        weights = {
            self._publish: 40,
            self._begin: 5,
            self._republish: 4,
            self._kill: 2,
            self._back_up: 4,
            self._put_back: 6,
            self._put_back_mirror: 1,
            self._begin_anew: 0.5,
            self._set_clock: 2,
            self._pin: 3,
            self._unpin: 2,
        }
        [action] = self.rng.choices(list(weights), list(weights.values()))
        self.steps.append(action.__name__)
        action()
        self.check()

    def check(self) -> None:
        newest, rng = self.newest, self.rng
        assert self._look(self.store)[0] == newest.index, f"the newest is {newest}"
        for loader in self._loaders:
            if rng.random() < 0.3:
                loader.look()
        [look] = rng.choices([self._open_a_number, self._open_a_pin, self._check_acknowledgement])
        look()
        self._check_mirror()
        self._wait_for_follower()

    def _look(self, store: Path) -> tuple[int, int, tuple[str, int]]:
        """Let a receiver start over; return the newest version's index, tensors' version and id."""
        if store not in self._newcomers:
            self._newcomers[store] = dbuffer.WeightReceiver(
                store, receiver_id="newcomer", num_threads=1, poll_interval_s=0.02
            )
        newcomer = self._newcomers[store]
        newcomer.follow_fork()
        with newcomer.open(timeout_s=SOON_S) as snapshot:
            found = (
                snapshot.metadata["n"],
                PATTERN.version_of(dict(snapshot.tensors)),
                snapshot.id,
            )
        if found[0] < len(self.versions):  # else of a sender that was killed
            self._require(*found)
        return found

    def _require(self, index: int, content: int | None, version_id: tuple[str, int]) -> None:
        version = self.versions[index]
        assert content == version.content, f"{version} has the tensors of {content}"
        self._name(version, version_id)
        self.num_reads += 1

    def _name(self, version: Version, version_id: tuple[str, int]) -> None:
        other = self._ids.setdefault(version_id, version)
        assert other is version, f"{other} and {version} have one id, {version_id}"
        assert version.id in (None, version_id), f"{version} is told as {version_id}"
        assert version.number == version_id[1]
        version.id = version_id

    def _open_a_number(self) -> None:
        number = max(1, self.newest.number + 1 - self.rng.randint(0, 8))
        right = self.newest.at(number)
        found = self._opened(number)
        assert found is None or found is right, f"{number} opens {found}, and not {right}"
        if right is self.newest:
            assert found is right

    def _open_a_pin(self) -> None:
        if not self._pins:
            return
        version = self.rng.choice(sorted(self._pins, key=lambda each: each.index))
        if self.newest.is_upon(version):
            found = self._opened(version.number)
            assert found is version, f"{version} is pinned, and {found} is opened"
        assert version.id is not None
        assert self._opened(version.id) is version

    def _opened(self, version: int | dbuffer.VersionId) -> Version | None:
        """Return the version that ``open(version=…)`` gives."""
        newcomer = self._newcomers[self.store]
        newcomer.follow_fork()
        try:
            with newcomer.open(version=version, timeout_s=0.0) as snapshot:
                content = PATTERN.version_of(dict(snapshot.tensors))
                self._require(snapshot.metadata["n"], content, snapshot.id)
                return self.versions[snapshot.metadata["n"]]
        except (dbuffer.VersionError, dbuffer.WaitTimeoutError):
            return None

    def _check_acknowledgement(self) -> None:
        if self._sender is None or self._last is not self._newest:
            return
        loader = self.rng.choice(self._loaders)
        asked = self.newest.at(max(1, self.newest.number - self.rng.randint(0, 4)))
        if asked is None:
            return
        has_applied = loader.has is not None and loader.has.is_upon(asked)
        try:
            self._sender.wait_applied(
                asked.number, receivers=loader.receiver.receiver_id, timeout_s=0.0
            )
            # Of versions from before this run, a record that was put back may tell too much, until
            # its receiver writes it again.
            is_of_run = asked.num_runs == self._num_runs
            is_believed = not loader.is_recorded and not is_of_run
            assert has_applied or is_believed, (
                f"{asked} is acknowledged by a receiver that has {loader.has}"
            )
        except dbuffer.WriterSupersededError:
            return  # the store was put back under it
        except (dbuffer.WaitTimeoutError, dbuffer.ReceiverFailedError):
            is_of_this_line = has_applied and self.newest.is_upon(loader.has)
            assert not (is_of_this_line and loader.is_recorded), f"{loader.has} is not {asked}"

    def _check_mirror(self) -> None:
        """Wait until the mirror has the newest version, or a lost version upon it."""

        mirrored: Version | None = None

        def is_current() -> bool:
            nonlocal mirrored
            with contextlib.suppress(*AWAY, IndexError):
                mirrored = self.versions[self._look(self._local)[0]]
            return mirrored is not None and mirrored.is_upon(self.newest)

        until(f"the mirror has {self.newest}", is_current, SOON_S)
        if mirrored is self.newest and self.rng.random() < 0.3:
            self._behind_mirror.look()

    def _wait_for_follower(self) -> None:
        follower, index = self._follower, self.newest.index
        assert follower is not None

        def is_there() -> bool:
            assert follower.error is None, repr(follower.error)
            return bool(follower.seen) and follower.seen[-1][0] == index

        until(f"the follower has {self.newest}", is_there, SOON_S)
        self._check_followed()

    def _check_followed(self) -> None:
        assert self._follower is not None
        for seen in self._follower.seen[:-1]:
            self._require(*seen)
        del self._follower.seen[:-1]

    def close(self) -> None:
        for each in [*self._loaders, self._behind_mirror]:
            each.receiver.close()
        for newcomer in self._newcomers.values():
            newcomer.close()
        assert self._mirror is not None
        assert self._follower is not None
        self._mirror.close()
        self._follower.close()
        self._end()


def publish_and_die(
    connection: Connection,
    store: Path,
    options: dict[str, Any],
    index: int,
    number: int,
    is_early: bool,
) -> None:
    """Publish a version, and die before a call that changes the disk, or at the end."""
    if is_early:
        at_call(number, die, CHANGING_CALLS)
    sender = dbuffer.WeightSender(store, **options)
    if not is_early:
        at_call(number, die, CHANGING_CALLS)
    sender.send(PATTERN.weights(index), metadata={"n": index})
    sys.setprofile(None)
    die()


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("DBUFFER_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.timing(retry_min_s=0.02)
def test_a_version_is_what_its_id_says_whatever_is_put_back(
    shm_path, mount, seed, monkeypatch, record_property: Record
):
    torch.set_num_threads(1)
    for number in range(WORLDS):
        with monkeypatch.context() as patch:
            world = live(shm_path / str(number), seed + number, patch)
        record_property("versions published among restores", len(world.versions))
        record_property("reads among restores", world.num_reads)


def live(directory: Path, seed: int, patch: pytest.MonkeyPatch) -> World:
    """Make a world, and let it publish all of its versions."""
    directory.mkdir()
    now, now_ns = time.time, time.time_ns
    world = World(directory, seed)
    patch.setattr(time, "time", lambda: now() + world.offset_s)
    patch.setattr(time, "time_ns", lambda: now_ns() + int(world.offset_s * 1e9))
    try:
        while len(world.versions) < VERSIONS:
            world.step()
    except BaseException as error:
        error.add_note(f"DBUFFER_SEED={seed}; the last of {len(world.steps)} steps:")
        error.add_note("\n".join(world.steps[-60:]))
        raise
    finally:
        world.close()
    shutil.rmtree(directory)
    return world
