"""Guarantee 3, crash anywhere, and 5, nobody waits for ever: processes killed and frozen.

A sender is killed before calls that change the disk, and between such calls: in a soak before each
call, else before every second one. After each kill, the last published version reads whole, a new
sender opens and publishes with no manual clean-up, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

import dbuffer
from dbuffer.format import chain
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import encode
from dbuffer.store import retention
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import OwnRecord
from dbuffer.testing.moments import die, stop
from tests.support.children import Child
from tests.support.crashes import (
    DELTA_SITUATIONS,
    DURABLE_SITUATIONS,
    MIN_MOMENTS,
    SITUATIONS,
    Flip,
    last_before,
    make_sender,
    max_chain,
    noting,
    pattern_of,
)
from tests.support.forks import fork, was_killed
from tests.support.patterns import OTHER, SMALL, newest
from tests.support.soak import IN_SOAKS_ALONE, at_moment, in_turn, numbers, patience_s
from tests.support.stores import assert_tidy, make_temporaries_old, named_files, version_files

pytestmark = pytest.mark.timing(settle_s=60.0)

SOON_S = 25.0
"""Limit for what waits for nobody and takes milliseconds: a wait takes half a minute at least."""

# Processes that are forked to die


@contextlib.contextmanager
def forked_and_stopped(body: Callable[[], None]) -> Iterator[bool]:
    """Run ``body`` in a forked process until it stops itself, or ends; whether it has stopped."""
    pid = fork(body)
    _, status = os.waitpid(pid, os.WUNTRACED)
    is_stopped = os.WIFSTOPPED(status)
    try:
        yield is_stopped
    finally:
        if is_stopped:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert is_stopped or status == 0


# Killed before each call that changes the disk, and in between

KILLS = "kills at a moment of a publish"


def publish_up_to(store: Path, situation: str, number: int, action: Callable[[], None]) -> None:
    """Publish what the situation asks for; ``action`` at a moment of the last publish."""
    pattern = OTHER if situation.startswith("new layout") else pattern_of(situation)
    version = (last_before(situation) or 0) + 1
    chain.MAX_CHAIN = max_chain(situation)
    with make_sender(store, situation) as sender:
        for earlier in range(1, version):
            sender.send(pattern_of(situation).weights(earlier))
        at_moment(number, action)
        sender.send(pattern.weights(version))
        sys.setprofile(None)


def assert_recovers(store: Path, expected: int | None, situation: str = "in place") -> None:
    """The last version reads whole, publishes into both buffers work, and nothing is left over.

    A first version that no reader could see was not published: its number is still free.
    """
    pattern = pattern_of(situation)
    make_temporaries_old(store)
    first = 1 if expected is None else expected + 2
    started = time.monotonic()
    with make_sender(store, situation) as sender:
        assert newest(store, verify=True) == expected
        for version in (first, first + 1):
            publication = sender.send(pattern.weights(version), version=version)
            assert publication.version == version == newest(store, verify=True)
    assert time.monotonic() - started < SOON_S, "a dead process was waited for"
    assert_tidy(store)


NETWORK_SITUATIONS = ["in place", "first ever", *DELTA_SITUATIONS]


def assert_recovers_across_a_network(
    store: Path, expected: int | None, situation: str, clock: SimpleNamespace
) -> None:
    """As above; and what nobody can have read goes at once, what somebody may read in time."""
    pattern = pattern_of(situation)
    make_temporaries_old(store)
    unnamed = version_files(store) - named_files(store)
    started = time.monotonic()
    with make_sender(store, situation) as sender:
        assert newest(store, verify=True) == expected
        # On another host somebody reads a version that has no name any more.
        far = {"host": "another-host", "pid": 1, "boot": "", "pid_namespace": 0, "started": 0}
        held = VersionId("0" * 16, 10**6)
        record = structs.replace(OwnRecord("far").current, **far, held=held)
        path = DoubleBuffer(store).record_path(record.receiver, record.token)
        path.write_bytes(encode(record))
        for version in range((expected or 0) + 2, (expected or 0) + 4):
            assert unnamed <= version_files(store), "another host may read it still"
            publication = sender.send(pattern.weights(version), version=version)
            assert publication.version == version == newest(store, verify=True)
        assert time.monotonic() - started < 2 * SOON_S, "a dead process was waited for"
        # Beside what the files are old already.
        for version, passes_s, stays in ((100, 30.0, True), (101, 30.0, False), (102, 60.0, False)):
            clock.now_s += passes_s
            sender.send(pattern.weights(version), version=version)
            assert unnamed & version_files(store) == (unnamed if stays else set())
    assert len(version_files(store) - named_files(store)) <= 1, (
        "just what the last publish put away"
    )
    assert not list(store.rglob("*.tmp"))


def kill_at_every_moment(
    connection: Connection, directory: Path, situation: str, mount: str
) -> None:
    check = assert_recovers
    os.environ["DBUFFER_MOUNT"] = mount
    if mount == "network":  # by a clock of the test's own, old files age
        clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
        retention.time = clock  # type: ignore[attr-defined]
        check = functools.partial(assert_recovers_across_a_network, clock=clock)
    flip = Flip(last_before(situation))
    # Every second moment, and the others on the other mount; test_interrupted takes the others.
    for number in numbers(first=1 + (mount == "network"), every=2):
        store = directory / f"{number}"
        if not was_killed(functools.partial(publish_up_to, store, situation, number, die)):
            break
        with noting(number):
            check(store, flip.check(newest(store, verify=True)), situation)
        shutil.rmtree(store)
    flip.check_all()
    connection.send(flip.moments)


@pytest.mark.timing(keep_superseded_s=20.0)  # a sender may take long to come after the killed one
@pytest.mark.parametrize(
    ("situation", "mount"),
    [
        *((situation, "local") for situation in SITUATIONS),
        *((situation, "network") for situation in NETWORK_SITUATIONS),
        *(
            pytest.param(situation, "local", marks=IN_SOAKS_ALONE)
            for situation in DURABLE_SITUATIONS
        ),
    ],
)
def test_killed_at_every_moment_of_a_publish(shm_path, situation, mount, record_property):
    with Child(kill_at_every_moment, shm_path, situation, mount) as child:
        record_property(KILLS, child.receive(patience_s()))


@IN_SOAKS_ALONE
def test_killed_at_every_moment_of_a_publish_to_a_disk(tmp_path, record_property):
    with Child(kill_at_every_moment, tmp_path, "new layout", "auto") as child:
        record_property(KILLS, child.receive(patience_s()))


def kill_at_every_moment_of_clearing_up(connection: Connection, directory: Path) -> None:
    crashed = directory / "crashed"
    # As in the middle of the copy into a new file: that file is there, and in no manifest.
    for number in itertools.count(1):
        assert was_killed(functools.partial(publish_up_to, crashed, "new layout", number, die))
        if version_files(crashed) - named_files(crashed):
            break
        shutil.rmtree(crashed)
    make_temporaries_old(crashed)

    def clear_up(store: Path, number: int) -> None:
        at_moment(number, die)
        with dbuffer.WeightSender(store, num_threads=1):
            pass
        sys.setprofile(None)

    for number in numbers(every=2):
        store = directory / f"{number}"
        shutil.copytree(crashed, store)
        if not was_killed(functools.partial(clear_up, store, number)):
            assert_tidy(store)
            break
        with noting(number):
            assert newest(store, verify=True) == 3
            assert_recovers(store, 3)
        shutil.rmtree(store)
    connection.send(number)


def test_killed_while_it_clears_up_after_a_crash(shm_path, record_property):
    with Child(kill_at_every_moment_of_clearing_up, shm_path) as child:
        moments_passed = child.receive(patience_s())
    assert moments_passed > MIN_MOMENTS
    record_property("kills of a sender that clears up after a crash", moments_passed)


# Readers that die or freeze, and senders that freeze


def hold(connection: Connection, store: Path, receiver_id: str) -> None:
    """Hold the newest version until told to let go; send its version then, and what was raised."""
    with dbuffer.WeightReceiver(store, receiver_id=receiver_id, num_threads=1) as receiver:
        try:
            with receiver.open() as snapshot:
                connection.send(snapshot.version)
                connection.recv()
                connection.send(SMALL.version_of(snapshot.tensors))
        except dbuffer.SnapshotEvictedError as error:
            connection.send(repr(error))


def timed_send(sender: dbuffer.WeightSender, version: int) -> float:
    return sender.send(SMALL.weights(version), version=version).duration_s


def test_a_reader_killed_while_it_holds_a_buffer_delays_no_publish(store):
    with dbuffer.WeightSender(store, reader_timeout_s=30) as sender:
        timed_send(sender, 1)
        with Child(hold, store, "victim") as reader:
            assert reader.receive() == 1
            reader.kill()
            for version in (2, 3, 4):
                assert timed_send(sender, version) < SOON_S
                assert newest(store) == version


def test_frozen_readers_delay_one_publish_by_the_timeout_and_are_told(store, caplog):
    """One time-out for all of them, and not one for each."""
    timeout_s = 1.5
    with (
        dbuffer.WeightSender(store, reader_timeout_s=timeout_s) as sender,
        contextlib.ExitStack() as children,
    ):
        timed_send(sender, 1)
        readers = [
            children.enter_context(Child(hold, store, f"sleepy-{number}")) for number in range(3)
        ]
        for reader in readers:
            assert reader.receive() == 1
            reader.signal(signal.SIGSTOP)
            reader.wait_until_stopped()
        assert timed_send(sender, 2) < timeout_s
        with caplog.at_level(logging.WARNING, "dbuffer"):
            assert timeout_s <= timed_send(sender, 3) < len(readers) * timeout_s
        for number, reader in enumerate(readers):
            assert f"sleepy-{number} (pid {reader.pid}" in caplog.text
        sends_s = {version: timed_send(sender, version) for version in (4, 5, 6, 7)}
        # The quicker one of each buffer's: this process may be held up, too.
        for versions in (4, 6), (5, 7):
            assert min(sends_s[version] for version in versions) < timeout_s
        assert newest(store) == 7
        for reader in readers:
            reader.signal(signal.SIGCONT)
            reader.send("let go")
            assert reader.receive() == 1, "what an evicted reader holds must stay whole"
            assert "SnapshotEvictedError" in reader.receive()
            assert reader.wait() == 0  # it writes its last record after that
        assert_tidy(store)


def freeze_at_every_moment(
    connection: Connection, directory: Path, situation: str, mount: str
) -> None:
    os.environ["DBUFFER_MOUNT"] = mount
    flip = Flip(last_before(situation))
    for number in numbers(every=2):
        store = directory / f"{number}"
        body = functools.partial(publish_up_to, store, situation, number, stop)
        with forked_and_stopped(body) as is_stopped, noting(number):
            if not is_stopped:
                break
            started = time.monotonic()
            assert flip.check(newest(store)) == newest(store, verify=True)
            assert time.monotonic() - started < SOON_S
        shutil.rmtree(store)
    flip.check_all()
    connection.send(flip.moments)


@in_turn(
    ("situation", "mount"),
    ["in place", "new layout"]
    + [
        pytest.param(each, marks=IN_SOAKS_ALONE)
        for each in ("in place, durable", *DELTA_SITUATIONS)
    ],
    ["local", "network"],
)
def test_a_frozen_sender_delays_no_reader(shm_path, situation, mount, record_property):
    with Child(freeze_at_every_moment, shm_path, situation, mount) as child:
        record_property("senders frozen at a moment of a publish", child.receive(patience_s()))
