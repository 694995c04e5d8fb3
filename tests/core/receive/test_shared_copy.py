"""Processes of one host that follow a store on a network mount: one reads, and all map.

Processes, their deaths, damage and limits are real. What a process reads is the kernel's count of
its read calls, and memory is what the kernel says of its mappings.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import dbuffer
from dbuffer.io import chain_reader
from dbuffer.receive import shared_copy
from dbuffer.receive.stager import Staged, Stager
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from tests.support.children import Child
from tests.support.damage import flip_bit, weights_file
from tests.support.namespaces import Boxed
from tests.support.patterns import Pattern, Sparse
from tests.support.stores import fill, small_disk
from tests.support.waiting import meanwhile, until

pytestmark = pytest.mark.usefixtures("network")

WEIGHTS = Sparse(num_tensors=8, numel=1 << 18, one_in=1024)
MODEL_BYTES = sum(tensor.nbytes for tensor in WEIGHTS.weights(1).values())
OTHER_LAYOUT = Pattern(num_tensors=3, numel=1 << 18)
SIZE = 4
WAIT_S = 60.0


class Rank:
    """A process that stages what is published, as a rank of an engine does."""

    def __init__(self, store: Path) -> None:
        self.messages = listen()
        receiver = dbuffer.WeightReceiver(store, poll_interval_s=0.05)
        receiver.reader.share()
        self._stager = Stager(receiver)
        self._staged: Staged | None = None
        self._read_before = bytes_read()

    def take(self, version: int) -> None:
        self._staged = self._stager.take(version, timeout_s=WAIT_S)

    def read(self) -> int:
        """Bytes read since the last time."""
        read_before, self._read_before = self._read_before, bytes_read()
        return self._read_before - read_before

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        assert self._staged.tensors is not None
        return self._staged.tensors

    def look(self) -> dict[str, int]:
        """Digests of what it has taken, in no memory of its own."""
        return digests_of(self.tensors)

    def scribble(self) -> None:
        """Write into all tensors, as a loader may."""
        for tensor in self.tensors.values():
            tensor.fill_(-1)

    def release(self) -> None:
        self._stager.release(applied=self._staged.version)
        self._staged = None

    def wait_for_progress(self, stall_s: float) -> None:
        """Wait for so long, from the next version on, for a process that reads for all."""
        TIMING.shared_stall_s = stall_s

    def logged(self) -> list[str]:
        return self.messages

    def close(self) -> None:
        self._staged = None
        self._stager.close()


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: xxhash.xxh3_64_intdigest(tensor.numpy()) for name, tensor in tensors.items()}


def listen() -> list[str]:
    """Collect the warnings that this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dbuffer").addHandler(handler)
    return messages


def bytes_read() -> int:
    """By this process so far, with read calls."""
    first_line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(first_line.removeprefix("rchar: "))


def serve(connection: Connection, store: Path, before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    rank = Rank(store)
    connection.send(None)
    while True:
        try:
            name, *args = connection.recv()
        except EOFError:  # the test has ended, outside of this container
            return
        try:
            connection.send(getattr(rank, name)(*args))
        except dbuffer.DBufferError as error:
            connection.send(error)


class Ranks:
    """Some of these processes."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children

    def begin(self, name: str, *args: Any) -> None:
        for child in self.children:
            child.send((name, *args))

    def outcomes(self) -> list[Any]:
        return [child.receive() for child in self.children]

    def all(self, name: str, *args: Any) -> list[Any]:
        self.begin(name, *args)
        return self.outcomes()

    def take(self, version: int, pattern: Pattern = WEIGHTS) -> float:
        """Let all take a version, which must be whole; what all read together, of the model."""
        assert self.all("take", version) == [None] * len(self.children)
        read = sum(self.all("read"))
        self.require(pattern.weights(version))
        return read / MODEL_BYTES

    def require(self, weights: dict[str, torch.Tensor]) -> None:
        """Require that this is what all have taken."""
        assert self.all("look") == [digests_of(weights)] * len(self.children)

    def switch(self, version: int, pattern: Pattern = WEIGHTS) -> float:
        """The same, and let all release it."""
        read = self.take(version, pattern)
        self.all("release")
        return read

    def one(self, index: int) -> Ranks:
        return Ranks([self.children[index]])

    def but(self, index: int) -> Ranks:
        return Ranks([child for child in self.children if child is not self.children[index]])

    def shared_bytes(self) -> int:
        """Memory that is shared, in all of them together: each page counts once."""
        return sum(field_of(child.pid, "Pss", "/memfd:dbuffer") for child in self.children)

    def own_bytes(self) -> int:
        """Memory of none but one process, of all of them together."""
        return sum(field_of(child.pid, "Anonymous", "") for child in self.children)


def field_of(pid: int, field: str, name: str) -> int:
    """Sum of a field, in bytes, of all mappings whose file's name contains this."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counts = name in line
        elif counts and first == f"{field}:":
            total += int(rest[0]) * 1024
    return total


@contextlib.contextmanager
def ranks_of(
    store: Path, size: int = SIZE, before: Callable[[], None] | None = None, kind: Any = Child
) -> Iterator[Ranks]:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(kind(serve, store, before)) for _ in range(size)]
        ranks = Ranks(children)
        ranks.outcomes()
        yield ranks


@pytest.fixture
def notes(store: Path) -> Iterator[Callable[[], list[Path]]]:
    """The notes of this test's store; none may be left."""
    place = shared_copy.SharedCopy(store)._path
    yield lambda: list(place.parent.glob(place.name))
    place.unlink(missing_ok=True)


def test_four_processes_read_a_version_once_and_have_it_in_memory_once(store, notes):
    with dbuffer.WeightSender(store) as sender, ranks_of(store) as ranks:
        before = ranks.own_bytes()
        sender.send(WEIGHTS.weights(1))
        assert 1.0 <= ranks.take(1) < 1.15
        assert 0.95 * MODEL_BYTES < ranks.shared_bytes() < 1.05 * MODEL_BYTES
        assert ranks.own_bytes() - before < MODEL_BYTES
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in notes())
        ranks.all("release")
        sender.send(WEIGHTS.weights(2))
        assert ranks.take(2) < 1.15
        assert 0.95 * MODEL_BYTES < ranks.shared_bytes() < 1.05 * MODEL_BYTES
        ranks.all("release")
        assert ranks.all("logged") == [[]] * SIZE
        ranks.all("close")
        assert notes() == []


def test_the_note_goes_when_others_look_at_it_as_its_owner_ends(store, notes):
    with dbuffer.WeightSender(store) as sender, ranks_of(store, 1) as ranks:
        sender.send(WEIGHTS.weights(1))
        ranks.switch(1)
        [note] = notes()
        with note.open() as looked_at:
            fcntl.flock(looked_at, fcntl.LOCK_EX)
            with meanwhile(fcntl.flock, looked_at, fcntl.LOCK_UN):
                ranks.all("close")
        assert notes() == []


def test_a_delta_is_read_once_and_applied_to_the_memory_of_the_version_before(store, notes):
    with dbuffer.WeightSender(store, delta=True) as sender, ranks_of(store) as ranks:
        sender.send(WEIGHTS.weights(1))
        assert ranks.switch(1) < 1.15
        for version in (2, 3, 4):
            assert sender.send(WEIGHTS.weights(version)).delta_bytes is not None
            assert ranks.take(version) < 0.15
            assert 0.95 * MODEL_BYTES < ranks.shared_bytes() < 1.05 * MODEL_BYTES
            ranks.all("release")
        sender.send(OTHER_LAYOUT.weights(5))
        assert ranks.switch(5, OTHER_LAYOUT) < 1.15
        assert ranks.all("logged") == [[]] * SIZE


@pytest.mark.timing(shared_free_s=0.2)
@pytest.mark.parametrize("delta", [False, True])
def test_what_a_process_has_taken_stays_as_it_is_while_others_go_on(delta, store, notes):
    with dbuffer.WeightSender(store, delta=delta) as sender, ranks_of(store) as ranks:
        sender.send(WEIGHTS.weights(1))
        ranks.take(1)
        ranks.but(0).all("release")
        for version in (2, 3):
            sender.send(WEIGHTS.weights(version))
            assert ranks.but(0).take(version) < (0.15 if delta else 1.15)
            ranks.one(0).require(WEIGHTS.weights(1))
            assert 1.95 * MODEL_BYTES < ranks.shared_bytes() < 2.05 * MODEL_BYTES
            ranks.but(0).all("release")
        ranks.one(0).all("release")
        assert ranks.one(0).switch(3) < 0.15


def test_what_a_process_writes_into_its_tensors_is_not_seen_by_others(store, notes):
    with dbuffer.WeightSender(store, delta=True) as sender, ranks_of(store) as ranks:
        sender.send(WEIGHTS.weights(1))
        ranks.take(1)
        ranks.one(0).all("scribble")
        ranks.but(0).require(WEIGHTS.weights(1))
        ranks.all("release")
        sender.send(WEIGHTS.weights(2))
        assert ranks.switch(2) < 0.15


def halt(marker: Path) -> None:
    """Wait for a second file, if this is the first to come here; the marker says which process."""
    with contextlib.suppress(FileExistsError), marker.open("x") as file:
        file.write(str(os.getpid()))
        file.flush()
        until("it may go on", marker.with_suffix(".over").exists, WAIT_S)


class Halting:
    """Lets the first process that reads a version stop in the middle of it, and before its end."""

    def __init__(self, marker: Path, how: str) -> None:
        self._marker, self._how = marker, how

    def __call__(self) -> None:
        really_read, really_apply = filesystem.read_into, chain_reader.apply_delta
        read = 0

        def read_and_halt(number: int, offset: int, memory: memoryview) -> int:
            nonlocal read
            done = really_read(number, offset, memory)
            read += done
            if read > MODEL_BYTES // 2:
                halt(self._marker)
            return done

        def apply_and_halt(*args: Any) -> None:
            really_apply(*args)
            halt(self._marker)

        if self._how == "whole":
            filesystem.read_into = read_and_halt
        else:
            chain_reader.apply_delta = apply_and_halt

    def go_on(self) -> None:
        self._marker.with_suffix(".over").touch()

    def halted(self, ranks: Ranks) -> int:
        """Wait until one has stopped; which."""
        until("a process stops", lambda: self._marker.exists() and self._marker.read_text())
        return [child.pid for child in ranks.children].index(int(self._marker.read_text()))


@contextlib.contextmanager
def one_halted(store: Path, tmp_path: Path, how: str) -> Iterator[tuple[Any, ...]]:
    """A sender, ranks of which one has halted in a version, which rank, and the version."""
    halting = Halting(tmp_path / "halted", how)
    with (
        dbuffer.WeightSender(store, delta=True) as sender,
        ranks_of(store, before=halting) as ranks,
    ):
        sender.send(WEIGHTS.weights(1))
        if how == "delta":
            ranks.switch(1)
            sender.send(WEIGHTS.weights(2))
        yield sender, ranks, halting, halting.halted(ranks), 2 if how == "delta" else 1


both = pytest.mark.parametrize("how", ["whole", "delta"])


@both
def test_others_read_when_the_one_that_reads_is_killed(how, store, notes, tmp_path):
    with one_halted(store, tmp_path, how) as (sender, ranks, _, index, version):
        ranks.children[index].kill()
        others = ranks.but(index)
        assert others.switch(version) < 1.15
        sender.send(WEIGHTS.weights(version + 1))
        assert others.switch(version + 1) < 0.15
        assert others.all("logged") == [[]] * (SIZE - 1)


@both
@pytest.mark.timing(shared_stall_s=0.3)
def test_others_read_by_themselves_while_the_one_that_reads_is_stopped(how, store, notes, tmp_path):
    with one_halted(store, tmp_path, how) as (sender, ranks, halting, index, version):
        ranks.children[index].signal(signal.SIGSTOP)
        others = ranks.but(index)
        others.switch(version)
        sender.send(WEIGHTS.weights(version + 1))
        others.switch(version + 1)
        for [line] in others.all("logged"):
            assert "no progress" in line
        ranks.children[index].signal(signal.SIGCONT)
        halting.go_on()
        assert ranks.one(index).switch(version + 1) < 2.15
        ranks.all("wait_for_progress", WAIT_S)  # a busy machine may hold up the one that reads
        sender.send(WEIGHTS.weights(version + 2))
        assert ranks.switch(version + 2) < 0.15


def test_damage_is_found_by_all_and_shared_with_none(store, notes):
    with dbuffer.WeightSender(store) as sender, ranks_of(store) as ranks:
        sender.send(WEIGHTS.weights(1))
        ranks.switch(1)
        ranks.all("close")
        sender.send(WEIGHTS.weights(2))
        flip_bit(weights_file(store, DoubleBuffer(store).pointer().buffer)[0], 0)
        ranks.all("__init__", store)
        for error in ranks.all("take", 2):
            assert isinstance(error, dbuffer.StoreCorruptError), error
            assert "sparse.0.weight" in str(error)
        sender.send(WEIGHTS.weights(3))
        ranks.switch(3)  # until then they tried again and again
        sender.send(WEIGHTS.weights(4))
        assert ranks.switch(4) < 1.15


def limit_files() -> None:
    """Let the kernel refuse larger files, of memory too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def hide_notes() -> None:
    shared_copy.NOTES = Path("/nonexistent")


@pytest.mark.parametrize("hinder", [limit_files, hide_notes])
def test_processes_that_cannot_share_say_so_once_and_read_by_themselves(hinder, store, notes):
    with dbuffer.WeightSender(store) as sender, ranks_of(store, 2, hinder) as ranks:
        for version in (1, 2):
            sender.send(WEIGHTS.weights(version))
            assert 2.0 <= ranks.switch(version) < 2.15
        for [line] in ranks.all("logged"):
            assert f"all of each version of {store} by itself" in line
        assert ranks.shared_bytes() == 0


def test_a_note_that_means_nothing_is_written_anew(store, notes):
    place = shared_copy.SharedCopy(store)._path
    place.touch(0o600)
    contents = (b"", b"{", b"[1]", b'{"pid": 1}', b"x" * 10_000)
    with dbuffer.WeightSender(store) as sender, ranks_of(store, 2) as ranks:
        for version, content in enumerate(contents, 1):
            place.write_bytes(content)
            sender.send(WEIGHTS.weights(version))
            assert ranks.switch(version) < 1.15


@pytest.mark.parametrize("how", ["link", "hard link", "mode"])
def test_a_file_in_the_place_of_the_note_is_not_touched(how, store, notes, shm_path):
    place = shared_copy.SharedCopy(store)._path
    other = shm_path / "precious"
    other.write_bytes(b"precious")
    other.chmod(0o600)
    if how == "link":
        place.symlink_to(other)
    elif how == "hard link":
        place.hardlink_to(other)
    else:
        place.write_bytes(b"")
        place.chmod(0o666)
    with dbuffer.WeightSender(store) as sender, ranks_of(store, 1) as ranks:
        sender.send(WEIGHTS.weights(1))
        assert ranks.switch(1) < 1.15
        assert ranks.shared_bytes() == 0
        assert len(*ranks.all("logged")) == 1
        ranks.all("close")
    assert other.read_bytes() == b"precious"
    assert len(notes()) == 1


def test_containers_that_cannot_share_read_by_themselves_at_once(store, notes):
    with dbuffer.WeightSender(store) as sender, ranks_of(store, 2, kind=Boxed) as ranks:
        for version in (1, 2):
            sender.send(WEIGHTS.weights(version))
            assert 2.0 <= ranks.switch(version) < 2.15
        assert ranks.all("logged") == [[], []]
        ranks.all("close")


def test_a_full_directory_of_notes_costs_only_sharing(store, shm_path, monkeypatch, caplog):
    with small_disk(shm_path / "notes", 1 << 20) as notes, dbuffer.WeightSender(store) as sender:
        monkeypatch.setattr(shared_copy, "NOTES", notes)
        sender.send(WEIGHTS.weights(1))
        with dbuffer.WeightReceiver(store) as receiver:
            receiver.reader.share()
            fill(notes)
            for version in (1, 2):
                with receiver.open() as snapshot:
                    assert WEIGHTS.version_of(dict(snapshot.tensors)) == version
                sender.send(WEIGHTS.weights(version + 1))
    [line] = [line for line in caplog.messages if "by itself" in line]
    assert "No space left" in line
