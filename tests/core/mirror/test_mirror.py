"""`Mirror`: real stores on tmpfs, real processes, killed, frozen and started again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

import dbuffer
from dbuffer.format import places
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations import metrics
from dbuffer.io import chain_reader
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.ends import state_of_senders
from dbuffer.mirror.mirror import FINAL, Mirror, mirror_id, start_mirror
from dbuffer.mirror.store_target import StoreTarget
from dbuffer.publish.publisher import Publication
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer, other_buffer
from dbuffer.store.liveness import Process
from dbuffer.store.writer import BufferWriter
from dbuffer.testing.moments import COPIES, at_call, die, stop
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support import ROOT
from tests.support.children import Child, Command, call
from tests.support.damage import flip_bit
from tests.support.patterns import OTHER, SMALL, SPARSE, Pattern, newest, received
from tests.support.ports import free_port
from tests.support.soak import is_soak, numbers, patience_s
from tests.support.steps import Step, at_step
from tests.support.stores import (
    assert_tidy,
    begin_watching,
    contents,
    fill,
    make_temporaries_old,
    mounted,
    open_files,
    remove_store,
    removed_but_mapped,
    small_disk,
    without_flock,
)
from tests.support.waiting import Gate, meanwhile

MEGABYTE = 1 << 20
LONG = Pattern(num_tensors=9, numel=MEGABYTE // 8)  # 9 MB: read in three spans
LONG_BYTES = 9 * MEGABYTE
DISK_BYTES = 24 * MEGABYTE  # holds two of them, and no third
POLL_S = 0.05
SOON_S = 30.0
"""Bound of what takes a moment, on a machine that is busy."""


def publish(store: Path, *versions: int, pattern: Pattern = SMALL, **options: Any) -> None:
    with dbuffer.WeightSender(store, checksum=True, **options) as sender:
        for version in versions:
            sender.send(pattern.weights(version), version=version, metadata={"step": version})


def quick(remote: Path, local: Path, **options: Any) -> Mirror:
    return Mirror(remote, local, **{"poll_interval_s": POLL_S, "num_threads": 2, **options})


def arrives(one: Mirror, local: Path, version: int, *patterns: Pattern) -> None:
    """See that a mirror copies the newest version, whole."""
    one.wait_until_current(TIMEOUT_S)
    assert newest(local, *patterns, verify=True) == version


def mirror_once(remote: Path, local: Path) -> None:
    """Copy the newest version."""
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)


def wait_for_signal(connection: Connection, remote: Path, local: Path, wait: str) -> None:
    """Wait in the main thread for SIGINT, which the main thread blocks after SIGUSR1."""
    end = threading.Event()

    def block(*_: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def on_copied(_: Publication) -> None:
        connection.send("waits")
        if wait == "close":
            end.wait()

    def request(_: int) -> None:
        connection.send("waits")
        end.wait()

    signal.signal(signal.SIGINT, lambda *_: end.set())
    signal.signal(signal.SIGUSR1, block)
    mirror = quick(remote, local, on_copied=on_copied)
    match wait:
        case "run":
            mirror.run(end)
        case "close":
            mirror.start()
            until("it is copied", lambda: mirror.stats["copied"])
            mirror.close()
        case "requests":
            Bucket("s3://bucket/policy").in_parallel(request, [1])
    connection.send("ended")


def blocks_and_sleeps(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)
    return bool(blocked >> (signal.SIGINT - 1) & 1) and "State:\tS" in status


@pytest.mark.parametrize("wait", ["run", "close", "requests"])
def test_a_signal_is_handled_during_a_wait_that_it_does_not_interrupt(remote, local, wait):
    """A signal that comes just before the main thread waits interrupts no wait.

    Here another thread gets the signal, since the main thread blocks it.
    """
    publish(remote, 1)
    with Child(wait_for_signal, remote, local, wait) as child:
        assert child.receive() == "waits"
        child.signal(signal.SIGUSR1)
        until("its main thread waits, and blocks SIGINT", lambda: blocks_and_sleeps(child.pid))
        child.signal(signal.SIGINT)
        assert child.receive(SOON_S) == "ended"


def serve(connection: Connection, remote: Path, local: Path, options: dict[str, Any]) -> None:
    """Mirror in a thread; send what is asked for by name, of the mirror."""
    with quick(remote, local, **options).start() as mirror:
        connection.send(mirror.is_elected)
        while (name := connection.recv()) is not None:
            connection.send(getattr(mirror, name))
    connection.send("closed")


def ask(child: Child, name: str) -> Any:
    child.send(name)
    return child.receive()


def staged_version(remote: Path) -> int | None:
    staged = mirror_record(remote).staged
    return None if staged is None else staged.number


def mirror_record(remote: Path) -> ReceiverRecord:
    [record] = [r for r in DoubleBuffer(remote).receivers() if r.receiver.startswith("mirror-")]
    return record


def refused(source: Path, target: Path, *, error: type[Exception] = dbuffer.OptionError) -> str:
    """Return the message with which a mirror is refused; it leaves the target as it was.

    Errors that may pass do not end a run.
    """
    before = contents(target, "mirror.lock")
    is_final = error is dbuffer.OptionError
    start = partial(Mirror.start, timeout_s=0.5)
    for begin in (start, Mirror.run) if is_final else (start,):
        with quick(source, target) as one, pytest.raises(error) as caught:
            begin(one)
        assert contents(target, "mirror.lock") == before
    return str(caught.value)


@pytest.fixture
def another(shm_path: Path) -> Path:
    """Path of a store that is another than the remote one."""
    return shm_path / "another"


# What is copied


def test_a_copy_is_rolled_back_where_it_is_published(capsys, remote, local):
    publish(remote, 1)
    mirror_once(remote, local)
    code, _, err = call(capsys, "rollback", local, 1)
    assert code == 2
    assert "roll back the original store" in err


def is_current(remote: Path, local: Path) -> bool:
    """Whether both stores have the same newest version, or none."""
    return newest_id(remote) == newest_id(local)


def newest_id(store: Path) -> VersionId | None:
    buffers = DoubleBuffer(store)
    pointer = buffers.newest_pointer() if buffers.exists() else None
    return None if pointer is None else pointer.id


def hold_up_after(gate: Gate, *versions: int) -> Callable[[Publication], None]:
    """Hold a mirror up after it has copied certain versions."""

    def on_copied(copied: Publication) -> None:
        if copied.version in versions:
            gate.hold_up()

    return on_copied


def test_who_waits_for_a_version_finds_it_told_and_counted(remote, local):
    """Readers have it before. Versions that come before or while one is copied are skipped."""
    told, gate = [], Gate()
    hold_up = hold_up_after(gate, 10)

    def on_copied(copied: Publication) -> None:
        told.append((copied.version, one.stats["copied"], newest(local)))
        hold_up(copied)

    publish(remote, *range(1, 11))
    with quick(remote, local, on_copied=on_copied) as one:
        one.start()
        until("it is copied", lambda: is_current(remote, local))
        with pytest.raises(dbuffer.WaitTimeoutError):
            one.wait_until_current(0.2)
        publish(remote, *range(11, 21))
        gate.may_go_on.set()
        arrives(one, local, 20)
    assert told == [(10, 1, 10), (20, 2, 20)]
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)
        assert one.version == 20, "found published"


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_what_on_copied_raises_reaches_who_waits(remote, local, kind, monkeypatch):
    """The error arrives even if closing the mirror's stores takes a while."""
    close = StoreTarget.close

    def on_copied(copied: Publication) -> None:
        raise kind(copied.version)

    def close_slowly(target: StoreTarget) -> None:
        time.sleep(0.3)
        close(target)

    monkeypatch.setattr(StoreTarget, "close", close_slowly)
    publish(remote, 1)
    with quick(remote, local, on_copied=on_copied).start() as one:
        with pytest.raises(kind):
            one.wait_until_current(TIMEOUT_S)


def test_stats_and_metrics(remote, local):
    registry = CollectorRegistry()
    publish(remote, 5, pattern=LONG)
    with quick(remote, local).start() as one:
        metrics.register(one, registry)
        one.wait_until_current(TIMEOUT_S)
        until("it says so", lambda: one.stats["copied"] == 1)
        assert one.stats["copied_bytes"] == LONG_BYTES
        assert one.stats["copy_s"] > 0
        assert one.stats["failures"] == 0
        until("it is in the record", lambda: staged_version(remote) == 5)
        record = mirror_record(remote)
        assert record.stats == one.stats
        assert (record.held, record.applied) == (None, None)
        expected = {
            "elected": 1,
            "version": 5,
            "versions_total": 1,
            "bytes_total": LONG_BYTES,
            "seconds_total": one.stats["copy_s"],
            "failures_total": 0,
        }
        for name, value in expected.items():
            assert registry.get_sample_value(f"dbuffer_mirror_{name}") == value, name


def test_nothing_is_left_behind(remote, local):
    publish(remote, 1, pattern=LONG)
    begin_watching(remote)
    threads, files = set(threading.enumerate()), open_files(remote.parent)
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)
        publish(remote, 2, 3)
        one.wait_until_current(TIMEOUT_S)
    one.close()  # once more is fine
    assert set(threading.enumerate()) <= threads
    assert open_files(remote.parent) == files
    assert_tidy(local)
    assert_tidy(remote)
    assert not one.is_elected


# Deltas


@pytest.fixture
def changing(
    remote: Path, mount: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dbuffer.WeightSender]:
    """A sender whose versions are deltas, for a while upon one anchor."""
    monkeypatch.setattr("dbuffer.format.chain.MAX_CHAIN", 3)
    with dbuffer.WeightSender(remote, checksum=True, delta=True) as sender:
        yield sender


def chain_in(store: Path) -> list[VersionId]:
    double = DoubleBuffer(store)
    return double.manifest(double.pointer().buffer).chain


def test_deltas_are_copied_with_whole_versions(remote, local, changing, mount, monkeypatch):
    """Each copied version is whole, and says what changed since the one copied before it."""
    read = Mock(wraps=chain_reader.read_tensors)
    monkeypatch.setattr(chain_reader, "read_tensors", read)
    with quick(remote, local).start() as one:
        for version in range(1, 12):
            changing.send(SPARSE.weights(version))
            arrives(one, local, version)
            double = DoubleBuffer(local)
            found = double.manifest(double.pointer().buffer)
            assert found.anchor is None
            assert len(found.chain) == (0 if version == 1 else min(version, 4))
            for name in found.chain[1:]:
                there, here = (store / "deltas" / f"{name}.delta" for store in (remote, local))
                if there.exists():
                    assert there.read_bytes() == here.read_bytes()
        if mount == "network":  # each version has a file of its own, which is not mapped
            assert DoubleBuffer(local).manifest("A").is_final
            assert str(local) not in Path("/proc/self/maps").read_text()
        else:
            assert read.call_count == 2, "two whole copies, one for each buffer; then what changed"
            assert_tidy(local)


def test_versions_that_were_skipped_have_their_deltas_too(remote, local, changing):
    changing.send(SPARSE.weights(1))
    mirror_once(remote, local)
    for version in (2, 3):
        changing.send(SPARSE.weights(version))
    with quick(remote, local).start() as one:
        arrives(one, local, 3)
        assert [each.number for each in chain_in(local)] == [1, 2, 3], "it goes on after a restart"
        for version in (4, 5):
            changing.send(SPARSE.weights(version))
        arrives(one, local, 5)
        assert chain_in(local)[-1] == chain_in(remote)[-1]


def test_layouts_that_change_begin_a_chain(remote, local, changing):
    with quick(remote, local).start() as one:
        for version in range(1, 13):
            pattern = OTHER if version % 4 == 0 else SPARSE
            changing.send(pattern.weights(version))
            arrives(one, local, version)
            assert (chain_in(local) == []) == (version % 4 < 2)


@pytest.mark.parametrize("damage", ["lost", "flipped", "emptied"])
@pytest.mark.timing(settle_s=0.05)
def test_a_damaged_remote_delta(remote, local, changing, damage, mount):
    """What it needs is read whole where that is there, or with the next version."""
    gate = Gate()
    with quick(remote, local, on_copied=hold_up_after(gate, 2)).start() as one:
        for version in (1, 2):
            changing.send(SPARSE.weights(version))
            until("it is copied", lambda: is_current(remote, local))
        for version in (3, 4):
            changing.send(SPARSE.weights(version))
        path = remote / "deltas" / f"{chain_in(remote)[-2]}.delta"
        if damage == "lost":
            path.unlink()
        elif damage == "emptied":
            os.truncate(path, 0)
        else:
            flip_bit(path, 8 * path.stat().st_size - 100)
        gate.may_go_on.set()
        if mount == "local":
            arrives(one, local, 4)  # the buffer is whole
            assert one.stats["failures"] == 0
        else:
            until("it is noted", lambda: mirror_record(remote).problem)
            assert path.name in mirror_record(remote).problem
            assert mirror_record(remote).unreadable.number == 4
            with pytest.raises(dbuffer.WaitTimeoutError, match=path.name):
                one.wait_until_current(0.0)
            assert newest(local, verify=True) == 2
        for version in (5, 6, 7):
            changing.send(SPARSE.weights(version))
            arrives(one, local, version)
        until("it is forgotten", lambda: mirror_record(remote).problem is None)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_damaged_local_buffer_is_not_built_upon(remote, local, mount, checksum):
    """Without checksums, each version is copied whole."""
    with (
        dbuffer.WeightSender(remote, checksum=checksum, delta=True) as sender,
        quick(remote, local).start() as one,
    ):
        for version in range(1, 8):
            sender.send(SPARSE.weights(version))
            one.wait_until_current(TIMEOUT_S)
            assert newest(local) == version
            if version == 4:
                double = DoubleBuffer(local)
                idle = other_buffer(double.pointer().buffer)
                flip_bit(double.weights_path(idle, double.manifest(idle)), 77)
        assert one.stats["failures"] == 0


@pytest.mark.parametrize("damage", [b"garbled", b""])
def test_a_damaged_local_pointer_is_replaced(remote, local, damage):
    """The next version goes into a new file, and its deltas have nothing there to lead from."""
    with (
        dbuffer.WeightSender(remote, checksum=True, delta=True) as sender,
        quick(remote, local).start() as one,
    ):
        sender.send(SPARSE.weights(1))
        one.wait_until_current(TIMEOUT_S)
        (local / "CURRENT").write_bytes(damage)
        sender.send(SPARSE.weights(2))
        arrives(one, local, 2, SPARSE)
        assert one.stats["failures"] == 0


# Damage, and what passes


def newest_file(store: Path) -> Path:
    double = DoubleBuffer(store)
    pointer = double.pointer()
    return store / pointer.buffer / double.manifest(pointer.buffer).file


@contextlib.contextmanager
def damaged_on_the_way(
    remote: Path, local: Path, good: tuple[int, ...] = (1,), pattern: Pattern = SMALL
) -> Iterator[Mirror]:
    """A mirror that has all good versions; the next one is damaged before it is read."""
    gate = Gate()
    with quick(remote, local, on_copied=hold_up_after(gate, good[-1])).start() as one:
        for version in good:
            publish(remote, version, pattern=pattern)
            until("it is copied", lambda: is_current(remote, local))
        publish(remote, good[-1] + 1, pattern=pattern)
        flip_bit(newest_file(remote), 8 * 1000)
        gate.may_go_on.set()
        yield one


@pytest.mark.timing(retry_min_s=0.02)
def test_a_damaged_version_is_not_published(remote, local, caplog, monkeypatch):
    """The next one is, at once, however often this one was tried."""
    note_failure = FollowLoop._note_failure

    def note(loop: FollowLoop, error: Exception) -> None:
        note_failure(loop, error)
        if one.stats["failures"] == 4:  # no more until the test is over
            loop._retry_at = time.monotonic() + 1000

    monkeypatch.setattr(FollowLoop, "_note_failure", note)
    with damaged_on_the_way(remote, local) as one:
        until("it was tried four times", lambda: one.stats["failures"] == 4)
        assert newest(local, verify=True) == 1
        problem = mirror_record(remote).problem
        assert problem.startswith("StoreCorruptError: ")
        assert "was damaged after it was published" in problem
        told = [
            r for r in caplog.records if r.levelno >= logging.ERROR and str(remote) in r.message
        ]
        assert len(told) == 1, "it is told once"
        until("half a version is removed", lambda: len(list(local.glob("?/weights-*"))) == 1)
        assert not removed_but_mapped(local)
        publish(remote, 3)
        arrives(one, local, 3)
        assert one.stats["failures"] == 4
        until("it is forgotten", lambda: mirror_record(remote).problem is None)
    assert_tidy(local)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as path:
        yield path


def test_a_full_local_store_is_tried_again(remote, disk):
    local = disk / "local"
    publish(remote, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)
        filler = fill(disk, leave_bytes=MEGABYTE)
        publish(remote, 2, pattern=LONG)
        until("it is noted", lambda: one.stats["failures"] and mirror_record(remote).problem)
        assert mirror_record(remote).problem.startswith("StoreFullError: ")
        assert newest(local, verify=True) == 1
        filler.unlink()
        arrives(one, local, 2, LONG)


def test_room_for_two_versions_is_enough_after_a_failure(remote, disk, caplog):
    """What was made for the version that failed is given back before the next is made."""
    with damaged_on_the_way(remote, disk / "local", good=(1, 2), pattern=LONG) as one:
        until("it was tried twice", lambda: one.stats["failures"] >= 2)
        publish(remote, 4, pattern=LONG)
        arrives(one, disk / "local", 4, LONG)
    assert "StoreFullError" not in caplog.text


@pytest.mark.parametrize("trouble", ["away", "open to others", "damaged", "emptied"])
def test_trouble_with_the_remote_store_passes(shm_path, local, trouble):
    """Its problem is not shown any more, also while there is nothing new to copy."""
    remote, away = shm_path / "mount" / "remote", shm_path / "elsewhere"
    publish(remote, 5)
    with quick(remote, local).start() as one:
        arrives(one, local, 5)
        until("the record is there", lambda: staged_version(remote) == 5)
        if trouble == "away":
            remote.parent.rename(away)
            until("it fails", lambda: one.stats["failures"] >= 1)
            away.rename(remote.parent)
        elif trouble == "open to others":
            remote.chmod(0o777)
            until("it fails", lambda: one.stats["failures"] >= 1)
            remote.chmod(0o700)
        else:
            pointer = (remote / "CURRENT").read_bytes()
            (remote / "CURRENT").unlink()
            if trouble == "damaged":
                (remote / "CURRENT").write_bytes(b"{}")
            problem = "format None" if trouble == "damaged" else "emptied: it held version 5"
            until("it is told", lambda: problem in (mirror_record(remote).problem or ""))
            (remote / "CURRENT").write_bytes(pointer)
        assert newest(local) == 5
        until("it has passed", lambda: mirror_record(remote).problem is None)
        publish(remote, 6)
        arrives(one, local, 6)


@pytest.mark.parametrize("version", [1, 5, 9], ids=["lower", "equal", "higher"])
def test_a_remote_store_that_was_begun_anew_is_mirrored(remote, local, version, caplog):
    """Readers of the local store see what those of the remote one see: a fork."""
    publish(remote, 5)
    target = SMALL.empty()
    with quick(remote, local).start() as one, dbuffer.WeightReceiver(local) as receiver:
        one.wait_until_current(TIMEOUT_S)
        assert receiver.load_into(target) == 5
        remove_store(remote)
        with dbuffer.WeightSender(remote) as sender:
            sender.send(SMALL.weights(3), version=version)
            one.wait_until_current(TIMEOUT_S)
            with pytest.raises(dbuffer.VersionRegressedError):
                receiver.load_into(target)
            assert SMALL.version_of(target) == 5
            receiver.follow_fork()
            assert receiver.load_into(target) == version
            assert SMALL.version_of(target) == 3
            sender.wait_applied(version, receivers=[receiver.receiver_id], timeout_s=TIMEOUT_S)
            sender.send(SMALL.weights(4))
            one.wait_until_current(TIMEOUT_S)
            assert receiver.load_into(target) == version + 1
        assert_tidy(local)
    said = [record for record in caplog.records if "goes on with the fork" in record.message]
    assert [record.levelname for record in said] == ["WARNING"]


@pytest.mark.parametrize("again", [(), (2, 3)], ids=["goes back", "forks"])
@pytest.mark.parametrize("mirror_is", ["running", "started"])
@pytest.mark.timing(retry_min_s=0.02)
def test_a_backup_in_place_of_the_remote_store_is_followed(remote, local, again, mirror_is, caplog):
    """Of a version that was lost, none of the same number is taken for it."""
    publish(remote, 1)
    backup = shutil.copytree(remote, remote.with_name("backup"))
    publish(remote, 2, 3)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(quick(remote, local).start())
        arrives(one, local, 3)
        if mirror_is == "started":
            one.close()
        lost = DoubleBuffer(local).pointer()
        shutil.rmtree(remote)
        backup.rename(remote)
        for step in again:
            publish(remote, step, pattern=OTHER)
        if mirror_is == "started":
            one = stack.enter_context(quick(remote, local).start())
        if not again:  # what the source has lost stays, and that is told
            until("it is told", lambda: "went back" in caplog.text)
            assert DoubleBuffer(local).pointer() == lost
            publish(remote, 2, pattern=OTHER)
        until("it is copied", lambda: is_current(remote, local))
    assert newest(local, OTHER, verify=True) == newest(remote, OTHER)


@pytest.mark.parametrize("what", ["directory", "contents"])
@pytest.mark.timing(retry_min_s=0.05, retry_max_s=0.1)
def test_a_local_store_that_was_removed_is_made_anew(remote, local, what):
    publish(remote, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)
        shutil.rmtree(local)
        if what == "contents":
            local.mkdir(mode=0o700)
        publish(remote, 2)
        arrives(one, local, 2)
        assert one.is_elected
        with quick(remote, local).start() as other:
            assert not other.is_elected
        publish(remote, 3)
        arrives(one, local, 3)


def test_mirrors_of_one_directory_have_one_id(monkeypatch, tmp_path):
    """Also in containers that see other processes; not if it is another directory at this path."""
    local = tmp_path / "local"
    local.mkdir()
    first = mirror_id(str(local))
    here = Process.here()
    for elsewhere, is_same in (({"pid_namespace": 1}, True), ({"boot": "another"}, False)):
        there = replace(here, **elsewhere)
        monkeypatch.setattr(Process, "here", lambda there=there: there)
        assert (mirror_id(str(local)) == first) is is_same
    monkeypatch.setattr(Process, "here", lambda: here)
    local.rename(tmp_path / "away")
    local.mkdir()
    assert mirror_id(str(local)) != first


# Killed


LAST = 4


def copy_to_a_call(
    connection: Connection, remote: Path, local: Path, number: int, mount: str
) -> None:
    """Publish and copy versions; die before a call in the last copy, which applies a delta."""
    os.environ["DBUFFER_MOUNT"] = mount
    end = threading.Event()
    with dbuffer.WeightSender(remote, checksum=True, delta=True, num_threads=1) as sender:
        sender.send(SPARSE.weights(1))

        def on_copied(copied: Publication) -> None:
            sys.setprofile(None)
            if copied.version == LAST:
                end.set()
                return
            sender.send(SPARSE.weights(copied.version + 1))
            if copied.version == LAST - 1:
                at_call(number, die, COPIES, repeats=is_soak())

        with quick(remote, local, num_threads=1, on_copied=on_copied) as one:
            one.run(end)


@pytest.mark.timeout(patience_s())
def test_killed_at_any_moment_of_a_copy(shm_path, mount, record_property):
    has_flipped = False
    kills = 0
    for number in numbers(first=1 + (mount == "network"), every=6):
        remote, local = shm_path / f"remote-{number}", shm_path / f"local-{number}"
        with Child(copy_to_a_call, remote, local, number, mount) as child:
            if (code := child.wait()) == 0:
                break
        assert code == -signal.SIGKILL
        version = newest(local, verify=True)
        assert version in (LAST, LAST - (not has_flipped)), f"before call {number}"
        has_flipped, kills = version == LAST, kills + 1
        make_temporaries_old(local)
        with (
            dbuffer.WeightSender(remote, checksum=True, delta=True) as sender,
            quick(remote, local).start() as one,
        ):
            for later in (LAST + 1, LAST + 2):  # into both buffers
                arrives(one, local, later - 1)
                sender.send(SPARSE.weights(later))
            arrives(one, local, LAST + 2)
        if mount != "network":
            assert_tidy(local)
        remove_store(remote)
        remove_store(local)
    assert kills > 5
    record_property("kills of a mirror in the middle of a copy", kills)


def mirror_and_stop(connection: Connection, remote: Path, local: Path) -> None:
    """Freeze in the middle of the first copy; send each version that was copied."""

    def on_copied(copied: Publication) -> None:
        connection.send(copied.version)

    copy = StoreTarget.copy

    def copy_and_stop(*arguments: Any) -> Publication:
        StoreTarget.copy = copy  # type: ignore[method-assign]
        at_step(Step("c_call", "preadv", nth=2), stop)
        return copy(*arguments)

    StoreTarget.copy = copy_and_stop  # type: ignore[method-assign]
    with quick(remote, local, num_threads=1, on_copied=on_copied) as one:
        one.run()


def publish_with_no_locks(connection: Connection, remote: Path) -> None:
    without_flock()
    with dbuffer.WeightSender(remote, checksum=False) as sender:
        for version in (2, 3):
            sender.send(LONG.weights(version))
    connection.send("published")


def test_what_is_overwritten_while_it_is_copied_is_not_published(remote, local):
    """By a sender that no lock holds back, and with no checksums to tell."""
    with dbuffer.WeightSender(remote, checksum=False) as sender:
        sender.send(LONG.weights(1))
    with Child(mirror_and_stop, remote, local) as mirror:
        mirror.wait_until_stopped()
        with Child(publish_with_no_locks, remote) as sender:
            assert sender.receive() == "published"
        mirror.signal(signal.SIGCONT)
        assert mirror.receive() == 3
        assert newest(local, LONG) == 3


# Several, and stores that are not what was meant


@pytest.mark.timing(retry_min_s=0.05)
def test_one_of_three_is_elected_and_another_takes_over(remote, local):
    publish(remote, 1)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(serve, remote, local, {})) for _ in range(3)]
        elected = {child: child.receive() for child in children}
        until("version 1 is there", lambda: newest(local) == 1)
        for version in (2, 3, 4):
            assert sorted(elected.values())[-2:] in ([False, True], [True]), "one, and one only"
            leader = next(child for child, is_elected in elected.items() if is_elected)
            until("it knows", lambda one=leader, at=version - 1: ask(one, "version") == at)
            leader.kill()
            del elected[leader]
            if not elected:
                break
            killed_at = time.monotonic()
            publish(remote, version)
            until("another copies it", lambda at=version: newest(local) == at)
            assert time.monotonic() - killed_at < SOON_S
            elected = {child: ask(child, "is_elected") for child in elected}
        assert newest(local, verify=True) == 3


@pytest.mark.timing(retry_min_s=0.05, retry_max_s=0.1)
def test_one_stands_by_if_another_was_elected_in_the_store_made_anew(remote, local):
    publish(remote, 1)
    with quick(remote, local).start() as one, quick(remote, local).start() as other:
        one.wait_until_current(TIMEOUT_S)
        shutil.rmtree(local)
        for version in (2, 3):
            arrives(other, local, version - 1)
            publish(remote, version)
        arrives(other, local, 3)
        until("the other stands by", lambda: not one.is_elected)
        assert one.error is None


def test_one_that_stands_by_copies_nothing_and_can_be_closed(remote, local, shm_path):
    """At once, also while the network is away."""
    publish(remote, 1)
    with quick(remote, local).start() as first:
        first.wait_until_current(TIMEOUT_S)
        with quick(remote, local).start() as second:
            assert not second.is_elected
            second.wait_until_current(TIMEOUT_S)  # the other one brings it
            publish(remote, 2)
            second.wait_until_current(TIMEOUT_S)
            started = time.monotonic()
        assert time.monotonic() - started < SOON_S
        first.wait_until_current(TIMEOUT_S)  # it has told of it, too
        assert (first.version, second.version) == (2, None)
        assert second.stats["copied"] == 0
    with dbuffer.WeightReceiver(local) as receiver, receiver.open():
        remote.rename(shm_path / "elsewhere")
        with quick(remote, local).start():
            started = time.monotonic()
            with quick(remote, local).start() as second:
                assert not second.is_elected
            assert time.monotonic() - started < SOON_S
    assert newest(local) == 2


@pytest.mark.timing(retry_min_s=0.02)
def test_one_that_stands_by_takes_its_record_back(remote, local, monkeypatch):
    """Its record, which has the id of the elected mirror, stays only as long as its problem."""

    def fail() -> None:
        raise dbuffer.StoreAccessError("the network is down")

    def problems() -> list[str | None]:
        return [record.problem for record in DoubleBuffer(remote).receivers()]

    publish(remote, 1)
    with quick(remote, local).start() as first:
        first.wait_until_current(TIMEOUT_S)
        until("the first has told", lambda: problems() == [None])
        with quick(remote, local).start() as second:
            with monkeypatch.context() as patch:
                patch.setattr(second._target, "elect", fail)
                until("the second has failed", lambda: len(problems()) == 2)
            until("only the first tells", lambda: len(problems()) == 1)
            assert not second.is_elected
        assert problems() == [None]
        assert mirror_record(remote).token == first._source.record.current.token
        assert not mirror_record(remote).has_ended


def read_and_stay(connection: Connection, store: Path, name: str) -> None:
    with dbuffer.WeightReceiver(store, receiver_id=name, poll_interval_s=POLL_S) as receiver:
        connection.send(receiver.load_into(SMALL.empty()))
        connection.recv()


@pytest.mark.parametrize("source", ["away", "empty"])
@pytest.mark.timing(retry_min_s=0.05)
def test_a_copy_of_nothing_is_not_taken_for_the_newest(remote, local, source):
    """A start says what to do; it goes on, as a run does."""
    publish(remote, 50)
    mirror_once(remote, local)
    shutil.rmtree(remote)
    if source == "empty":
        remote.mkdir(mode=0o700)
    message = refused(remote, local, error=dbuffer.WaitTimeoutError)
    assert "name another target, or remove this one" in message
    with contextlib.ExitStack() as stack:
        one = quick(remote, local)
        stack.enter_context(meanwhile(one.run))
        stack.enter_context(one)  # closed first, so that its run ends if the test fails
        until("it has looked", lambda: one.stats["failures"])
        publish(remote, 60)
        # A reader of the old copy would be told that the store was emptied.
        until("it is copied", lambda: one.version == 60)
        assert newest(local, verify=True) == 60
    assert_tidy(local)


def before_each_copy(patch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Wait before the bytes of each version are read, when its buffer is claimed."""
    fill = StoreTarget._fill

    def fill_later(*arguments: Any) -> Any:
        wait()
        return fill(*arguments)

    patch.setattr(StoreTarget, "_fill", fill_later)


def before_each_flip(patch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Wait before the pointer moves to each version, when the version's manifest is complete."""
    unlock = filesystem.unlock

    def unlock_later(descriptor: int) -> None:
        wait()
        unlock(descriptor)

    patch.setattr(filesystem, "unlock", unlock_later)


@pytest.mark.parametrize("source_is", ["another store", "begun anew"])
def test_a_copy_of_another_run_is_withdrawn_before_a_mirror_has_started(
    remote, local, another, source_is, monkeypatch
):
    """Its readers acknowledge nothing of what comes in its place."""
    publish(remote, 50)
    mirror_once(remote, local)
    if source_is == "begun anew":
        remove_store(remote)
        another = remote
    with (
        Child(read_and_stay, local, "user") as user,
        dbuffer.WeightSender(another, checksum=True) as sender,
    ):
        assert user.receive() == 50
        published = sender.send(SMALL.weights(51), version=7)
        before_each_copy(monkeypatch, lambda: time.sleep(0.2))
        with quick(another, local).start() as one:
            with dbuffer.WeightReceiver(local) as reader, reader.open(timeout_s=TIMEOUT_S) as first:
                assert (first.version, first.id.run) == (7, published.id.run)
            one.wait_until_current(TIMEOUT_S)
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(7, receivers=["user"], timeout_s=0.2)
    assert SMALL.version_of(received(local)) == 51


def copy_slowly(
    connection: Connection, remote: Path, local: Path, before: Callable[..., None]
) -> None:
    """Mirror; after the first version, wait in the middle of a copy, once."""
    has_waited = False

    def wait() -> None:
        nonlocal has_waited
        if one.version is None and one.stats["copied"] and not has_waited:
            has_waited = True  # a copy that was overtaken begins again
            connection.send("copying")
            connection.recv()

    with pytest.MonkeyPatch.context() as patch, quick(remote, local, num_threads=1) as one:
        before(patch, wait)
        one.run()


@pytest.mark.parametrize(
    "before", [before_each_copy, before_each_flip], ids=["before a copy", "before a flip"]
)
@pytest.mark.parametrize("then", ["killed", "alive"])
def test_start_returns_when_readers_find_nothing_of_the_last_run(
    remote, local, another, then, before, monkeypatch
):
    """While the first copy of a run is on its way, however long, and after a kill in it."""
    publish(remote, *range(1, 6))
    with Child(copy_slowly, remote, local, before) as copying:
        until("it is copied", lambda: newest(local) == 5)
        # All at once: the copy that waits would hold the buffer of an earlier version.
        publish(another, *range(1, 8), pattern=OTHER)
        remove_store(remote)
        another.rename(remote)
        assert copying.receive() == "copying"
        assert newest(local) == 5
        if then == "killed":
            copying.kill()
        else:
            waiter = threading.Timer(0.5, copying.send)
            waiter.start()
        before_each_copy(monkeypatch, lambda: time.sleep(0.2))
        with quick(remote, local).start(0.1) as one:
            with dbuffer.WeightReceiver(local) as reader, reader.open(timeout_s=TIMEOUT_S) as first:
                assert OTHER.version_of(dict(first.tensors)) == 7
            arrives(one, local, 7, OTHER)
        if then == "alive":
            waiter.join()


@pytest.mark.timing(retry_min_s=0.02)
def test_start_outlasts_a_failed_look_in_a_long_first_copy(remote, local, monkeypatch):
    """The copy, by another mirror, has taken longer than an error may last."""
    num_looks, timeout_s = 0, 1.0

    def is_fit(*_: object) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            time.sleep(2 * timeout_s)
        if num_looks == 3:
            raise dbuffer.StoreAccessError("the network is down")
        return num_looks > 3

    monkeypatch.setattr(StoreTarget, "elect", lambda *_: False)
    monkeypatch.setattr(StoreTarget, "is_fit", is_fit)
    with quick(remote, local).start(timeout_s) as one:
        assert not one.is_elected


@pytest.mark.timing(retry_min_s=0.02)
def test_a_start_that_has_waited_in_vain_goes_on(remote, local, monkeypatch):
    """The source may answer later, so the mirror keeps trying after the time-out."""
    newest_of = WeightReceiver.newest

    def fail(*_: object) -> None:
        raise dbuffer.StoreAccessError("the network is down")

    publish(remote, 1)
    with quick(remote, local) as one:
        monkeypatch.setattr(WeightReceiver, "newest", fail)
        with pytest.raises(dbuffer.WaitTimeoutError, match="the network is down"):
            one.start(0.1)
        monkeypatch.setattr(WeightReceiver, "newest", newest_of)
        arrives(one, local, 1)
        assert one.error is None


@pytest.mark.timing(retry_min_s=0.02)
def test_the_end_of_a_mirror_after_a_start_in_vain_is_logged(remote, local, another, caplog):
    publish(another, 1)
    mirror_once(another, local)
    with quick(remote, local) as one:
        with pytest.raises(dbuffer.WaitTimeoutError, match="holds no version yet"):
            one.start(0.1)
        with dbuffer.WeightSender(local):
            until("it has ended", lambda: one.error)
    assert f"the mirror of {remote} has ended" in caplog.text


def test_two_remote_stores_do_not_share_a_local_one(remote, local, another):
    """While the one's mirror is at work, the other's readers would be given its versions."""
    publish(remote, 50)
    publish(another, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)
        message = refused(another, local, error=dbuffer.WaitTimeoutError)
        assert f"the mirror of {local} follows {remote}: stop that mirror" in message
        assert message.endswith(mirror_record(another).problem), "its sender is told, too"
        assert newest(local) == 50


@pytest.mark.parametrize("state", ["published", "open", "open and mirrored"])
@pytest.mark.parametrize("source_is", ["away", "another store", "its mirror"])
def test_a_trainers_store_as_the_target_is_a_swap(remote, local, state, source_is):
    """No message advises to remove it, either."""
    with dbuffer.WeightSender(remote) as sender:
        if state != "open" or source_is == "its mirror":
            sender.send(SMALL.weights(1))
        if source_is == "its mirror":
            mirror_once(remote, local)
        elif source_is == "another store":
            publish(local, 7)
        if state == "open and mirrored":
            sender.send(SMALL.weights(2))
        if state == "published":
            sender.close()
        message = refused(local, remote)
        assert "did you swap source and target?" in message
        assert str(remote) in message
        assert "rm -r" not in message
        assert not (remote / "mirror.lock").exists()
        if state != "published":
            sender.send(SMALL.weights(3))


@pytest.mark.parametrize("is_known", [True, False], ids=["later", "first"])
def test_mirrors_that_end_and_begin_are_no_sender(local, monkeypatch, is_known):
    """A mirror ends or begins, in turn, before each look at a lock."""
    local.mkdir(mode=0o700)
    (local / places.WRITER_LOCK_FILE).touch()
    if is_known:
        (local / places.MIRROR_LOCK_FILE).touch()
    held: list[Any] = []
    try_lock = filesystem.try_lock
    take = partial(filesystem.take_lock, owner="test's", may_lack_locks=False)

    def end_or_begin() -> None:
        if held:
            while held:
                held.pop().close()
        elif (lock := take(local / places.MIRROR_LOCK_FILE)) is not None:
            held.extend((lock, take(local / places.WRITER_LOCK_FILE)))

    def look(descriptor: int, *, exclusive: bool) -> bool:
        if not exclusive:
            end_or_begin()
        return try_lock(descriptor, exclusive=exclusive)

    monkeypatch.setattr(filesystem, "try_lock", look)
    assert state_of_senders(DoubleBuffer(local)) is None


def test_one_directory_is_nothing_to_mirror(remote, shm_path):
    """Nor is a store in its own mirror."""
    publish(remote, 1)
    (shm_path / "link").symlink_to(remote)
    for local in (remote, shm_path / "link", remote / ".." / "remote"):
        with pytest.raises(dbuffer.OptionError, match=str(remote)):
            Mirror(remote, local)
        assert start_mirror(remote, local) is None
    assert start_mirror(remote, None) is None
    for pair in ((remote, remote / "inner"), (remote / "inner", remote)):
        with pytest.raises(dbuffer.OptionError, match="is inside the other"):
            Mirror(*pair)


def test_one_store_through_two_mounts_stands_idle(remote, shm_path):
    publish(remote, 1)
    with mounted(shm_path / "bound", "--bind", str(remote)) as local:
        before = contents(remote, "mirror.lock", "receivers")
        with quick(remote, local) as one:
            with pytest.raises(dbuffer.OptionError, match=str(local)):
                one.run()
        with start_mirror(remote, local) as one:
            one.wait_until_current(TIMEOUT_S)
            one._thread.join(TIMEOUT_S)
            assert not one.is_elected
            assert contents(remote, "mirror.lock", "receivers") == before
            publish(remote, 2)
            one.wait_until_current(TIMEOUT_S)
            assert newest(local) == newest(remote) == 2


@pytest.mark.timing(retry_min_s=0.05)
def test_a_sender_may_start_in_the_local_store_after_its_mirror(remote, local):
    """On the sender's host, an engine that starts first cannot tell that the store is there."""
    with start_mirror(remote, local, poll_interval_s=POLL_S) as one:
        assert one.is_elected
        with dbuffer.WeightSender(local) as sender:
            sender.send(SMALL.weights(1))
            sender.send(SMALL.weights(2))
        assert newest(local) == 2
        assert one.error is None


@pytest.mark.timing(retry_min_s=0.05)
def test_one_store_that_begins_after_its_mirror_stands_idle(remote, shm_path):
    """The mirror finds out before it has the writer's lock."""
    remote.mkdir(mode=0o700)
    with (
        mounted(shm_path / "bound", "--bind", str(remote)) as local,
        start_mirror(remote, local, poll_interval_s=POLL_S) as one,
    ):
        assert one.is_elected
        publish(remote, 1)
        one._thread.join(SOON_S)
        assert not one.is_elected
        assert one.error is None
        publish(remote, 2)
        assert newest(local) == newest(remote) == 2


def test_a_full_local_store_that_is_current_can_be_used(remote, disk):
    publish(remote, 1)
    mirror_once(remote, disk / "local")
    fill(disk, leave_bytes=0)
    with quick(remote, disk / "local").start(SOON_S) as one:
        one.wait_until_current(SOON_S)
        assert one.is_elected


# The command


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Command]:
    return partial(Command, tmp_path, "mirror")


def test_the_command_copies_and_ends(remote, local, command):
    port = free_port()
    publish(remote, 1)
    options = ("--json", "--poll-interval-s", 0.05, "--metrics-port", port)
    with command(remote, local, *options) as process:
        first = json.loads(process.line(0))
        assert (first["version"], first["num_tensors"], first["num_bytes"]) == (1, 8, 16384)
        assert first["duration_s"] > 0
        for version in (2, 3):
            publish(remote, version)
            assert json.loads(process.line(version - 1))["version"] == version
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON_S) as answer:
            text = answer.read().decode()
        assert "dbuffer_mirror_version 3.0" in text
        assert "dbuffer_mirror_elected 1.0" in text
        process.signal(signal.SIGTERM)
        code, out, err = process.communicate()
        assert (code, out.count("\n"), err) == (-signal.SIGTERM, 3, "")
    assert newest(local, verify=True) == 3
    assert_tidy(local)


@pytest.mark.parametrize("is_elected", [True, False], ids=["alone", "beside another mirror"])
def test_the_command_counts_a_version_that_the_target_has(remote, local, command, is_elected):
    """A command for one version ends if its copy is current; one for two waits for the next."""
    publish(remote, 1)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(quick(remote, local).start())
        one.wait_until_current(TIMEOUT_S)
        if is_elected:
            one.close()
        for options, expected in ((), "version 1: "), (("--json",), '{"version": 1, "run": '):
            with command(remote, local, "--count", 1, *options) as process:
                code, out, _ = process.communicate()
            assert code == 0
            assert out.startswith(expected)
            assert f"{local} already has it" in out or json.loads(out)["num_bytes"] is None
        if is_elected:
            with command(remote, local, "--count", 2) as process:
                assert "already has it" in process.line(0)
                publish(remote, 2)
                code, out, _ = process.communicate()
            assert (code, newest(local)) == (0, 2)


def test_status_says_that_a_mirror_writes_its_target(remote, local, capsys):
    publish(remote, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(TIMEOUT_S)
        code, out, _ = call(capsys, "status", local)
        assert (code, "; mirror pid" in out, "sender" in out) == (0, True, False)
    code, out, _ = call(capsys, "status", local)
    assert (code, "; no mirror (last: pid" in out) == (0, True)
    assert "; no sender (last: pid" in call(capsys, "status", remote)[1]


def test_a_version_is_not_published_again_where_its_commit_failed_too_late(
    remote, local, network, monkeypatch, caplog
):
    publish(remote, 1)
    read_back, store = BufferWriter._read_back, DoubleBuffer(local)
    pointers, copied = [], list[int]()

    def fail_once(writer: BufferWriter, *published: Any) -> None:
        if writer.root == local and published[0].version == 2 and not pointers:
            pointers.append(store.pointer())
            raise dbuffer.StoreAccessError("a read that the network lost")
        read_back(writer, *published)

    monkeypatch.setattr(BufferWriter, "_read_back", fail_once)
    with quick(remote, local, on_copied=lambda each: copied.append(each.version)).start() as one:
        arrives(one, local, 1)
        publish(remote, 2)
        arrives(one, local, 2)
        assert "version 2 is published, but some hosts may be unable" in caplog.text
        assert pointers == [store.pointer()]
        publish(remote, 3)
        arrives(one, local, 3)
        assert copied == [1, 2, 3]
        assert one.stats["copied"] == 3


def test_it_runs_once_and_not_after_it_was_closed(remote, local):
    publish(remote, 1)
    stop = threading.Event()
    for end in (stop.set, lambda: one.close()):
        with quick(remote, local) as one, meanwhile(one.run, stop, after_s=0):
            until("it runs", lambda one=one: one.version == 1)
            for begin in (one.start, one.run):
                with pytest.raises(dbuffer.NotReadyError, match="runs already"):
                    begin()
            end()
        for begin in (one.start, one.run):
            with pytest.raises(dbuffer.ClosedError):
                begin()
        assert stop.is_set()
        stop.clear()
    mirror_once(remote, local)  # which nothing keeps from being elected


def test_the_documentation_lists_what_ends_a_mirror():
    page = (ROOT / "docs" / "object-storage.md").read_text(encoding="utf-8")
    section = page.split("## What ends a mirror")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert set(listed) == {error.__name__ for error in FINAL}


def test_on_copied_may_close_it(remote, local):
    publish(remote, 1)
    copied = []

    def close(publication: Publication) -> None:
        copied.append(publication.version)
        one.close()

    one = quick(remote, local, on_copied=close)
    one.run()
    one = quick(remote, local, on_copied=close).start()
    publish(remote, 2)
    until("it is closed", lambda: not one.is_elected)
    one.close()
    assert copied == [1, 2]
    assert one.error is None
