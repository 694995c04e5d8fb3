"""A stager keeps the newest version ready, whole and checked, and is in nobody's way.

Stores, senders and damage are real; a test that asks what a process costs has a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.io.tensors import new_memory
from dbuffer.receive.reader import Snapshot
from dbuffer.receive.stager import Staged, Stager, StagingMemory
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import PublishedRecord
from dbuffer.store.writer import BufferWriter
from dbuffer.testing.waiting import until
from tests.support.children import Child, run_program
from tests.support.damage import flip_bit
from tests.support.patterns import OTHER, SMALL, Pattern, publish
from tests.support.soak import in_turn
from tests.support.stores import begin_watching, remove_store
from tests.support.waiting import Gate, meanwhile

SOON_S = 20.0
"""Bound of what would take a minute if it were wrong."""

IN_TIME_S = 30.0
"""Whatever is to happen by itself happens within this, on a machine that is busy."""

NOT_IN_VAIN_S = 0.3
"""How long a test waits for what must not come."""

both_modes = pytest.mark.parametrize("copy", [False, True], ids=["map", "copy"])


def stager_of(
    store: Path,
    *,
    verify: Any = "auto",
    poll_interval_s: float = 0.1,
    num_threads: int | None = None,
    **options: Any,
) -> Stager:
    """A stager whose receiver is named ``rank``."""
    receiver = dbuffer.WeightReceiver(
        store,
        receiver_id="rank",
        verify=verify,
        poll_interval_s=poll_interval_s,
        num_threads=num_threads,
    )
    return Stager(receiver, **options)


def staging(store: Path, **options: Any) -> contextlib.closing[Stager]:
    return contextlib.closing(stager_of(store, **options))


def stats(stager: Stager) -> Mapping[str, float]:
    return stager._receiver.record.current.stats


def record_in(store: Path) -> ReceiverRecord:
    return DoubleBuffer(store).receiver("rank")


def number(version: VersionId | None) -> int | None:
    return None if version is None else version.number


def release(stager: Stager, version: int) -> None:
    """Release what was taken, as applied: the version of this number that the store has had."""
    newest = stager.newest() or stager._receiver._pointer
    stager.release(applied=newest.lineage.at(version))


def wait_until_staged(store: Path, version: int) -> None:
    """Wait for what anybody can see: the record in the store."""
    until(f"{version} is staged", lambda: number(record_in(store).staged) == version)


def wait_for_problem(store: Path) -> ReceiverRecord:
    until("a problem", lambda: record_in(store).problem is not None)
    return record_in(store)


def file_of(store: Path, version: int) -> Path:
    double = DoubleBuffer(store)
    [path] = [
        store / buffer / manifest.file
        for buffer in ("A", "B")
        if (manifest := double.manifest(buffer)) is not None and manifest.version == version
    ]
    return path


def assert_whole(staged: Staged, version: int) -> None:
    assert staged.version == version
    assert SMALL.version_of(staged.tensors) == version


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    with dbuffer.WeightSender(store, checksum=True) as made:
        yield made


# Staging, taking, giving back


@both_modes
def test_each_newest_version_is_staged_unasked(store, sender, copy):
    with staging(store, copy=copy) as follower:
        record = record_in(store)
        assert (record.receiver, record.pid, record.applied_version) == ("rank", os.getpid(), None)
        for version in (1, 2, 3):
            publish(sender, version)
            wait_until_staged(store, version)
        assert stats(follower)["staged"] == 3
        assert stats(follower)["staged_bytes"] == 3 * 8 * 256 * 8
        assert stats(follower)["stage_s"] > 0
        assert record_in(store).stats == stats(follower)
        assert_whole(follower.take(timeout_s=0), 3)
        follower.release()
        weights = {"a": torch.arange(6).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
        for sent in (weights, {"nothing": torch.empty(0, 3)}):
            sender.send(sent)
            staged = follower.take(timeout_s=IN_TIME_S)
            assert list(staged.tensors) == [spec.name for spec in staged.layout.specs] == list(sent)
            assert all(torch.equal(staged.tensors[name], sent[name]) for name in sent)
            assert staged.num_bytes == sum(tensor.nbytes for tensor in sent.values())
            assert 0 < staged.duration_s < IN_TIME_S
            follower.release()


@both_modes
def test_the_newest_version_and_the_one_before_can_be_taken(store, sender, copy):
    publish(sender, 1, 2, 3)
    with staging(store, copy=copy) as follower:
        for request, expected in (
            ({}, 3),
            ({"version": 3}, 3),
            ({"version": 2}, 2),
            ({"at_least": 1}, 3),
            ({"at_least": 3}, 3),
        ):
            wait_until_staged(store, 3)  # by itself, also after the version before
            assert_whole(follower.take(**request, timeout_s=IN_TIME_S), expected)
            follower.release()
        with pytest.raises(dbuffer.VersionError, match="version 1 "):
            follower.take(1, timeout_s=IN_TIME_S)
        wait_until_staged(store, 3)
        assert record_in(store).problem is None


def test_take_waits_for_the_newest_and_for_one_that_is_not_published(store, sender):
    with staging(store) as follower:
        for version in range(1, 30):
            publish(sender, version)
            assert_whole(follower.take(timeout_s=IN_TIME_S), version)
            release(follower, version)
        for version, by in ((30, "version"), (31, "at_least")):
            with meanwhile(publish, sender, version):
                assert_whole(follower.take(**{by: version}, timeout_s=IN_TIME_S), version)
            follower.release()


@pytest.mark.parametrize("is_made", [True, False], ids=["empty-store", "no-store"])
def test_nothing_published_is_a_time_out_in_time(store, is_made):
    if is_made:
        dbuffer.WeightSender(store).close()
    with staging(store) as follower:
        for request in ({}, {"version": 1}, {"at_least": 1}):
            started = time.monotonic()
            with pytest.raises(dbuffer.WaitTimeoutError, match=re.escape(str(store))):
                follower.take(**request, timeout_s=0.1)
            assert time.monotonic() - started < SOON_S
        assert follower.newest() is None
        with dbuffer.WeightSender(store) as sender:
            publish(sender, 1)
            until("it is staged", lambda: stats(follower)["staged"])
            assert_whole(follower.take(timeout_s=0), 1)
        until("its record says so", lambda: number(record_in(store).staged) == 1)


def stop_at(
    gate: Gate, pattern: Pattern, error: Exception | None = None
) -> Callable[[Snapshot], None]:
    """Return a check that stops the stager's thread at a layout, and then raises the error."""

    def check(snapshot: Snapshot) -> None:
        if [spec.name for spec in snapshot.specs] == pattern.names:
            gate.hold_up(IN_TIME_S)
            if error is not None:
                raise error

    return check


@contextlib.contextmanager
def gate_before_staging(version: int) -> Iterator[Gate]:
    """Stop the stager's thread when it has found a version, and has not opened it."""
    gate = Gate()
    make_room = Stager._make_room

    def make_room_later(self: Stager, found: int) -> bool:
        if found == version:
            gate.hold_up(IN_TIME_S)
        return make_room(self, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stager, "_make_room", make_room_later)
        yield gate


@pytest.mark.parametrize(
    "version", [pytest.param(1, id="exactly"), pytest.param(None, id="at-least")]
)
def test_the_error_of_one_version_is_not_told_of_another(store, sender, version):
    """The one that is being staged fails while the other is waited for."""
    gate = Gate()
    if version is not None:
        publish(sender, 1)
    sender.send(OTHER.weights(2))
    with staging(store, check=stop_at(gate, OTHER, ValueError("of the other"))) as follower:
        assert gate.is_there.wait(IN_TIME_S)
        wanted = sender.send(SMALL.weights(3)).version if version is None else version
        with meanwhile(gate.may_go_on.set):
            staged = follower.take(version, at_least=wanted, timeout_s=IN_TIME_S)
        assert staged.version == wanted


@both_modes
def test_what_is_taken_stays_until_it_is_given_back(store, sender, copy):
    publish(sender, 1)
    with staging(store, copy=copy) as follower:
        taken = follower.take(timeout_s=IN_TIME_S)
        publish(sender, 2)
        time.sleep(NOT_IN_VAIN_S)
        assert stats(follower)["staged"] == 1
        assert_whole(taken, 1)
        assert follower.take(1, timeout_s=0) is taken
        follower.release()
        for _ in range(3):  # given back unapplied, it can be taken again
            assert_whole(follower.take(timeout_s=IN_TIME_S), 2)
            follower.release()
        follower.take(timeout_s=IN_TIME_S)
        release(follower, 2)
        time.sleep(NOT_IN_VAIN_S)
        assert stats(follower)["staged"] == 2, "applied, it is staged again on request alone"
        for request in ({"version": 2}, {}):
            assert_whole(follower.take(**request, timeout_s=IN_TIME_S), 2)
            release(follower, 2)


def test_what_is_taken_while_a_newer_version_is_found_is_kept(store, sender):
    with gate_before_staging(2) as gate, staging(store) as follower:
        publish(sender, 1)
        wait_until_staged(store, 1)
        publish(sender, 2)
        assert gate.is_there.wait(IN_TIME_S)
        taken = follower.take(1, timeout_s=0)
        gate.may_go_on.set()
        time.sleep(NOT_IN_VAIN_S)
        assert follower.take(1, timeout_s=0) is taken
        release(follower, 1)
        wait_until_staged(store, 2)


def test_what_is_reserved_stays_until_it_is_taken_or_for_a_while(store, sender, monkeypatch):
    with contextlib.closing(stager_of(store)) as stager:
        assert not stager.reserve(1)
        publish(sender, 1)
        until("it is ready", lambda: stager.reserve(1))
        publish(sender, 2)
        time.sleep(NOT_IN_VAIN_S)
        assert stager.take(at_least=1, timeout_s=SOON_S).version == 1
        stager.release()
        until("version 2 is ready", lambda: stats(stager)["staged"] == 2)
        assert not stager.reserve(3)
        publish(sender, 3)
        until("it is ready", lambda: stats(stager)["staged"] == 3)
        publish(sender, 4)
        time.sleep(NOT_IN_VAIN_S)
        monkeypatch.setattr("dbuffer.receive.stager.RESERVED_S", NOT_IN_VAIN_S)
        assert stager.reserve(3), "it was kept, although it was not ready when it was reserved"
        until("it is reserved no longer", lambda: stats(stager)["staged"] == 4)


def test_a_reservation_that_ends_at_this_moment_does_not_stop_the_stager(
    store, sender, monkeypatch
):
    with contextlib.closing(stager_of(store)) as stager:
        publish(sender, 1)
        until("version 1 is ready", lambda: stats(stager)["staged"] == 1)
        left_s = iter([0.01, 0.01])
        monkeypatch.setattr(Stager, "_reserved_s", property(lambda _: next(left_s, 0.0)))
        publish(sender, 2)
        until("version 2 is ready", lambda: stats(stager)["staged"] == 2, IN_TIME_S)


@both_modes
def test_what_was_given_back_as_applied_holds_nothing(store, copy):
    with (
        dbuffer.WeightSender(store, reader_timeout_s=60) as sender,
        staging(store, copy=copy) as follower,
    ):
        publish(sender, 1)
        wait_until_staged(store, 1)
        follower.take(timeout_s=0)
        assert number(record_in(store).held) == (None if copy else 1)
        release(follower, 1)
        until("it is let go", lambda: record_in(store).staged is None)
        assert record_in(store).held is None
        file = file_of(store, 1)
        for version in (2, 3):
            assert sender.send(SMALL.weights(version)).duration_s < SOON_S
        assert file_of(store, 3) == file, "rewritten in place"
        assert stats(follower)["evictions"] == 0


def test_a_version_that_was_never_taken_is_let_go_of_once_it_is_applied(store, sender):
    """As after a load by the engine itself; no version comes that would wake the stager."""
    publish(sender, 1)
    with staging(store, poll_interval_s=60.0) as follower:
        wait_until_staged(store, 1)
        time.sleep(NOT_IN_VAIN_S)  # until its thread waits for the next version
        release(follower, 1)
        until("it is let go", lambda: record_in(store).held is record_in(store).staged is None)


def test_a_record_that_is_slow_to_write_keeps_no_engine_waiting(store, sender, monkeypatch):
    """The stager's thread writes it after a switch, maybe over a network."""
    gate, put = Gate(), PublishedRecord.put

    def put_slowly(self: PublishedRecord, record: ReceiverRecord) -> None:
        if threading.current_thread().name == "dbuffer-stager":
            gate.hold_up(IN_TIME_S)
        put(self, record)

    publish(sender, 1)
    with staging(store) as follower:
        follower.take(timeout_s=IN_TIME_S)
        monkeypatch.setattr(PublishedRecord, "put", put_slowly)
        release(follower, 1)
        assert gate.is_there.wait(IN_TIME_S)
        started = time.monotonic()
        assert not follower.reserve(2)
        assert time.monotonic() - started < SOON_S
        gate.may_go_on.set()


# A sender that is fast


@both_modes
def test_what_is_taken_stays_whole_while_a_sender_publishes_on(store, copy):
    with (
        dbuffer.WeightSender(store, reader_timeout_s=0.05) as sender,
        staging(store, copy=copy) as follower,
    ):
        publish(sender, 1)
        taken = follower.take(timeout_s=IN_TIME_S)
        for version in range(2, 22):
            publish(sender, version)
            assert_whole(taken, 1)
        release(follower, 1)
        # Copied, it held nobody up; mapped, it was evicted, and keeps its file's bytes.
        evictions = 0 if copy else 1
        wait_until_staged(store, 21)
        assert stats(follower)["evictions"] == evictions
        assert_whole(follower.take(timeout_s=0), 21)


# What cannot be staged


def flip(path: Path) -> None:
    flip_bit(path, 77)


def cut_short(path: Path) -> None:
    os.truncate(path, 100)


def publish_damaged(
    sender: dbuffer.WeightSender,
    version: int,
    damage: Callable[[Path], None] = flip,
    pattern: Pattern = SMALL,
) -> None:
    """Publish a version that is damaged before the pointer moves to it."""
    commit = BufferWriter.commit

    def commit_damaged(self: BufferWriter, claim: Any, **described: Any) -> None:
        damage(claim.path)
        commit(self, claim, **described)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferWriter, "commit", commit_damaged)
        publish(sender, version, pattern=pattern)


@both_modes
@pytest.mark.timing(settle_s=0.01, retry_min_s=0.01, retry_max_s=0.05)
def test_damage_is_told_until_it_is_mended_or_a_newer_version_comes(store, sender, copy, caplog):
    def fail(version: int, damage: Callable[[Path], None], reason: str) -> None:
        publish_damaged(sender, version, damage)
        record = wait_for_problem(store)
        assert re.fullmatch(f"StoreCorruptError: .*{reason}.*", record.problem)
        assert number(record.problem_version) == version
        assert record.staged is None
        until("it is let go between tries", lambda: record_in(store).held is None)
        with pytest.raises(dbuffer.StoreCorruptError, match=reason):
            follower.take(timeout_s=IN_TIME_S)
        assert stats(follower)["failures"] >= 2 * version

    with staging(store, copy=copy, verify=True) as follower:
        fail(1, flip, r"layers\.0\.weight")
        flip(file_of(store, 1))
        wait_until_staged(store, 1)
        assert record_in(store).problem is None
        assert_whole(follower.take(timeout_s=0), 1)
        follower.release()
        fail(2, cut_short, "has 100 bytes")
        with pytest.raises(dbuffer.WaitTimeoutError):
            follower.take(at_least=1000, timeout_s=0.3)
        publish(sender, 3)
        wait_until_staged(store, 3)
        assert record_in(store).problem is None
        assert_whole(follower.take(timeout_s=0), 3)
    # watchdog may say that a watch has ended, as an error.
    ours = [entry for entry in caplog.records if entry.name.startswith("dbuffer")]
    lines = [entry.getMessage() for entry in ours if entry.levelname == "ERROR"]
    for version, line in enumerate(lines, 1):
        assert f"version {version} of {store}" in line
    assert len(lines) == 2


def test_what_a_check_raises_reaches_who_takes(store, sender):
    refusal = ValueError("the model has no layers.4.weight")

    def check(snapshot: Any) -> None:
        if len(snapshot.specs) == len(OTHER.names):
            raise refusal

    with staging(store, check=check) as follower:
        sender.send(OTHER.weights(1))
        assert wait_for_problem(store).problem == f"ValueError: {refusal}"
        for request in ({}, {"version": 1}, {"at_least": 1}):
            with pytest.raises(ValueError, match=r"no layers\.4\.weight") as caught:
                follower.take(**request, timeout_s=IN_TIME_S)
            assert caught.value is refusal
        release(follower, 1)  # of which nothing is staged
        publish(sender, 2)
        wait_until_staged(store, 2)
        assert record_in(store).problem is None


def test_a_check_is_asked_once_a_layout(store, sender):
    checked: list[Layout] = []
    with staging(store, check=lambda snapshot: checked.append(snapshot.layout)) as follower:
        for version, pattern in enumerate((SMALL, SMALL, SMALL, OTHER, OTHER, SMALL), start=1):
            sender.send(pattern.weights(version))
            taken = follower.take(timeout_s=IN_TIME_S)
            assert checked[-1] == taken.layout
            release(follower, version)
    assert [len(layout.specs) for layout in checked] == [8, 5, 8]


@pytest.mark.timing(retry_min_s=1000.0, retry_max_s=1000.0)
def test_damage_that_was_mended_is_seen_at_once_by_who_takes(store, sender):
    with staging(store, verify=True) as follower:
        publish_damaged(sender, 1)
        wait_for_problem(store)
        flip(file_of(store, 1))
        assert_whole(follower.take(timeout_s=IN_TIME_S), 1)


@pytest.mark.timing(settle_s=0.01)
def test_the_previous_version_is_refused_if_it_is_being_overwritten_or_damaged(store, sender):
    publish(sender, 1, 2)
    previous = file_of(store, 1)
    os.truncate(file_of(store, 2), 100)
    with staging(store, verify=True) as follower:
        with previous.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as a sender does, before it marks the buffer
            with pytest.raises(dbuffer.VersionError):
                follower.take(1, timeout_s=IN_TIME_S)
        assert_whole(follower.take(1, timeout_s=IN_TIME_S), 1)
        release(follower, 1)
        flip(previous)
        with pytest.raises(dbuffer.StoreCorruptError, match=r"layers\.0\.weight"):
            follower.take(1, timeout_s=IN_TIME_S)


@pytest.mark.timing(retry_min_s=0.01, retry_max_s=0.05)
def test_a_store_that_is_removed_is_told(store, sender):
    publish(sender, 1, 2)
    with staging(store) as follower:
        wait_until_staged(store, 2)
        follower.take(timeout_s=0)
        release(follower, 2)
        store.rename(store.with_name("gone"))  # in one step: it writes its record in there
        with pytest.raises(dbuffer.StoreNotFoundError, match=re.escape(str(store))):
            follower.take(timeout_s=IN_TIME_S)
        with dbuffer.WeightSender(store) as again:
            again.send(SMALL.weights(1))
            # Until then an attempt that began before may still end as those before did.
            until(
                "it is staged or failed",
                lambda: (record := record_in(store)) and "of run" in str(record.problem),
            )
            with pytest.raises(
                dbuffer.VersionRegressedError, match=r"version 2 of .* version 1 of"
            ):
                follower.take(timeout_s=IN_TIME_S)
            again.send(SMALL.weights(7), version=7)
            with pytest.raises(dbuffer.VersionRegressedError):
                follower.take(timeout_s=IN_TIME_S)


@in_turn(
    ("version", "copy"),
    [pytest.param(1, id="lower"), pytest.param(2, id="equal"), pytest.param(3, id="higher")],
    [False, True],
)
def test_a_store_that_was_begun_anew_is_staged_if_it_may_be(store, sender, copy, version, caplog):
    publish(sender, 1, 2)
    with staging(store, forked="follow", copy=copy) as follower:
        wait_until_staged(store, 2)
        old = follower.take(timeout_s=0)
        assert_whole(old, 2)
        sender.close()
        remove_store(store)
        with dbuffer.WeightSender(store) as again:
            again.send(SMALL.weights(9), version=version)
            follower.release(applied=old.id)
            new = follower.take(timeout_s=IN_TIME_S)
            assert (new.version, SMALL.version_of(new.tensors)) == (version, 9)
            assert new.id.run != old.id.run
            until(
                "it is staged or failed",
                lambda: (record := record_in(store)) and record.staged == new.id,
            )
            # What was applied before says nothing of it: it stays ready.
            follower.release(applied=old.id)
            assert follower.take(version, timeout_s=0) is new
            follower.release()
            with pytest.raises(dbuffer.VersionRegressedError):
                follower.take(old.id, timeout_s=IN_TIME_S)
    said = [record for record in caplog.records if "does not lead to" in record.message]
    assert [record.levelname for record in said] == ["WARNING"]


def test_a_number_is_never_met_by_a_run_that_the_store_lost(store, sender):
    """The stager has the lost run's version 8, and has not looked at the store since."""
    publish(sender, 1, 2, 8)
    with staging(store, forked="follow", poll_interval_s=1000.0) as follower:
        wait_until_staged(store, 8)
        lost = follower.take(timeout_s=0)
        sender.close()
        follower._receiver._watcher.close()
        remove_store(store)
        with dbuffer.WeightSender(store) as again:
            again.send(SMALL.weights(9), version=5)
            for request in ({"version": 8}, {"at_least": 7}):
                with pytest.raises(dbuffer.WaitTimeoutError):
                    follower.take(**request, timeout_s=0)
            follower.release()
            again.send(SMALL.weights(10), version=8)
            assert SMALL.version_of(follower.take(8, timeout_s=IN_TIME_S).tensors) == 10
            follower.release()
            with pytest.raises(dbuffer.VersionRegressedError):
                follower.take(lost.id, timeout_s=IN_TIME_S)


def test_a_version_of_a_run_that_another_began_before_is_refused_at_once(store, sender, tmp_path):
    publish(sender, 1)
    shutil.copytree(store, tmp_path / "before")
    publish(sender, 2)
    lost = DoubleBuffer(store).pointer().id
    sender.close()
    remove_store(store)
    shutil.move(tmp_path / "before", store)
    with dbuffer.WeightSender(store) as again:
        publish(again, 3)
    with staging(store) as follower:
        with pytest.raises(dbuffer.VersionRegressedError, match="does not lead"):
            follower.take(at_least=lost, timeout_s=IN_TIME_S)
        assert_whole(follower.take(at_least=lost._replace(number=1), timeout_s=IN_TIME_S), 3)


def test_the_only_version_is_staged_again_after_another_was_applied(store):
    """An engine that could not load it went back to the version that it had before."""
    with dbuffer.WeightSender(store, keep=8) as sender, staging(store, version=3) as follower:
        publish(sender, 1, 2, 3, 4, 5)
        wait_until_staged(store, 3)
        assert follower.take(timeout_s=IN_TIME_S).version == 3
        follower.release()
        newest = follower.newest()
        assert newest is not None
        assert follower.take(newest.id, needs_tensors=True, timeout_s=IN_TIME_S).version == 5
        release(follower, 5)
        wait_until_staged(store, 3)
        assert follower.reserve(newest.lineage.at(3))


def test_an_engine_that_has_its_only_version_has_no_problem_with_the_store(store):
    with dbuffer.WeightSender(store, keep=8) as sender, staging(store, version=1) as follower:
        publish(sender, 1, 2)
        follower.take(timeout_s=IN_TIME_S)
        release(follower, 1)
        until("it is released", lambda: number(record_in(store).staged) is None)
        (store / "CURRENT").write_bytes(b"{")
        time.sleep(NOT_IN_VAIN_S)
        assert record_in(store).problem is None


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Collect no garbage: an engine does so seldom."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_record_that_cannot_be_written_keeps_nothing_mapped(store, caplog):
    """Handlers may keep what is logged, and an error's traceback has the frames of its callers."""
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1)
    with staging(store, check=lambda _: shutil.rmtree(store / "tmp")) as follower:
        follower.take(timeout_s=IN_TIME_S)
        until("it is told", lambda: "cannot acknowledge" in caplog.text)
        remove_store(store)
        release(follower, 1)
        until("it is unmapped", lambda: not mappings_of(store))


def test_damage_between_checking_and_copying_is_seen(store, sender):
    """What is handed out is what was checked, where it is a copy: not what it was copied from."""
    publish(sender, 1)

    def damage_it(snapshot: Any) -> None:
        flip(file_of(store, 1))

    with staging(store, copy=True, verify=True, check=damage_it) as follower:
        with pytest.raises(dbuffer.StoreCorruptError):
            follower.take(timeout_s=IN_TIME_S)


@pytest.mark.timing(retry_min_s=0.01, retry_max_s=0.05)
def test_while_the_pointer_is_away_what_is_staged_stays_and_is_not_the_newest(store, sender):
    publish(sender, 1, 2)
    with staging(store) as follower:
        wait_until_staged(store, 2)
        (store / "CURRENT").rename(store / "tmp" / "CURRENT")
        with pytest.raises(dbuffer.VersionRegressedError):
            follower.take(3, timeout_s=IN_TIME_S)
        record = wait_for_problem(store)
        assert (record.problem_version, number(record.staged)) == (None, 2)
        # Nothing new is published afterwards: what was staged before is still all there is.
        (store / "tmp" / "CURRENT").rename(store / "CURRENT")
        until("the problem is over", lambda: record_in(store).problem is None)
        assert number(record_in(store).staged) == 2
        assert_whole(follower.take(timeout_s=0), 2)
        follower.release()
        follower.take(1, timeout_s=IN_TIME_S)
        (store / "CURRENT").unlink()
        follower.release()
        with pytest.raises(dbuffer.VersionRegressedError, match="was emptied: it held version 2"):
            follower.take(timeout_s=IN_TIME_S)


def test_a_problem_is_that_of_the_version_which_was_opened(store, sender, caplog):
    """Version 1 is found, and by the time that it is opened version 3 is there, and damaged."""
    with gate_before_staging(1) as gate, staging(store, verify=True) as follower:
        publish(sender, 1)
        assert gate.is_there.wait(IN_TIME_S)
        publish(sender, 2)
        publish_damaged(sender, 3)
        gate.may_go_on.set()
        assert number(wait_for_problem(store).problem_version) == 3
        with pytest.raises(dbuffer.VersionError, match="version 1 "):
            follower.take(1, timeout_s=IN_TIME_S)
    told = [entry.getMessage() for entry in caplog.records if "damaged" in entry.message]
    assert told
    assert all("staging version 3 of" in line for line in told), told


def test_who_takes_what_was_just_mended_hears_nothing_of_the_try_before(store, sender):
    gate = Gate()
    checks = iter([stop_at(gate, SMALL, ValueError("as it was before")), lambda _: None])
    publish(sender, 1)
    with staging(store, check=lambda snapshot: next(checks)(snapshot)) as follower:
        assert gate.is_there.wait(IN_TIME_S)
        with meanwhile(gate.may_go_on.set):
            assert_whole(follower.take(timeout_s=IN_TIME_S), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_pinned_memory_without_a_gpu_is_a_problem_and_no_crash(store, sender):
    publish(sender, 1)
    with staging(store, pin_memory=True) as follower:
        assert number(wait_for_problem(store).problem_version) == 1
        with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda|nvidia"):
            follower.take(timeout_s=IN_TIME_S)


# What it leaves behind, and what it costs


def counts() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@contextlib.contextmanager
def leaving_nothing(store: Path) -> Iterator[None]:
    """No thread, no descriptor and no record is left of a stager that was closed in the block."""
    gc.collect()  # what other tests have left
    begin_watching(store.parent)
    before = counts()
    yield
    # What other tests had begun may end meanwhile, and what was closed here takes its moment.
    until("nothing is left", lambda: all(map(int.__le__, counts(), before)))
    assert not list((store / "receivers").glob("*"))


@pytest.mark.timing(retry_min_s=1000.0, retry_max_s=1000.0)
@in_turn(
    ("state", "copy"),
    ["nothing is there", "it is staged", "it is taken", "it is being staged", "it is damaged"],
    [False, True],
)
def test_close_while(store, copy, state):
    gate = Gate()
    check = stop_at(gate, SMALL if state == "it is being staged" else OTHER)
    if state != "nothing is there":
        with dbuffer.WeightSender(store, checksum=True) as sender:
            send = publish_damaged if state == "it is damaged" else publish
            send(sender, 1)
    with leaving_nothing(store), contextlib.ExitStack() as stack:
        follower = stack.enter_context(staging(store, copy=copy, verify=True, check=check))
        if state == "it is damaged":
            wait_for_problem(store)
        elif state in ("it is staged", "it is taken"):
            follower.take(timeout_s=IN_TIME_S)
            if state == "it is staged":
                follower.release()
        elif state == "it is being staged":
            assert gate.is_there.wait(IN_TIME_S)
        started = time.monotonic()
        with meanwhile(gate.may_go_on.set):
            stack.close()
        assert time.monotonic() - started < SOON_S


def test_close_ends_a_take_and_may_be_called_twice(store):
    follower = stager_of(store)
    with meanwhile(follower.close), pytest.raises(dbuffer.ClosedError):
        follower.take(timeout_s=IN_TIME_S)
    follower.close()
    follower.release()
    with pytest.raises(dbuffer.ClosedError, match=re.escape(str(store))):
        follower.take(timeout_s=IN_TIME_S)


ENDS_WHILE_IT_STAGES = """
import sys, threading, torch, dbuffer
from dbuffer.receive.stager import Stager

begun = threading.Event()

def prepare(snapshot):
    begun.set()
    for _ in range(500):
        torch.ones(1 << 20).sum()

with dbuffer.WeightSender(sys.argv[1]) as sender:
    sender.send({"weight": torch.ones(4)})
stager = Stager(dbuffer.WeightReceiver(sys.argv[1], receiver_id="rank"), prepare=prepare)
begun.wait()
"""


def test_a_program_that_ends_while_a_version_is_staged_is_not_aborted(store):
    """Python ends threads in the midst of torch's code, which takes that for an error."""
    done = run_program(ENDS_WHILE_IT_STAGES, store)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((store / "receivers").glob("*"))


def mappings_of(path: Path) -> list[str]:
    """Addresses at which this process has it mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if str(path) in line]


def test_files_stay_mapped_and_what_a_loader_writes_into_them_is_gone(store, sender):
    """A written file is mapped anew, which takes 63 ms a GB."""
    with staging(store) as follower:
        seen = {}
        for version in range(1, 10):
            publish(sender, version)
            staged = follower.take(timeout_s=IN_TIME_S)
            assert_whole(staged, version)
            if version < 6:
                address = next(iter(staged.tensors.values())).untyped_storage().data_ptr()
                assert seen.setdefault(version % 2, address) == address
            else:
                for tensor in staged.tensors.values():
                    tensor.fill_(77)
            release(follower, version)
    assert seen[0] != seen[1]


def test_a_file_that_is_not_written_again_is_unmapped_before_the_next_version_comes(store):
    """Unmapping takes 25 ms a GB, by which the next version would be staged later."""
    with dbuffer.WeightSender(store, keep=1) as sender:
        publish(sender, 1)
        file = file_of(store, 1)
        before = len(mappings_of(file))  # the sender's
        with staging(store) as follower:
            follower.take(timeout_s=IN_TIME_S)
            assert len(mappings_of(file)) > before
            release(follower, 1)
            until("it is unmapped", lambda: len(mappings_of(file)) == before)


@pytest.mark.usefixtures("no_collection")
def test_a_version_that_failed_is_let_go_of(store, sender):
    """An error's traceback would keep its mapping, and with it the room of a removed file."""
    with staging(store, verify=True) as follower:
        publish_damaged(sender, 1, pattern=OTHER)
        wait_for_problem(store)
        file = file_of(store, 1)
        publish(sender, 2, 3)
        wait_until_staged(store, 3)
        assert not file.exists()
        assert not mappings_of(file)
        assert stats(follower)["failures"] >= 1


def test_a_fork_neither_hangs_nor_keeps_a_lock_nor_takes_the_record_away(store):
    with Child(fork_with_stager, store) as child:
        assert child.receive() == 2
        assert child.receive() < SOON_S, "seconds that a publish takes"


def fork_with_stager(connection: Connection, store: Path) -> None:
    """Fork while a version is taken; let the fork close what it inherited, and stay alive."""
    with dbuffer.WeightSender(store, reader_timeout_s=30) as sender, staging(store) as follower:
        publish(sender, 1)
        follower.take(timeout_s=IN_TIME_S)
        ready, theirs = os.pipe()
        with follower._condition:  # locked in the fork, where no thread is left to open it
            if (pid := os.fork()) == 0:
                with contextlib.suppress(dbuffer.ClosedError):
                    follower.take(timeout_s=0)
                    os._exit(1)
                follower.close()
                os.write(theirs, b".")
                threading.Event().wait(60)
                os._exit(0)
        os.close(theirs)
        assert os.read(ready, 1) == b"."
        assert list((store / "receivers").glob("rank.*.json"))
        release(follower, 1)
        publish(sender, 2)
        connection.send(follower.take(at_least=2, timeout_s=IN_TIME_S).version)
        release(follower, 2)
        connection.send(sender.send(SMALL.weights(3)).duration_s)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_copies_of_two_versions_are_never_in_memory_at_once(monkeypatch):
    memory, make = StagingMemory(pinned=False), new_memory
    before = weakref.ref(memory.resized(8))

    def allocate(num_bytes: int) -> torch.Tensor:
        assert before() is None
        return make(num_bytes)

    monkeypatch.setattr("dbuffer.receive.stager.new_memory", allocate)
    assert memory.resized(16).numel() == 16


def test_a_version_that_is_to_be_staged_again_while_it_is_staged_is(store, sender):
    begun, goes_on, prepared = threading.Event(), threading.Event(), []

    def prepare(snapshot: Snapshot) -> None:
        prepared.append(snapshot.version)
        begun.set()
        assert goes_on.wait(IN_TIME_S)

    publish(sender, 1)
    with staging(store, prepare=prepare) as stager:
        assert begun.wait(IN_TIME_S)
        stager.stage_again()
        goes_on.set()
        assert_whole(stager.take(timeout_s=IN_TIME_S), 1)
        assert prepared == [1, 1]


def test_an_idle_stager_looks_at_the_store_once_a_poll_interval(store, sender, monkeypatch):
    publish(sender, 1)
    with staging(store, poll_interval_s=60.0):
        wait_until_staged(store, 1)
        looks: list[None] = []
        pointer = DoubleBuffer.pointer

        def look(view: DoubleBuffer) -> Any:
            if view.root == store:
                looks.append(None)
            return pointer(view)

        monkeypatch.setattr(DoubleBuffer, "pointer", look)
        processor_s = time.process_time()
        time.sleep(1)
        assert time.process_time() - processor_s < 0.5, "it spins"
        assert len(looks) <= 2


# One version, and no other


def test_memory_that_there_is_not_is_told_until_there_is_some(store, sender, monkeypatch):
    publish(sender, 1)
    with monkeypatch.context() as patch:
        patch.setattr("dbuffer.receive.stager.new_memory", lambda _: new_memory(1 << 60))
        with staging(store, copy=True) as made:
            with pytest.raises(dbuffer.StoreAccessError, match=r"cannot allocate \d+ bytes"):
                made.take(timeout_s=IN_TIME_S)
            patch.undo()
            assert_whole(made.take(timeout_s=IN_TIME_S), 1)
