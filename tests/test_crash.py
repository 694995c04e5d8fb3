"""Guarantee 3, crash anywhere, and 5, nobody waits for ever: processes killed and frozen.

A sender is killed at each step that has a name, at each line of the code that publishes, and at
moments drawn by lot. After each: the last published version reads whole, a new sender opens and
publishes with no manual clean-up, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from steps import CASES, EVERY_PUBLISH, NETWORK_PUBLISH, NETWORK_PUBLISHED, RECOVERY
from support import (
    OTHER,
    SMALL,
    TIMEOUT_S,
    Child,
    Step,
    assert_tidy,
    at_step,
    die,
    make_temporaries_old,
    newest,
    stop,
)

import dbuffer
from dbuffer import filesystem, retirement

pytestmark = pytest.mark.usefixtures("settle_slowly")

SOON_S = 5.0
"""What must not wait for anybody takes milliseconds; a busy machine may need longer.

Whoever waits all the same waits for half a minute at least."""

# ---------------------------------------------------------------------------------------------
# Killed at each step that has a name


def publish_up_to(
    connection: Connection, store: Path, situation: str, step: Step, action: Callable[[], None]
) -> None:
    """Publish what the situation asks for, and do ``action`` at ``step`` of the last publish."""
    if situation.endswith("network"):
        os.environ["DBUFFER_MOUNT"] = "network"
    last = OTHER if situation.startswith("new layout") else SMALL
    durable = situation.endswith("durable")
    with dbuffer.WeightSender(store, durable=durable, checksum=True, num_threads=1) as sender:
        if not situation.startswith("first"):
            for version in (1, 2, 3):
                sender.send(SMALL.weights(version))
        at_step(step, action)
        sender.send(last.weights(1 if situation.startswith("first") else 4))
        sys.setprofile(None)
    connection.send("went on")


def assert_recovers(store: Path, expected: int | None) -> None:
    """The last version reads whole, the next publishes work, and nothing is left over."""
    assert newest(store, verify=True) == expected
    make_temporaries_old(store)
    started = time.monotonic()
    with dbuffer.WeightSender(store, checksum=True, num_threads=1) as sender:
        assert newest(store, verify=True) == expected
        for version in range((expected or 0) + 2, (expected or 0) + 5):
            publication = sender.send(SMALL.weights(version), version=version)
            assert publication.version == version == newest(store, verify=True)
    assert time.monotonic() - started < SOON_S, "a dead process was waited for"
    assert_tidy(store)


@pytest.mark.parametrize(("situation", "step", "is_published"), CASES)
def test_killed_at_a_step_of_a_publish(
    any_store: Path, situation: str, step: Step, is_published: bool
) -> None:
    with Child(publish_up_to, any_store, situation, step, die) as child:
        assert child.wait() == -signal.SIGKILL, "the step was never reached"
    last = None if situation.startswith("first") else 3
    assert_recovers(any_store, (last or 0) + 1 if is_published else last)


def open_after_a_crash(connection: Connection, store: Path, step: Step) -> None:
    at_step(step, die)
    with dbuffer.WeightSender(store, num_threads=1):
        pass


@pytest.mark.parametrize("step", RECOVERY.values(), ids=RECOVERY)
def test_killed_while_it_clears_up_after_a_crash(store: Path, step: Step) -> None:
    earlier = EVERY_PUBLISH["in the middle of the copy"]
    with Child(publish_up_to, store, "new layout", earlier, die) as child:
        assert child.wait() == -signal.SIGKILL
    make_temporaries_old(store)
    with Child(open_after_a_crash, store, step) as child:
        assert child.wait() == -signal.SIGKILL, "the step was never reached"
    assert_recovers(store, 3)


def publish_stream(connection: Connection, store: Path, dies_before: int) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(SMALL.weights(2).items()):
            if index == dies_before:
                die()
            yield pair

    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send(SMALL.weights(1))
        sender.send(stream())


@pytest.mark.parametrize("dies_before", [0, 1, 7])
def test_killed_in_the_middle_of_a_stream(store: Path, dies_before: int) -> None:
    with Child(publish_stream, store, dies_before) as child:
        assert child.wait() == -signal.SIGKILL
    assert_recovers(store, 1)


def test_first_version_can_be_given_again_after_a_crash_before_the_pointer(store: Path) -> None:
    """What no reader could see was not published, so its number is still free."""
    step = EVERY_PUBLISH["before the pointer"]
    with Child(publish_up_to, store, "first ever", step, die) as child:
        assert child.wait() == -signal.SIGKILL
    assert newest(store) is None
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1), version=1)
    assert newest(store) == 1


# ---------------------------------------------------------------------------------------------
# Killed before each call that changes the disk, and at moments drawn by lot

CHANGING_CALLS = frozenset(
    {"flock", "fsync", "mkdir", "open", "posix_fallocate", "pwrite", "replace", "unlink"}
)


class Ledger:
    """The last version that a process published before it was killed, in shared memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def write(self, version: int) -> None:
        self._memory[:] = struct.pack("q", version)

    def read(self) -> int:
        version: int = struct.unpack("q", self._memory[:])[0]
        return version


def fork_and_kill(body: Callable[[], None], kill_after_s: float | None = None) -> bool:
    """Run ``body`` in a forked process; whether it was killed, by us or by itself.

    The process that calls this has one thread and all imports behind it, so that a fork is
    quick and safe.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, b"!")
            body()
            os._exit(0)
        except BaseException:  # it must not run on as a second copy of the test
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status != 0


def read_and_publish(store: Path, at_least: int, *, checksum: bool) -> int:
    """The version found after a crash, which must be whole; then publish the next one."""
    found = newest(store, verify=checksum) or 0
    assert found in (at_least, at_least + 1), f"{at_least} was published and {found} is there"
    make_temporaries_old(store)
    with dbuffer.WeightSender(store, checksum=checksum, num_threads=1) as sender:
        publication = sender.send(SMALL.weights(found + 1))
    assert publication.version == found + 1 == newest(store, verify=checksum)
    if filesystem.mount_of(store).is_network:  # what somebody may read stays for a while
        assert named_in(store) <= weights_in(store)
    else:
        assert_tidy(store)
    return found + 1


def die_before_call(number: int) -> None:
    """Kill this process before its ``number``-th call that can change what is on the disk."""
    left = number

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        is_read = frame.f_code.co_name == "open_regular"
        if event == "c_call" and argument.__name__ in CHANGING_CALLS and not is_read:
            left -= 1
            if left == 0:
                die()

    sys.setprofile(watch)


def kill_before_every_call(connection: Connection, store: Path, prepares: bool, mount: str) -> None:
    """Start a sender and publish, dying one call later each time, until it is through.

    ``prepares``: after a publish of the same layout by the same sender, which is not killed.
    """
    os.environ["DBUFFER_MOUNT"] = mount
    ledger = Ledger()
    last = number = 0
    was_killed = True

    def publish() -> None:
        version, pattern = last + 1, OTHER if number % 2 else SMALL
        if not prepares:
            die_before_call(number)
        with dbuffer.WeightSender(store, durable=True, checksum=True, num_threads=1) as sender:
            if prepares:
                for version in (last + 1, last + 2):
                    sender.send(pattern.weights(version))
                    ledger.write(version)
                version += 1
                die_before_call(number)
            sender.send(pattern.weights(version))
            ledger.write(version)
            sys.setprofile(None)

    while was_killed:
        number += 1
        ledger.write(last)
        was_killed = fork_and_kill(publish)
        last = read_and_publish(store, ledger.read(), checksum=True)
    connection.send(number)


@pytest.mark.parametrize("mount", ["local", "network"])
@pytest.mark.parametrize("prepares", [False, True], ids=["from the start", "in place"])
def test_killed_before_every_call_that_changes_the_disk(
    store: Path, prepares: bool, mount: str
) -> None:
    with Child(kill_before_every_call, store, prepares, mount) as child:
        assert child.receive() > 20


def kill_at_random_moments(connection: Connection, store: Path, times: int, seed: int) -> None:
    """Send how many were killed, and how many versions they had published."""
    rng = random.Random(seed)
    ledger = Ledger()
    last = deaths = published = 0
    pace_s = 0.005

    def publish_for_ever(checksum: bool, durable: bool, seed: int) -> None:
        rng = random.Random(seed)
        version = last
        while True:
            with dbuffer.WeightSender(
                store, durable=durable, checksum=checksum, num_threads=1
            ) as sender:
                for _ in range(rng.choice((1, 5))):
                    version += 1
                    sender.send(rng.choice((SMALL, SMALL, OTHER)).weights(version))
                    ledger.write(version)

    for _ in range(times):
        ledger.write(last)
        checksum, durable = rng.random() < 0.5, rng.random() < 0.3
        # A machine that is busy with other things is slower for the process that dies, too.
        moment_s = rng.uniform(0, 1.5) * pace_s
        body = functools.partial(publish_for_ever, checksum, durable, rng.randrange(2**32))
        deaths += fork_and_kill(body, kill_after_s=moment_s)
        published += ledger.read() - last
        started_s = time.monotonic()
        last = read_and_publish(store, ledger.read(), checksum=False)
        pace_s = time.monotonic() - started_s
    connection.send((deaths, published))


@pytest.mark.slow
def test_killed_at_500_random_moments(shm_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(kill_at_random_moments, shm_path / f"{seed}", 250, seed))
            for seed in (1, 2)
        ]
        for child in children:
            deaths, published = child.receive(4 * TIMEOUT_S)
            assert deaths == 250
            print(f"{published} versions were published")
            assert published > 250, "the processes died before they did much"


# ---------------------------------------------------------------------------------------------
# The same as on a network mount, where every publish is to a new file

NETWORK_SITUATIONS = ["network", "first ever, network"]


class Clock:
    """Stands for the clock by which old files age."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def assert_recovers_across_a_network(store: Path, expected: int | None, clock: Clock) -> None:
    """As above; and what nobody can have read goes at once, what somebody may read in time."""
    assert newest(store, verify=True) == expected
    make_temporaries_old(store)
    unnamed = weights_in(store) - named_in(store)
    started = time.monotonic()
    with dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=60) as sender:
        assert newest(store, verify=True) == expected
        for version in range((expected or 0) + 2, (expected or 0) + 5):
            assert unnamed <= weights_in(store), "another host may read it still"
            publication = sender.send(SMALL.weights(version), version=version)
            assert publication.version == version == newest(store, verify=True)
        assert time.monotonic() - started < 2 * SOON_S, "a dead process was waited for"
        clock.now_s += 59.9
        sender.send(SMALL.weights(100), version=100)
        assert unnamed <= weights_in(store)
        clock.now_s += 0.2
        sender.send(SMALL.weights(101), version=101)
        assert not unnamed & weights_in(store)
        clock.now_s += 60.0
        sender.send(SMALL.weights(102), version=102)
    assert len(weights_in(store) - named_in(store)) <= 1, "just what the last publish put away"
    assert not list(store.rglob("*.tmp"))


def weights_in(store: Path) -> set[Path]:
    return set(store.glob("[AB]/weights-*"))


def named_in(store: Path) -> set[Path]:
    double = dbuffer.buffer.DoubleBuffer(store)
    manifests = {buffer: double.manifest(buffer) for buffer in ("A", "B")}
    return {store / buffer / found.file for buffer, found in manifests.items() if found}


def kill_at_every_step(connection: Connection, directory: Path, situation: str) -> None:
    os.environ["DBUFFER_MOUNT"] = "network"
    retirement.time = clock = Clock()  # type: ignore[attr-defined]
    last = None if situation.startswith("first") else 3
    for number, (name, step) in enumerate({**NETWORK_PUBLISH, **NETWORK_PUBLISHED}.items()):
        store = directory / f"{number}"
        body = functools.partial(publish_up_to, connection, store, situation, step, die)
        assert fork_and_kill(body), f"'{name}' was never reached"
        expected = (last or 0) + 1 if name in NETWORK_PUBLISHED else last
        try:
            assert_recovers_across_a_network(store, expected, clock)
        except Exception as error:
            error.add_note(f"killed at '{name}'")
            raise
        shutil.rmtree(store)
    connection.send(number)


@pytest.mark.parametrize("situation", NETWORK_SITUATIONS)
def test_killed_at_each_step_of_a_publish_across_a_network(shm_path: Path, situation: str) -> None:
    with Child(kill_at_every_step, shm_path, situation) as child:
        assert child.receive() + 1 == len(NETWORK_PUBLISH) + len(NETWORK_PUBLISHED)


@pytest.mark.parametrize(
    "name",
    ["mark in place", "in the middle of the tensors", "manifest in place", "pointer in place"],
)
def test_a_frozen_sender_delays_no_reader_across_a_network(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    step = {**NETWORK_PUBLISH, **NETWORK_PUBLISHED}[name]
    with Child(publish_up_to, store, "network", step, stop) as child:
        child.wait_until_stopped()
        started = time.monotonic()
        expected = 4 if name in NETWORK_PUBLISHED else 3
        assert newest(store) == newest(store, verify=True) == expected
        assert time.monotonic() - started < SOON_S


# ---------------------------------------------------------------------------------------------
# Readers that die or freeze, and senders that freeze


def hold(connection: Connection, store: Path, receiver_id: str) -> None:
    """Hold the newest version until told to let go; send what leaving the block raised."""
    with dbuffer.WeightReceiver(store, receiver_id=receiver_id, num_threads=1) as receiver:
        try:
            with receiver.open() as snapshot:
                connection.send(snapshot.version)
                connection.recv()
                connection.send(SMALL.version_of(snapshot.tensors))
        except dbuffer.SnapshotEvictedError as error:
            connection.send(repr(error))
        else:
            connection.send("not evicted")


def timed_send(sender: dbuffer.WeightSender, version: int) -> float:
    return sender.send(SMALL.weights(version), version=version).duration_s


def test_a_reader_killed_while_it_holds_a_buffer_delays_no_publish(store: Path) -> None:
    with dbuffer.WeightSender(store, reader_timeout_s=30) as sender:
        timed_send(sender, 1)
        with Child(hold, store, "victim") as reader:
            assert reader.receive() == 1
            reader.signal(signal.SIGKILL)
            assert reader.wait() == -signal.SIGKILL
            for version in (2, 3, 4):
                assert timed_send(sender, version) < SOON_S
                assert newest(store) == version


def test_a_frozen_reader_delays_one_publish_by_the_timeout_and_is_told(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeout_s = 0.5
    with (
        dbuffer.WeightSender(store, reader_timeout_s=timeout_s) as sender,
        Child(hold, store, "sleepy") as reader,
    ):
        timed_send(sender, 1)
        assert reader.receive() == 1
        reader.signal(signal.SIGSTOP)
        reader.wait_until_stopped()
        assert timed_send(sender, 2) < SOON_S
        with caplog.at_level(logging.WARNING, "dbuffer"):
            assert timeout_s <= timed_send(sender, 3) < timeout_s + SOON_S
        assert "sleepy" in caplog.text
        assert f"pid {reader.pid}" in caplog.text
        for version in (4, 5, 6, 7):
            assert timed_send(sender, version) < timeout_s
        assert newest(store) == 7
        reader.signal(signal.SIGCONT)
        reader.send("let go")
        assert reader.receive() == 1, "what an evicted reader holds must stay whole"
        assert "SnapshotEvictedError" in reader.receive()
        assert_tidy(store)


@pytest.mark.parametrize(
    ("situation", "step", "is_published"), [case for case in CASES if "first" not in case.id]
)
def test_a_frozen_sender_delays_no_reader(
    store: Path, situation: str, step: Step, is_published: bool
) -> None:
    with Child(publish_up_to, store, situation, step, stop) as child:
        child.wait_until_stopped()
        started = time.monotonic()
        assert newest(store) == newest(store, verify=True) == (4 if is_published else 3)
        assert time.monotonic() - started < SOON_S


def test_a_killed_sender_frees_the_store(store: Path) -> None:
    step = EVERY_PUBLISH["in the middle of the copy"]
    with Child(publish_up_to, store, "in place", step, stop) as child:
        child.wait_until_stopped()
        with pytest.raises(dbuffer.WriterActiveError, match=f"{child.pid}"):
            dbuffer.WeightSender(store)
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert_recovers(store, 3)
