"""A publish and a read as on a network mount: files of their own, reads into memory, faults.

``DBUFFER_MOUNT`` makes a local disk count as a network; what a network does to calls is put in
their place. What real mounts do is tested in ``tests/lab``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.errors import StoreCorruptError
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.medium import medium_of
from dbuffer.store.open_version import open_newest
from dbuffer.testing.moments import LOOKS, at_call
from tests.support.children import Child
from tests.support.damage import weights_file
from tests.support.patterns import OTHER, SMALL, Pattern, load, newest, publish
from tests.support.soak import in_turn, is_soak
from tests.support.steps import Step, at_step
from tests.support.stores import version_files, weights_files

pytestmark = pytest.mark.usefixtures("network")

MEGABYTE = 1 << 20
LARGE = Pattern(num_tensors=3, numel=MEGABYTE // 4)  # 2 MiB each: several spans


hasty = pytest.mark.timing(keep_superseded_s=0.0)
"""A writer that keeps nothing just for a moment: what no record holds, it removes."""


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    with dbuffer.WeightSender(store, num_threads=2) as sender:
        yield sender


@pytest.fixture
def receiver(store: Path) -> Iterator[dbuffer.WeightReceiver]:
    with dbuffer.WeightReceiver(store, receiver_id="mine", num_threads=2) as receiver:
        yield receiver


def mapped_and_opened(store: Path) -> tuple[bool, dict[str, int]]:
    """Whether this process has mapped anything in a store; what it has open, and what for."""
    opened = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path, info = str(link.readlink()), Path("/proc/self/fdinfo", link.name).read_text()
            if path.startswith(f"{store}/"):
                opened[path] = int(info.split()[3], 8) & os.O_ACCMODE
    return f"{store}/" in Path("/proc/self/maps").read_text(), opened


def held_by_mine(store: Path) -> int | None:
    """Read which version the receiver of these tests says that it reads."""
    record = DoubleBuffer(store).receiver("mine")
    return None if record is None or record.held is None else record.held.number


def path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let a function of `os` fail on some paths, from its ``first`` call there on."""

    def fail(
        name: str, number: int, is_hit: Callable[[str], object], first: int = 1, times: float = 1
    ) -> list[str]:
        real, calls, hits = getattr(os, name), itertools.count(1), []

        def call(where: Any, *arguments: Any, **options: Any) -> Any:
            path = os.fsdecode(path_of(where) if isinstance(where, int) else where)
            if is_hit(path) and first <= next(calls) < first + times:
                hits.append(path)
                raise OSError(number, os.strerror(number))
            return real(where, *arguments, **options)

        monkeypatch.setattr(os, name, call)
        return hits

    return fail


def is_any(path: str) -> bool:
    return "/store" in path


def is_record(path: str) -> bool:
    return path.endswith(("CURRENT", "manifest.json"))


def is_weights(path: str) -> bool:
    return path.endswith(".td") and path.count("/") > 2


def is_directory(path: str) -> bool:
    return path.endswith(("/A", "/B", "/store"))


# How it is done


def test_readers_map_nothing_and_keep_nothing_open(store, sender, receiver):
    """A mapping of a file that goes away is a SIGBUS; an open file keeps the old one in sight."""
    publish(sender, 1, 2, pattern=LARGE)
    sender.close()
    assert load(receiver, LARGE) == 2
    record = {str(receiver.record.path): os.O_WRONLY}
    assert mapped_and_opened(store) == (False, record)
    with receiver.open() as snapshot:
        assert LARGE.version_of(snapshot.tensors) == 2
        assert not mapped_and_opened(store)[0]
    assert load(receiver, LARGE) is None
    assert mapped_and_opened(store) == (False, record)
    receiver.close()
    assert mapped_and_opened(store) == (False, {})


@hasty
def test_writers_map_nothing_and_keep_open_for_writing_what_is_there(store, sender, monkeypatch):
    """Of a file that is open for writing no host gets a delegation, which would hold it up."""
    left_open: list[str] = []

    def checked(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            goes = os.fsdecode(arguments[-1])
            left_open.extend(path for path in mapped_and_opened(store)[1] if path == goes)
            function(*arguments, **options)

        return call

    # What is open when it is replaced or removed stays for a while, under another name.
    monkeypatch.setattr(os, "replace", checked(os.replace))
    monkeypatch.setattr(os, "unlink", checked(os.unlink))
    for version in range(1, 11):
        publish(sender, version)
        is_mapped, opened = mapped_and_opened(store)
        assert not is_mapped
        assert opened.pop(f"{store}/writer.lock") == os.O_RDWR
        there = {str(path) for path in store.rglob("*") if path.is_file()}
        assert opened.keys() == there - {f"{store}/writer.lock"}
        assert set(opened.values()) == {os.O_WRONLY}
    assert not left_open
    sender.close()
    assert mapped_and_opened(store) == (False, {})


def test_directories_are_opened_before_what_is_in_them(store, sender, receiver, monkeypatch):
    """By its name alone, a file may be the one that had the name a minute ago."""
    publish(sender, 1)
    opened: list[Path] = []
    real_open = os.open

    def noted(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if not flags & (os.O_WRONLY | os.O_CREAT) and str(store) in str(path):
            opened.append(Path(path))
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", noted)
    assert load(receiver) == 1
    files = [(before, path) for before, path in itertools.pairwise(opened) if path.suffix]
    files += [pair for pair in itertools.pairwise(opened) if pair[1].name == "CURRENT"]
    assert {path.name for _, path in files} > {"CURRENT", "manifest.json"}
    assert any(path.suffix == ".td" for _, path in files)
    assert all(before == path.parent for before, path in files)


def test_a_reader_says_what_it_reads_while_it_reads(store, sender, receiver):
    publish(sender, 1, 2)
    seen: list[int | None] = []

    def note() -> None:
        seen.append(held_by_mine(store))

    with pytest.raises(dbuffer.WeightsMismatchError):
        receiver.load_into(OTHER.empty())
    note()
    for version in ({}, {"version": 1}):
        at_step(Step("call", "read_tensors"), note)
        with receiver.open(**version):
            sys.setprofile(None)
            note()
        note()
    assert seen == [None, 2, None, None, 1, None, None], "in memory, the file need not be kept"
    assert DoubleBuffer(store).receiver("mine").applied_version == 1


def test_a_snapshot_of_any_version_outlives_its_file(store, sender, receiver):
    publish(sender, 1, 2)
    with receiver.open(version=1) as snapshot:
        assert DoubleBuffer(store).manifest("B").is_final
        publish(sender, 3, 4, 5)
        for path in store.glob("[AB]/weights-*"):
            os.truncate(path, 0)
            path.unlink()
        assert SMALL.version_of(snapshot.tensors) == 1
        assert SMALL.version_of(dict(snapshot.tensordict.items())) == 1
        copy = snapshot.copy()
    assert SMALL.version_of(copy) == 1
    with pytest.raises(dbuffer.VersionError):
        receiver.open(version=1, timeout_s=0).__enter__()


def test_loading_again_takes_no_new_memory(store, sender, receiver):
    """Loaded tensors do not lie in it."""
    places, loaded = set(), []
    for version in range(1, 6):
        publish(sender, version, pattern=LARGE)
        loaded.append(LARGE.empty())
        receiver.load_into(loaded[-1])
        places.add(receiver.reader._in_memory[1].data.data_ptr())
    assert [LARGE.version_of(target) for target in loaded] == [1, 2, 3, 4, 5]
    assert len(places) == 1
    publish(sender, 6)
    assert load(receiver) == 6
    memory = receiver.reader._in_memory[1].data
    assert memory.numel() < MEGABYTE, "memory for another layout is let go of"


# Two ends that take one mount for different things


def write_as_local(connection: Connection, store: Path, checksum: bool | str) -> None:
    os.environ["DBUFFER_MOUNT"] = "local"
    with dbuffer.WeightSender(store, checksum=checksum, num_threads=1) as sender:
        while True:
            publish(sender, connection.recv())
            connection.send(None)


def test_one_hosts_versions_are_read_on_a_network_if_they_have_checksums(store, receiver):
    """They are rewritten in place, and without checksums nobody could tell a mix."""
    target = SMALL.empty()

    def write(*versions: int) -> None:
        for version in versions:
            writer.send(version)
            writer.receive()

    with Child(write_as_local, store, "auto") as writer:
        for version in (1, 2, 3):
            write(version)
            with pytest.raises(dbuffer.StoreAccessError, match="DBUFFER_MOUNT=network"):
                receiver.load_into(target)
            with pytest.raises(dbuffer.StoreAccessError, match="DBUFFER_MOUNT=network"):
                receiver.open(timeout_s=1).__enter__()
    assert not any(tensor.any() for tensor in target.values())
    with Child(write_as_local, store, True) as writer:
        for version in (4, 5, 6, 7):
            write(version)
            assert load(receiver) == version
            with receiver.open() as snapshot:
                assert SMALL.version_of(snapshot.tensors) == version
        # Locks do not keep the writer from the file that is being read.
        begin = functools.partial(at_step, Step("c_return", "preadv"), lambda: write(8, 9, 10))
        assert read_at_last(store, "load", begin) == 10


def test_what_the_variable_may_be(store, monkeypatch):
    for value, is_network in (("network", True), ("local", False), ("auto", False)):
        monkeypatch.setenv("DBUFFER_MOUNT", value)
        medium = medium_of(store)
        assert medium.reaches_other_hosts == is_network
        assert medium.can_rewrite_in_place == (not is_network)
    monkeypatch.setenv("DBUFFER_MOUNT", "nfs")
    with pytest.raises(dbuffer.OptionError, match="'nfs'"):
        dbuffer.WeightSender(store)


# A reader that a writer comes round on


def read_at_last(store: Path, how: str, begin: Callable[[], None] = lambda: None) -> int:
    """Read all of the newest version, after ``begin``, which may let something happen meanwhile."""
    tensors = SMALL.empty()

    def keep(pairs: Any) -> None:
        tensors.update((name, tensor.clone()) for name, tensor in pairs)

    with dbuffer.WeightReceiver(store, receiver_id="mine", num_threads=1) as receiver:
        receiver.wait_for_version(1)
        begin()
        try:
            if how == "open":
                with receiver.open() as snapshot:
                    version = snapshot.version
                    keep(snapshot.tensors.items())
            else:
                version = receiver.load_into(keep if how == "function" else tensors)
        finally:
            sys.setprofile(None)
    assert version is not None
    assert SMALL.version_of(tensors) == version
    return version


@hasty
@pytest.mark.parametrize("how", ["open", "load", "function"] if is_soak() else ["open"])
def test_a_file_is_there_for_who_has_announced_it_before_the_second_look(shm_path, how):
    """The writer looks at the records after it has taken the manifest away, and the reader at
    the manifest after it has written its record: one of them sees the other."""
    announced: list[bool] = []
    versions: list[int] = []

    def publish_under_a_reader(store: Path, number: int) -> None:
        """Publish before that call of the reader of version 2, if it makes so many."""
        with dbuffer.WeightSender(store, num_threads=1) as sender:
            publish(sender, 1, 2)
            [old] = weights_files(store)["A"]

            def go_on() -> None:
                announced.append(held_by_mine(store) == 2)
                publish(sender, 3, 4, 5)
                assert (store / "A" / old).exists() == announced[-1]

            version = read_at_last(store, how, lambda: at_call(number, go_on, LOOKS))
            if len(announced) == number:
                versions.append(version)
                publish(sender, 6)
                assert not (store / "A" / old).exists(), "nobody reads it any more"

    for number in itertools.count(1):
        publish_under_a_reader(shm_path / f"{number}", number)
        if len(versions) < number:
            break
    # It is announced until it is in memory, and read from the second look on.
    first, last = announced.index(True), len(announced) - announced[::-1].index(True)
    assert all(announced[first:last])
    assert first > 5
    assert versions == sorted(versions, reverse=True)
    assert set(versions) == {5, 2}
    assert first < versions.index(2) < last


@hasty
@pytest.mark.parametrize("how", ["open", "load", "function"])
@pytest.mark.parametrize(
    "step", [Step("return", "open_newest"), Step("call", "read_tensors")], ids=str
)
def test_a_file_that_goes_under_a_reader_is_another_try(store, sender, fail, how, step):
    """Readers that were waited for long enough, and those that could write no record: a server
    tells them that the file is gone."""
    publish(sender, 1, 2)
    path, _ = weights_file(store, "A")
    hits: list[list[str]] = []

    def go_on() -> None:
        [record] = (store / "receivers").glob("mine.*.json")
        record.unlink()
        publish(sender, 3, 4)
        assert not path.exists()
        hits.extend(
            # An open file's path is followed by "(deleted)".
            fail(name, errno.ESTALE, lambda at: at.startswith(str(path)), times=math.inf)
            for name in ("pread", "preadv")
        )

    assert read_at_last(store, how, lambda: at_step(step, go_on)) == 4
    assert any(hits)


# What a network does to a reader's calls


@pytest.mark.parametrize("how", ["open", "load", "function"])
@in_turn(
    ("name", "is_hit", "first", "number"),
    [
        pytest.param("open", is_record, 1),
        pytest.param("open", is_directory, 1),
        pytest.param("open", is_weights, 1),
        pytest.param("read", is_record, 1),
        pytest.param("fstat", is_record, 1),
        pytest.param("fstat", is_weights, 1),
        pytest.param("fstat", is_weights, 2),
        pytest.param("pread", is_weights, 1),
        pytest.param("preadv", is_weights, 1),
    ],
    [errno.EIO, errno.EACCES, errno.ETIMEDOUT],
)
def test_a_stale_handle_is_tried_again_and_another_error_is_ours(
    store, sender, fail, how, name, is_hit, first, number
):
    publish(sender, 1, 2)
    stale = fail(name, errno.ESTALE, is_hit, first=first, times=3)
    assert read_at_last(store, how) == 2
    assert len(stale) == 3
    target = SMALL.empty()
    with dbuffer.WeightReceiver(store, receiver_id="mine", num_threads=2) as receiver:
        hits = fail(name, number, is_hit, first=first)
        with pytest.raises(dbuffer.StoreAccessError, match=f"{store}.*{os.strerror(number)}"):
            if how == "open":
                receiver.open(timeout_s=1).__enter__()
            else:
                receiver.load_into(target if how == "load" else lambda pairs: list(pairs))
        assert len(hits) == 1
        assert not any(tensor.any() for tensor in target.values()), "the target was not touched"
        assert held_by_mine(store) is None
        assert load(receiver) == 2


def test_short_reads_are_no_errors(store, sender, receiver, monkeypatch):
    """A server may give less than it was asked for, and take less than it was given."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:70_001], at))
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:70_001]], at)
    )
    publish(sender, 1, pattern=LARGE)
    assert load(receiver, LARGE) == 1


# What a network does to a writer's calls


@in_turn(
    ("name", "nth", "as_stream", "number"),
    [
        # 1, 2: the mark and its directory; 3: the weights; 4, 5: the manifest; 6, 7: the pointer,
        # which is in place by the time its directory is flushed.
        *(pytest.param("fsync", nth, False) for nth in range(1, 8)),
        # The tensors, the layout, the table of checksums; of a stream, each of eight tensors.
        *(pytest.param("pwrite", nth, False) for nth in (1, 2, 3)),
        *(pytest.param("pwrite", nth, True) for nth in (1, 9, 10)),
    ],
    [errno.ENOSPC, errno.EDQUOT, errno.EIO],
)
def test_a_call_that_fails_publishes_nothing_and_its_file_is_not_trusted_again(
    store, sender, receiver, fail, name, nth, as_stream, number
):
    """A full server says so at the first flush, and calls a second one good."""
    publish(sender, 1, 2)
    assert load(receiver) == 2
    before, weights = version_files(store), SMALL.weights(3)
    hits = fail(name, number, is_weights if name == "pwrite" else is_any, first=nth)
    kind = dbuffer.StoreAccessError if number == errno.EIO else dbuffer.StoreFullError
    with pytest.raises(kind, match=str(store)):
        sender.send(iter(weights.items()) if as_stream else weights)
    assert len(hits) == 1
    version = 3 if (name, nth) == ("fsync", 7) else 2
    assert load(receiver) == (3 if version == 3 else None)
    assert newest(store) == version
    left = version_files(store) - before
    if is_weights(hits[0]):
        assert not left, "half a version, or one of which nobody knows, is removed"
    # A number is not used again once the pointer was to be put: readers may know it.
    following = 4 if name == "fsync" and nth >= 6 else 3
    publish(sender, following)
    assert load(receiver) == following
    path, _ = weights_file(store, DoubleBuffer(store).pointer().buffer)
    assert path not in before | left, "no file is written twice, least of all that one"


def test_what_plainly_does_not_fit_is_not_begun(store, sender, receiver, monkeypatch):
    real_statvfs = os.statvfs

    def statvfs(path: Any) -> os.statvfs_result:
        found = list(real_statvfs(path))
        found[4] = 1  # blocks for those who are not root
        return os.statvfs_result(found)

    publish(sender, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs)
        for _ in range(3):
            with pytest.raises(dbuffer.StoreFullError, match=str(store)):
                publish(sender, 2)
            assert weights_files(store)["A"] == []
            assert newest(store) == 1
    publish(sender, 2)
    assert load(receiver) == 2


@pytest.mark.parametrize("file", ["CURRENT", "B/manifest.json", "weights"])
def test_what_does_not_come_back_as_it_was_written_is_an_error(store, sender, file):
    publish(sender, 1, 2)
    old = b"cut" if file == "weights" else (store / file).read_bytes()

    def meddle() -> None:
        path = weights_file(store)[0] if file == "weights" else store / file
        path.write_bytes(old)

    at_step(Step("c_return", "replace", "CURRENT"), meddle)
    with pytest.raises(dbuffer.StoreAccessError, match=r"\b3\b"):
        publish(sender, 3)
    sys.setprofile(None)
    publish(sender, 4)
    assert newest(store) == 4


@hasty
@pytest.mark.parametrize(
    "step",
    [
        Step("call", "BufferWriter.claim"),
        Step("call", "Draft.write"),
        Step("call", "BufferWriter.commit"),
        Step("c_return", "replace", "manifest.json", nth=2),
        Step("c_return", "replace", "CURRENT"),
    ],
)
def test_a_writer_that_was_cut_off_learns_of_its_successor_and_removes_nothing(
    store, monkeypatch, step
):
    """Over NFSv3 with ``nolock`` a second host's writer is not kept out by the lock."""
    monkeypatch.setattr(filesystem, "try_lock", lambda descriptor, *, exclusive: True)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(dbuffer.WeightSender(store, num_threads=1))
        publish(first, 1, 2)

        def take_over() -> None:
            second = dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=0.0)
            publish(stack.enter_context(second), 10, 11)

        at_step(step, take_over)
        for version in (3, 20, 20):
            with pytest.raises(dbuffer.WriterSupersededError):
                publish(first, version)
            sys.setprofile(None)
        assert newest(store) == 11
        with dbuffer.WeightReceiver(store) as receiver, receiver.open(version=10) as snapshot:
            assert SMALL.version_of(snapshot.tensors) == 10


# The rest of the package


@pytest.mark.timing(settle_s=0.5)
def test_a_reader_whose_file_is_gone_looks_ever_more_rarely(store, sender):
    publish(sender, 1)
    weights_file(store)[0].unlink()
    looks: list[int] = []
    with pytest.raises(StoreCorruptError, match="is not there"):
        open_newest(DoubleBuffer(store), newer_than=None, announce=looks.append)
    assert len(looks) < 50, "every half a millisecond"


# Errors after the flip, and of the system


@pytest.mark.timing(settle_s=0.1)
@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
def test_a_version_that_cannot_be_read_back_is_published(store, network, times, monkeypatch):
    read = DoubleBuffer.pointer

    def fail(view: DoubleBuffer) -> Any:
        nonlocal times
        if sys._getframe(1).f_code.co_name == "_read_back" and times:
            times -= 1
            raise OSError(errno.EIO, "Input/output error")
        return read(view)

    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1)
        monkeypatch.setattr(DoubleBuffer, "pointer", fail)
        is_raised = times > 1
        with (
            pytest.raises(dbuffer.StoreAccessError, match="version 2 is published")
            if is_raised
            else contextlib.nullcontext()
        ):
            publish(sender, 2)
        assert newest(store) == 2
        times = 0
        publish(sender, 3)
    assert newest(store) == 3


@pytest.mark.parametrize(
    "function", ["sync_directory", "unlock", "touched_at", "identity_of", "list_matching"]
)
def test_errors_of_the_system_are_ours(store, function, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with dbuffer.WeightSender(store, durable=True, keep=1) as sender:
        publish(sender, 1, 2, 3)
        monkeypatch.setattr(filesystem, function, fail)
        with contextlib.suppress(dbuffer.StoreAccessError):
            publish(sender, 4)
        monkeypatch.undo()
        publish(sender, 5)
    assert newest(store) == 5


@pytest.mark.parametrize("jump_s", [-1000.0, 1000.0])
def test_a_clock_that_is_set_makes_no_receiver_look_dead(store, network, jump_s, monkeypatch):
    medium, now = DoubleBuffer(store).medium, time.time
    store.mkdir()
    (store / "tmp").mkdir()
    before = medium.now_s()
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    assert abs(medium.now_s() - before) < 100
