"""`Mirror`: real stores on tmpfs, real processes, killed, frozen and started again."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

import dbuffer
from dbuffer.format import layout
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations import metrics
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.publish.publication import Publication
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer, other_buffer
from tests.support.children import Child, Command, free_port
from tests.support.damage import flip_bit
from tests.support.moments import COPIES, Step, at_call, at_step, die, stop
from tests.support.patterns import OTHER, SMALL, SPARSE, Pattern, bits, newest
from tests.support.soak import is_soak, numbers, patience_s
from tests.support.stores import (
    assert_tidy,
    fill,
    make_temporaries_old,
    open_below,
    small_disk,
    without_flock,
)
from tests.support.waiting import until

MEGABYTE = 1 << 20
LONG = Pattern(num_tensors=9, numel=MEGABYTE // 8)  # 9 MB: read in three spans
LONG_BYTES = 9 * MEGABYTE
DISK_BYTES = 24 * MEGABYTE  # holds two of them, and no third
POLL_S = 0.05


def publish(store: Path, *versions: int, pattern: Pattern = SMALL, **options: Any) -> None:
    with dbuffer.WeightSender(store, checksum=True, **options) as sender:
        for version in versions:
            sender.send(pattern.weights(version), version=version, metadata={"step": version})


def quick(remote: Path, local: Path, **options: Any) -> Mirror:
    return Mirror(remote, local, **{"poll_interval_s": POLL_S, "num_threads": 2, **options})


def remove(store: Path) -> None:
    """Remove a store to which live processes write their records meanwhile."""

    def is_gone() -> bool:
        shutil.rmtree(store, ignore_errors=True)
        return not store.exists()

    until("it is removed", is_gone)


def mirror_once(remote: Path, local: Path) -> None:
    """Copy the newest version."""
    with quick(remote, local).start() as one:
        one.wait_until_current(10)


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


def mirror_record(remote: Path) -> ReceiverRecord:
    [record] = [r for r in DoubleBuffer(remote).receivers() if r.receiver.startswith("mirror-")]
    return record


def read_whole(store: Path) -> dbuffer.Snapshot:
    with dbuffer.WeightReceiver(store, receiver_id="reads", verify=True) as receiver:
        with receiver.open(timeout_s=5, acknowledge=False) as snapshot:
            assert SMALL.version_of(dict(snapshot.tensors)) == snapshot.version
            return snapshot


def as_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUFFER_MOUNT", "network")


def contents(store: Path) -> dict[str, bytes]:
    """Every file of a store, but for the mirror's lock."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "mirror.lock"
    }


# What is copied


@pytest.mark.parametrize("checksum", [True, False], ids=["checksums", "no checksums"])
def test_a_version_is_the_same_in_the_mirror(remote, local, checksum):
    with dbuffer.WeightSender(remote, checksum=checksum) as sender, quick(remote, local).start():
        for version in (1, 2, 3, 7):
            sender.send(SMALL.weights(version), version=version, metadata={"step": 10 * version})
            until("it is copied", lambda at=version: newest(local) == at)
    stores = (DoubleBuffer(remote), DoubleBuffer(local))
    pointers = [store.pointer() for store in stores]
    there, here = [
        store.manifest(pointer.buffer) for store, pointer in zip(stores, pointers, strict=True)
    ]
    for field in ("version", "metadata", "num_tensors", "num_bytes", "published_at", "file_bytes"):
        assert getattr(there, field) == getattr(here, field)
    assert there.identity == here.identity == here.origin
    assert (here.checksums_xxh3 is not None) is checksum
    files = [
        s.root / p.buffer / m.file for s, p, m in zip(stores, pointers, (there, here), strict=True)
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    if checksum:
        ours, theirs = read_whole(local), read_whole(remote)
        assert (ours.identity, ours.metadata) == (theirs.identity, theirs.metadata)


def test_layouts_may_change(remote, local):
    with dbuffer.WeightSender(remote, checksum=True) as sender, quick(remote, local).start() as one:
        for version, pattern in enumerate((SMALL, OTHER, OTHER, SMALL, LONG, SMALL, SMALL), 1):
            sender.send(pattern.weights(version))
            one.wait_until_current(10)
            assert newest(local, LONG, verify=True) == version
    assert_tidy(local)


def test_awkward_tensors_arrive_bit_by_bit(remote, local):
    weights = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "odd": torch.arange(7, dtype=torch.uint8),
        "nan": torch.full((3,), float("nan"), dtype=torch.bfloat16),
        "turned": torch.arange(12.0).view(3, 4).t(),
    }
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        sender.send({**weights, "tied": weights["odd"]})
    mirror_once(remote, local)
    with dbuffer.WeightReceiver(local, verify=True) as receiver, receiver.open() as snapshot:
        assert list(snapshot.tensors)[:5] == list(weights)
        for name, tensor in weights.items():
            got = snapshot.tensors[name]
            assert got.shape == tensor.shape
            assert bits(got) == bits(tensor)


def test_versions_that_come_before_or_while_one_is_copied_are_skipped(remote, local):
    may_go_on, versions = threading.Event(), []

    def on_copied(copied: Publication) -> None:
        versions.append(copied.version)
        assert may_go_on.wait(10)

    publish(remote, *range(1, 11))
    with quick(remote, local, on_copied=on_copied).start() as one:
        until("the first is copied", lambda: versions)
        publish(remote, *range(11, 21))
        may_go_on.set()
        one.wait_until_current(10)
        assert one.version == 20
    assert versions == [10, 20]
    assert newest(local, verify=True) == 20


def is_current(remote: Path, local: Path) -> bool:
    """Whether both stores have the same newest version, or none."""
    return newest_identity(remote) == newest_identity(local)


def newest_identity(store: Path) -> str | None:
    buffers = DoubleBuffer(store)
    pointer = buffers.newest_pointer() if buffers.exists() else None
    manifest = None if pointer is None else buffers.manifest(pointer.buffer)
    return None if manifest is None else manifest.identity


def test_who_waits_for_a_version_finds_it_told_and_counted(remote, local):
    """Readers have it before; what looks at the mirror itself comes after."""
    may_go_on, told = threading.Event(), []

    def on_copied(copied: Publication) -> None:
        told.append((one.version, one.stats["copied"], newest(local)))
        assert may_go_on.wait(10)

    publish(remote, 1)
    one = quick(remote, local, on_copied=on_copied)
    with one.start():
        until("it is copied", lambda: is_current(remote, local))
        with pytest.raises(dbuffer.WaitTimeoutError):
            one.wait_until_current(0.2)
        may_go_on.set()
        one.wait_until_current(10)
        assert told == [(1, 1, 1)]
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        assert one.version == 1, "found published"


def test_what_on_copied_raises_reaches_who_waits(remote, local):
    def on_copied(copied: Publication) -> None:
        raise KeyError(copied.version)

    publish(remote, 1)
    with quick(remote, local, on_copied=on_copied).start() as one:
        with pytest.raises(KeyError):
            one.wait_until_current(10)


def test_a_store_that_comes_later(remote, local):
    with quick(remote, local).start() as one:
        assert one.is_elected
        assert one.version is None
        assert is_current(remote, local)
        one.wait_until_current(1)  # there is nothing to wait for
        time.sleep(2 * POLL_S)
        publish(remote, 1)
        one.wait_until_current(10)
        assert newest(local) == one.version == 1
        assert is_current(remote, local)


def test_a_local_store_on_a_network_mount(remote, local, monkeypatch):
    """There files are not mapped, and each version has one of its own."""
    as_network(monkeypatch)
    with dbuffer.WeightSender(remote) as sender, quick(remote, local).start() as one:
        for version, pattern in enumerate((LONG, LONG, SMALL, LONG), 1):
            sender.send(pattern.weights(version))
            one.wait_until_current(10)
            assert newest(local, LONG, verify=True) == version
            assert str(local) not in Path("/proc/self/maps").read_text()
    assert not DoubleBuffer(local).medium.maps_files
    manifest = DoubleBuffer(local).manifest("A")
    assert manifest.is_final


def test_waiting_for_what_does_not_come(remote, local):
    publish(remote, 1)
    one = quick(remote, local)  # never started
    local.mkdir(mode=0o700)
    assert not is_current(remote, local)
    with pytest.raises(dbuffer.WaitTimeoutError, match=r"0\.1 s"):
        one.wait_until_current(0.1)
    one.close()


def test_progress_and_stats(remote, local):
    seen: list[tuple[int, int]] = []
    publish(remote, 1, pattern=LONG)
    with quick(remote, local, progress=lambda *at: seen.append(at)).start() as one:
        one.wait_until_current(10)
        until("it says so", lambda: one.stats["copied"] == 1)
        assert one.stats["copied_bytes"] == LONG_BYTES
        assert one.stats["copy_s"] > 0
        assert one.stats["failures"] == 0
        until("it is in the record", lambda: mirror_record(remote).staged_version == 1)
        record = mirror_record(remote)
        assert record.stats == one.stats
        assert (record.held_version, record.applied_version) == (None, None)
    dones = sorted(done for done, _ in seen)
    assert len(dones) == 3
    assert dones[-1] == LONG_BYTES
    assert {total for _, total in seen} == {LONG_BYTES}


def test_metrics(remote, local):
    registry = CollectorRegistry()
    publish(remote, 5)
    with quick(remote, local).start() as one:
        metrics.register(one, registry)
        one.wait_until_current(10)
        until("it says so", lambda: one.stats["copied"] == 1)
        value = registry.get_sample_value
        assert value("dbuffer_mirror_elected") == 1
        assert value("dbuffer_mirror_version") == 5
        assert value("dbuffer_mirror_versions_total") == 1
        assert value("dbuffer_mirror_bytes_total") == one.stats["copied_bytes"] > 0
        assert value("dbuffer_mirror_seconds_total") > 0
        assert value("dbuffer_mirror_failures_total") == 0


def test_nothing_is_left_behind(remote, local):
    publish(remote, 1, pattern=LONG)
    threads, files = set(threading.enumerate()), open_below(remote.parent)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        publish(remote, 2, 3)
        one.wait_until_current(10)
    one.close()  # once more is fine
    assert set(threading.enumerate()) == threads
    assert open_below(remote.parent) == files
    assert_tidy(local)
    assert_tidy(remote)
    assert not one.is_elected


# Deltas


@pytest.fixture
def changing(
    remote: Path, mount: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dbuffer.WeightSender]:
    """A sender whose versions are deltas, for a while upon one anchor."""
    monkeypatch.setattr("dbuffer.publish.delta_chain.MAX_CHAIN", 3)
    with dbuffer.WeightSender(remote, checksum=True, delta=True) as sender:
        yield sender


def chain_in(store: Path) -> list[str]:
    double = DoubleBuffer(store)
    return double.manifest(double.pointer().buffer).chain


def test_deltas_are_copied_with_whole_versions(remote, local, changing, mount):
    """Each copied version is whole, and says what changed since the one copied before it."""
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)

    with quick(remote, local, progress=progress).start() as one:
        for version in range(1, 12):
            changing.send(SPARSE.weights(version))
            one.wait_until_current(10)
            assert newest(local, verify=True) == version
            double = DoubleBuffer(local)
            found = double.manifest(double.pointer().buffer)
            assert found.anchor is None
            assert len(found.chain) == (0 if version == 1 else min(version, 3))
            for name in found.chain[1:]:
                there, here = (store / "deltas" / f"{name}.delta" for store in (remote, local))
                if there.exists():
                    assert there.read_bytes() == here.read_bytes()
    if mount == "local":
        # Two whole copies, one for each buffer; then what changed.
        assert seen[-1] < SPARSE_BYTES / 2
        assert_tidy(local)


SPARSE_BYTES = 8 * 256 * 8


def test_versions_that_were_skipped_have_their_deltas_too(remote, local, changing):
    with quick(remote, local).start() as one:
        changing.send(SPARSE.weights(1))
        one.wait_until_current(10)
    for version in (2, 3):
        changing.send(SPARSE.weights(version))
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        assert newest(local, verify=True) == 3
        assert chain_in(local) == [], "one that was started again begins a chain"
        for version in (4, 5):
            changing.send(SPARSE.weights(version))
        one.wait_until_current(10)
        assert chain_in(local)[-1] == chain_in(remote)[-1]
        assert newest(local, verify=True) == 5


def test_layouts_that_change_begin_a_chain(remote, local, changing):
    with quick(remote, local).start() as one:
        for version in range(1, 13):
            pattern = OTHER if version % 4 == 0 else SPARSE
            changing.send(pattern.weights(version))
            one.wait_until_current(10)
            assert newest(local, verify=True) == version
            assert (chain_in(local) == []) == (version % 4 < 2)


@pytest.mark.parametrize("damage", ["lost", "flipped", "emptied"])
@pytest.mark.timing(settle_s=0.05)
def test_a_damaged_remote_delta(remote, local, changing, damage, mount):
    """What it needs is read whole where that is there, or with the next version."""
    may_go_on = threading.Event()

    def on_copied(copied: Publication) -> None:
        if copied.version == 2:
            assert may_go_on.wait(10)

    with quick(remote, local, on_copied=on_copied).start() as one:
        for version in (1, 2):
            changing.send(SPARSE.weights(version))
            until("it is copied", lambda: is_current(remote, local))
        changing.send(SPARSE.weights(3))
        changing.send(SPARSE.weights(4))
        path = remote / "deltas" / f"{chain_in(remote)[-2]}.delta"
        if damage == "lost":
            path.unlink()
        elif damage == "emptied":
            os.truncate(path, 0)
        else:
            flip_bit(path, 8 * path.stat().st_size - 100)
        may_go_on.set()
        if mount == "local":
            one.wait_until_current(10)  # the buffer is whole
            assert newest(local, verify=True) == 4
            assert one.stats["failures"] == 0
        else:
            until("it is noted", lambda: mirror_record(remote).problem)
            assert path.name in mirror_record(remote).problem
            assert mirror_record(remote).unreadable_version == 4
            with pytest.raises(dbuffer.WaitTimeoutError, match=path.name):
                one.wait_until_current(0.0)
            assert newest(local, verify=True) == 2
        for version in (5, 6, 7):
            changing.send(SPARSE.weights(version))
            one.wait_until_current(10)
            assert newest(local, verify=True) == version
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
            one.wait_until_current(10)
            assert newest(local) == version
            if version == 4:
                double = DoubleBuffer(local)
                idle = other_buffer(double.pointer().buffer)
                flip_bit(double.weights_path(idle, double.manifest(idle)), 77)
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
    may_go_on = threading.Event()

    def on_copied(copied: Publication) -> None:
        if copied.version == good[-1]:
            assert may_go_on.wait(10)

    with quick(remote, local, on_copied=on_copied).start() as one:
        for version in good:
            publish(remote, version, pattern=pattern)
            until("it is copied", lambda: is_current(remote, local))
        publish(remote, good[-1] + 1, pattern=pattern)
        flip_bit(newest_file(remote), 8 * 1000)
        may_go_on.set()
        yield one


def test_a_damaged_version_is_not_published(remote, local, caplog):
    with damaged_on_the_way(remote, local) as one:
        until("it is noted", lambda: one.stats["failures"] >= 2)
        assert newest(local, verify=True) == 1
        problem = mirror_record(remote).problem
        assert problem.startswith("StoreCorruptError: ")
        assert "was damaged after it was published" in problem
        told = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(told) == 1, "it is told once"
        until("half a version is removed", lambda: len(list(local.glob("?/weights-*"))) == 1)
        publish(remote, 3)
        one.wait_until_current(10)
        until("it is forgotten", lambda: mirror_record(remote).problem is None)
    assert newest(local, verify=True) == 3
    assert_tidy(local)


def test_a_version_after_a_damaged_one_comes_at_once(remote, local):
    """However often the damaged one was tried, and however long the next try is away."""
    with damaged_on_the_way(remote, local) as one:
        until("it was tried four times", lambda: one.stats["failures"] >= 4)  # next in 4 s
        publish(remote, 3)
        started = time.monotonic()
        one.wait_until_current(10)
        assert time.monotonic() - started < 3


def test_a_damaged_layout_is_not_published(remote, local):
    publish(remote, 1)
    manifest = DoubleBuffer(remote).manifest(DoubleBuffer(remote).pointer().buffer)
    flip_bit(newest_file(remote), 8 * manifest.layout_offset + 100)
    with quick(remote, local).start() as one:
        until("it is noted", lambda: one.stats["failures"] and mirror_record(remote).problem)
        assert "layout was damaged" in mirror_record(remote).problem
        publish(remote, 2)
        one.wait_until_current(10)
    assert newest(local, verify=True) == 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as path:
        yield path


def test_a_full_local_store_is_tried_again(remote, disk):
    local = disk / "local"
    publish(remote, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        filler = fill(disk, leave_bytes=MEGABYTE)
        publish(remote, 2, pattern=LONG)
        until("it is noted", lambda: one.stats["failures"] and mirror_record(remote).problem)
        assert mirror_record(remote).problem.startswith("StoreFullError: ")
        assert newest(local, verify=True) == 1
        filler.unlink()
        one.wait_until_current(10)
        assert newest(local, LONG, verify=True) == 2


def test_room_for_two_versions_is_enough_after_a_failure(remote, disk, caplog):
    """What was made for the version that failed is given back before the next is made."""
    with damaged_on_the_way(remote, disk / "local", good=(1, 2), pattern=LONG) as one:
        until("it was tried twice", lambda: one.stats["failures"] >= 2)
        publish(remote, 4, pattern=LONG)
        one.wait_until_current(10)
    assert newest(disk / "local", LONG, verify=True) == 4
    assert "StoreFullError" not in caplog.text


def as_nobody() -> None:
    """Be a user whom modes hold back, and still one who can look at its own files in /proc."""
    if os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


def publish_and_mirror_as_nobody(connection: Connection, remote: Path, local: Path) -> None:
    as_nobody()
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        sender.send(SMALL.weights(1))
        with quick(remote, local).start() as one:
            one.wait_until_current(10)
            remote.parent.chmod(0)
            until("it fails", lambda: one.stats["failures"] >= 1)
            assert newest(local) == 1
            remote.parent.chmod(0o700)
            sender.send(SMALL.weights(2))
            one.wait_until_current(10)
            connection.send(newest(local, verify=True))


def test_a_remote_store_that_cannot_be_read_is_tried_again(shm_path):
    shm_path.chmod(0o755)
    for name in ("far", "near"):
        (shm_path / name).mkdir()
        if os.geteuid() == 0:
            os.chown(shm_path / name, 65534, 65534)
    remote, local = shm_path / "far" / "remote", shm_path / "near" / "local"
    with Child(publish_and_mirror_as_nobody, remote, local) as child:
        assert child.receive() == 2


def test_a_remote_store_that_goes_away_and_comes_back(shm_path, local):
    remote = shm_path / "mount" / "remote"
    publish(remote, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        remote.parent.rename(shm_path / "elsewhere")
        until("it fails", lambda: one.stats["failures"] >= 1)
        assert newest(local) == 1
        (shm_path / "elsewhere").rename(remote.parent)
        publish(remote, 2)
        one.wait_until_current(10)
        assert newest(local) == 2


def test_a_problem_that_has_passed_is_not_shown_any_more(shm_path, local):
    """Also when there is nothing new to copy."""
    remote = shm_path / "mount" / "remote"
    publish(remote, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        until("the record is there", lambda: mirror_record(remote).staged_version == 1)
        lock = remote / "CURRENT"
        saved = lock.read_bytes()
        lock.write_bytes(b"{}")
        until("it fails", lambda: mirror_record(remote).problem is not None)
        lock.write_bytes(saved)
        until("it has passed", lambda: mirror_record(remote).problem is None, 5)


def test_a_remote_store_that_was_emptied_is_waited_for(remote, local):
    publish(remote, 5)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        pointer = (remote / "CURRENT").read_bytes()
        (remote / "CURRENT").unlink()
        until("it is told", lambda: "from version 5 to 0" in (mirror_record(remote).problem or ""))
        assert newest(local) == 5
        (remote / "CURRENT").write_bytes(pointer)
        publish(remote, 6)
        until("it goes on", lambda: newest(local) == 6)


@pytest.mark.parametrize("version", [1, 5, 9], ids=["lower", "equal", "higher"])
def test_a_remote_store_that_was_begun_anew_is_mirrored(remote, local, version, caplog):
    """Readers of the local store see what those of the remote one see: another history."""
    publish(remote, 5)
    target = SMALL.empty()
    with quick(remote, local).start() as one, dbuffer.WeightReceiver(local) as receiver:
        one.wait_until_current(10)
        assert receiver.load_into(target) == 5
        remove(remote)
        with dbuffer.WeightSender(remote) as sender:
            sender.send(SMALL.weights(3), version=version)
            one.wait_until_current(10)
            with pytest.raises(dbuffer.VersionRegressedError):
                receiver.load_into(target)
            assert SMALL.version_of(target) == 5
            receiver.start_over()
            assert receiver.load_into(target) == version
            assert SMALL.version_of(target) == 3
            sender.wait_applied(version, receivers=[receiver.receiver_id], timeout_s=10)
            sender.send(SMALL.weights(4))
            one.wait_until_current(10)
            assert receiver.load_into(target) == version + 1
        assert_tidy(local)
    said = [record for record in caplog.records if "(mirroring it)" in record.message]
    assert [record.levelname for record in said] == ["WARNING"]


def test_a_remote_store_that_was_put_back_ends_the_mirror(remote, local):
    """From a backup: versions that the readers have had would come again, with other weights."""
    publish(remote, 1)
    shutil.copytree(remote, remote.with_name("backup"))
    publish(remote, 2, 3)
    mirror_once(remote, local)
    shutil.rmtree(remote)
    remote.with_name("backup").rename(remote)
    before = contents(local)
    with quick(remote, local) as one, pytest.raises(dbuffer.OptionError) as refused:
        one.run()
    assert str(remote) in str(refused.value)
    assert str(refused.value).endswith("? Name another target")  # it has what the source lost
    assert contents(local) == before


# Killed


SHORT_SPAN_BYTES = 6 * 1024
"""A small version is read in three spans."""


def run_to_a_call(
    connection: Connection, remote: Path, local: Path, number: int, mount: str
) -> None:
    """Publish versions 1 and 2, copy them, and die before a call in the last copy."""
    os.environ["DBUFFER_MOUNT"] = mount
    layout.SPAN_BYTES = SHORT_SPAN_BYTES
    end = threading.Event()
    publish(remote, 1)

    def on_copied(copied: Publication) -> None:
        if copied.version == 1:
            publish(remote, 2)
            at_call(number, die, COPIES, repeats=is_soak())
        else:
            sys.setprofile(None)
            end.set()

    with quick(remote, local, num_threads=1, on_copied=on_copied) as one:
        one.run(end)


def follow_to_a_call(
    connection: Connection, remote: Path, local: Path, number: int, mount: str
) -> None:
    """Do so with versions 1 to 4, which are deltas."""
    os.environ["DBUFFER_MOUNT"] = mount
    end = threading.Event()
    with dbuffer.WeightSender(remote, checksum=True, delta=True, num_threads=1) as sender:
        sender.send(SPARSE.weights(1))

        def on_copied(copied: Publication) -> None:
            sys.setprofile(None)
            if copied.version == 4:
                end.set()
                return
            sender.send(SPARSE.weights(copied.version + 1))
            if copied.version == 3:
                at_call(number, die, COPIES, repeats=is_soak())

        with quick(remote, local, num_threads=1, on_copied=on_copied) as one:
            one.run(end)


@pytest.mark.soak
@pytest.mark.timeout(patience_s())
@pytest.mark.parametrize(
    ("copy", "last", "delta", "every"),
    [
        pytest.param(run_to_a_call, 2, False, 2, id="whole"),
        pytest.param(follow_to_a_call, 4, True, 3, id="delta"),
    ],
)
def test_killed_at_any_moment_of_a_copy(
    shm_path, mount, monkeypatch, record_property, copy, last, delta, every
):
    monkeypatch.setattr(layout, "SPAN_BYTES", SHORT_SPAN_BYTES)
    has_flipped = False
    kills = 0
    for number in numbers(first=1 + (mount == "network"), every=every):
        remote, local = shm_path / f"remote-{number}", shm_path / f"local-{number}"
        with Child(copy, remote, local, number, mount) as child:
            if (code := child.wait()) == 0:
                break
        assert code == -signal.SIGKILL
        version = newest(local, verify=True)
        assert version in (last, last - (not has_flipped)), f"before call {number}"
        has_flipped, kills = version == last, kills + 1
        make_temporaries_old(local)
        with (
            dbuffer.WeightSender(remote, checksum=True, delta=delta) as sender,
            quick(remote, local).start() as one,
        ):
            for later in range(last + 1, last + 4):
                one.wait_until_current(10)
                assert newest(local, verify=True) == later - 1
                sender.send(SPARSE.weights(later) if delta else SMALL.weights(later))
            one.wait_until_current(10)
        assert newest(local, verify=True) == last + 3
        if mount != "network":
            assert_tidy(local)
        remove(remote)
        remove(local)
    assert kills > 5
    record_property("kills of a mirror in the middle of a copy", kills)


def mirror_and_stop(connection: Connection, remote: Path, local: Path) -> None:
    """Freeze in the middle of the first copy; send each version that was copied."""

    def on_copied(copied: Publication) -> None:
        connection.send(copied.version)

    at_step(Step("c_call", "preadv", nth=2), stop)
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


def publish_for_ever(connection: Connection, remote: Path) -> None:
    version = 0
    with dbuffer.WeightSender(remote, checksum=True, reader_timeout_s=0.5) as sender:
        while not connection.poll(0.003):
            version += 1
            sender.send(LONG.weights(version))
            if version == 1:
                connection.send("first")
    connection.send(version)


def test_killed_at_any_moment(remote, local):
    rng = random.Random(5)
    with Child(publish_for_ever, remote) as sender:
        assert sender.receive() == "first"
        seen = 0
        for _ in range(5):
            with Child(serve, remote, local, {}) as child:
                assert child.receive() is True
                until("it has copied", lambda at=seen: (newest(local, LONG) or 0) > at)
                time.sleep(rng.uniform(0, 0.1))
                child.kill()
                found = newest(local, LONG, verify=True)
                assert found is not None
                assert found >= seen
                seen = found
        sender.send("stop")
        last = sender.receive()
        make_temporaries_old(local)
        mirror_once(remote, local)
    assert newest(local, LONG, verify=True) == last
    assert_tidy(local)


# Several, and stores that are not what was meant


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
            assert time.monotonic() - killed_at < 5
            elected = {child: ask(child, "is_elected") for child in elected}
        assert newest(local, verify=True) == 3


def test_one_that_stands_by_copies_nothing_and_can_be_closed(remote, local):
    publish(remote, 1)
    with quick(remote, local).start() as first:
        first.wait_until_current(10)
        with quick(remote, local).start() as second:
            assert not second.is_elected
            second.wait_until_current(10)  # the other one brings it
            publish(remote, 2)
            second.wait_until_current(10)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        first.wait_until_current(10)  # it has told of it, too
        assert (first.version, second.version) == (2, None)
        assert second.stats["copied"] == 0


def test_one_that_stands_by_is_closed_at_once_while_the_network_is_away(remote, local, shm_path):
    publish(remote, 1)
    mirror_once(remote, local)
    with dbuffer.WeightReceiver(local) as receiver, receiver.open():
        remote.rename(shm_path / "elsewhere")
        with quick(remote, local).start():
            started = time.monotonic()
            with quick(remote, local).start() as second:
                assert not second.is_elected
            assert time.monotonic() - started < 2
    assert newest(local) == 1


@pytest.mark.parametrize("is_there", [True, False], ids=["another store", "a store that is away"])
def test_a_stale_mirror_is_refused_with_the_command_that_removes_it(remote, local, is_there):
    publish(remote, 50)
    mirror_once(remote, local)
    another, before = remote.with_name("another"), contents(local)
    if is_there:
        publish(another, 1, 2)
    for begin in (Mirror.start, Mirror.run):
        with quick(another, local) as one, pytest.raises(dbuffer.OptionError) as refused:
            begin(one)
        assert contents(local) == before
    [command] = re.findall(r"\((rm .*)\)", str(refused.value))
    subprocess.run(shlex.split(command), check=True)
    with quick(another, local).start() as one:
        publish(another, 3)
        one.wait_until_current(10)
        assert newest(local, verify=True) == 3
    assert_tidy(local)


def test_a_store_that_began_anew_while_no_mirror_ran_is_not_mixed_with_the_one_before(
    remote, local
):
    publish(remote, 50)
    mirror_once(remote, local)
    shutil.rmtree(remote)
    publish(remote, 50)
    with pytest.raises(dbuffer.OptionError, match=str(local)):
        quick(remote, local).start()


def read_and_stay(connection: Connection, store: Path, name: str) -> None:
    with dbuffer.WeightReceiver(store, receiver_id=name, poll_interval_s=POLL_S) as receiver:
        target = SMALL.empty()
        connection.send(receiver.load_into(target))
        while (newer_than := connection.recv()) is not None:
            receiver.wait_for_version(newer_than, 20)
            connection.send(receiver.load_into(target))


def test_a_stale_mirror_that_is_in_use_is_refused(remote, local):
    publish(remote, 50)
    mirror_once(remote, local)
    another = remote.with_name("another")
    publish(another, 1)
    with Child(read_and_stay, local, "user") as user:
        assert user.receive() == 50
        before = contents(local)
        with pytest.raises(dbuffer.OptionError, match=r"\buser\b"):
            quick(another, local).start()
        assert contents(local) == before


@pytest.mark.timing(prepared_s=0.3)
def test_two_remote_stores_do_not_share_a_local_one(remote, local):
    """While the one's mirror is at work, the other's readers would be given its versions."""
    publish(remote, 50)
    another = remote.with_name("another")
    publish(another, 1)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        for begin in (Mirror.start, Mirror.run):
            with quick(another, local) as second:
                with pytest.raises(dbuffer.OptionError, match=str(local)):
                    begin(second)
        assert newest(local) == 50


def test_acknowledgements_of_another_store_are_not_carried_on(remote, local):
    """Whoever applied version 50 of one run has not applied version 1 of another."""
    publish(remote, 50)
    mirror_once(remote, local)
    with Child(read_and_stay, local, "worker") as worker:
        assert worker.receive() == 50
    another = remote.with_name("another")
    with dbuffer.WeightSender(another) as sender, quick(another, local) as one:
        sender.send(SMALL.weights(1))
        with pytest.raises(dbuffer.OptionError):
            one.run()
        with pytest.raises((dbuffer.WaitTimeoutError, dbuffer.ReceiverFailedError)):
            sender.wait_applied(1, receivers=["worker"], timeout_s=0.2)


def test_a_trainers_own_store_is_refused_and_not_touched(remote, local):
    publish(remote, 1)
    publish(local, 1, 2)
    before = contents(local)
    with quick(remote, local) as one:
        with pytest.raises(dbuffer.OptionError, match=rf"{local} .*\b2\b"):
            one.run()
    assert contents(local) == before
    with dbuffer.WeightSender(local) as sender, quick(remote, local) as one:
        before = contents(local)
        with pytest.raises((dbuffer.OptionError, dbuffer.StoreBusyError)):
            one.run()
        assert contents(local) == before
        sender.send(SMALL.weights(3))


def test_a_mirror_that_became_a_trainers_own_store_is_not_touched(remote, local):
    """What was published there since is in no other place."""
    publish(remote, 1, 2)
    with quick(remote, local).start() as one:
        one.wait_until_current(10)
        publish(remote, 3)
        one.wait_until_current(10)
    another = remote.with_name("another")
    publish(another, 1)
    with dbuffer.WeightSender(local) as sender:
        sender.send(SMALL.weights(4))
        before = contents(local)
        with quick(another, local) as one, pytest.raises(dbuffer.DBufferError):
            one.run()
        assert contents(local) == before
        sender.send(SMALL.weights(5))
    assert newest(local) == 5


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
        before = contents(remote)
        for begin in (Mirror.start, Mirror.run):
            with quick(local, remote) as one, pytest.raises(dbuffer.OptionError) as refused:
                begin(one)
            assert "did you swap source and target?" in str(refused.value)
            assert str(remote) in str(refused.value)
            assert "rm -r" not in str(refused.value)
        assert contents(remote) == before
        assert not (remote / "mirror.lock").exists()


def test_a_mirror_with_a_pinned_version_is_not_to_be_removed(remote, local):
    publish(remote, 50)
    mirror_once(remote, local)
    kept.pin(DoubleBuffer(local), 50)
    another = remote.with_name("another")
    publish(another, 1)
    with quick(another, local) as one, pytest.raises(dbuffer.OptionError) as refused:
        one.run()
    assert "name another target" in str(refused.value)
    assert "rm -r" not in str(refused.value)


def test_a_store_in_its_own_mirror_is_refused(shm_path):
    outer, inner = shm_path / "outer", shm_path / "outer" / "inner"
    for source, target in ((outer, inner), (inner, outer)):
        with pytest.raises(dbuffer.OptionError, match="is inside the other"):
            Mirror(source, target)


def test_one_directory_is_nothing_to_mirror(remote, shm_path):
    publish(remote, 1)
    (shm_path / "link").symlink_to(remote)
    for local in (remote, shm_path / "link", remote / ".." / "remote"):
        with pytest.raises(dbuffer.OptionError, match=str(remote)):
            Mirror(remote, local)
        assert start_mirror(remote, local) is None
    assert start_mirror(remote, None) is None


def test_one_store_through_two_mounts_stands_idle(remote, shm_path):
    publish(remote, 1)
    local = shm_path / "bound"
    local.mkdir(mode=0o700)
    done = subprocess.run(["mount", "--bind", str(remote), str(local)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        before = contents(remote)
        with quick(remote, local) as one:
            with pytest.raises(dbuffer.OptionError, match=str(local)):
                one.run()
        with start_mirror(remote, local) as one:
            one.wait_until_current(5)
            one._thread.join(5)
            assert not one.is_elected
            assert {k: v for k, v in contents(remote).items() if "mirror-" not in k} == before
            publish(remote, 2)
            one.wait_until_current(5)
            assert newest(local) == newest(remote) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(local)], check=True)


# The command


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Command]:
    return partial(Command, tmp_path, "mirror")


def test_the_command_copies_and_ends(remote, local, command):
    publish(remote, 1)
    with command(remote, local, "--json", "--poll-interval-s", 0.05) as process:
        first = json.loads(process.line(0))
        assert (first["version"], first["num_tensors"], first["num_bytes"]) == (1, 8, 16384)
        assert first["duration_s"] > 0
        publish(remote, 2)
        assert json.loads(process.line(1))["version"] == 2
        process.signal(signal.SIGTERM)
        code, out, err = process.communicate()
        assert (code, out.count("\n"), err) == (-signal.SIGTERM, 2, "")
    assert newest(local, verify=True) == 2
    assert_tidy(local)


def test_the_command_counts_and_says_what_was_wrong(remote, local, command):
    publish(remote, 1)
    with command(remote, local, "--count", 1) as counts, command(remote, remote) as same:
        code, out, err = counts.communicate()
        assert code == 0, err
        assert out.startswith("version 1: 8 tensors, ")
        code, out, err = same.communicate()
        assert (code, out) == (2, "")
        assert (
            err == f"dbuffer: {remote} and {remote} are one directory: there is nothing to mirror\n"
        )


def test_the_command_with_its_arguments_swapped(remote, local, command):
    with dbuffer.WeightSender(remote) as sender:
        sender.send(SMALL.weights(1))
        with command(local, remote) as swapped:
            code, out, err = swapped.communicate()
    assert (code, out) == (2, "")
    assert "did you swap source and target?" in err


def test_a_wait_for_the_source_tells_of_the_target(remote, local, command):
    publish(remote, 50)
    mirror_once(remote, local)
    with Child(read_and_stay, local, "user") as user, command(remote / "x", local) as waiting:
        assert user.receive() == 50
        assert f"copied into {local}, which holds version 50" in waiting.line_of_errors(0)


def test_the_command_serves_metrics(remote, local, command):
    port = free_port()
    publish(remote, 3)
    with command(remote, local, "--json", "--metrics-port", port) as process:
        assert json.loads(process.line(0))["version"] == 3
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        assert "dbuffer_mirror_version 3.0" in text
        assert "dbuffer_mirror_elected 1.0" in text
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
