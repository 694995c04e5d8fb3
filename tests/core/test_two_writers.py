"""One writer a store: the second is refused, and one that lost the store finds out in time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.format import places
from dbuffer.store import filesystem
from dbuffer.testing.moments import stop
from tests.support.children import Child
from tests.support.forks import in_a_fork
from tests.support.patterns import OTHER, SMALL, load, newest, publish
from tests.support.steps import Step, at_step
from tests.support.stores import contents

SOON_S = 30.0


@pytest.mark.parametrize("lost", ["writer.lock", "."])
def test_superseded_sender_finds_out_before_it_touches_anything(store, lost):
    """Somebody removed the lock's file, or the store, and with it what keeps senders apart."""
    with dbuffer.WeightSender(store, keep=1) as first:  # it would keep a version before it marks
        first.send(SMALL.weights(1))
        if lost == ".":
            shutil.rmtree(store)
        else:
            (store / lost).unlink()
        with dbuffer.WeightSender(store) as second:
            second.send(SMALL.weights(2), version=2)
            before = contents(store, "receivers")
            for version in (None, 2, 3):  # 2: its next one, which the other sender has taken
                with pytest.raises(dbuffer.WriterSupersededError):
                    first.send(SMALL.weights(3), version=version)
            assert contents(store, "receivers") == before
            assert second.send(SMALL.weights(3)).version == 3
            assert newest(store) == 3


def test_sender_superseded_while_it_waits_for_readers_touches_nothing(store):
    with dbuffer.WeightSender(store, num_threads=1) as first, contextlib.ExitStack() as senders:
        publish(first, 1, 2)
        before = {}

        def take_over() -> None:
            (store / "writer.lock").unlink()
            second = dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=0.0)
            senders.enter_context(second).send(SMALL.weights(5), version=5)
            before.update(contents(store, "receivers"))

        at_step(Step("return", "BufferWriter._reuse_file"), take_over)
        try:
            with pytest.raises(dbuffer.WriterSupersededError):
                first.send(SMALL.weights(3))
        finally:
            sys.setprofile(None)
        assert contents(store, "receivers") == before
        assert newest(store) == 5


BEFORE_THE_FLIP = {
    "in the copy": Step("call", "Copier.write"),
    "after the copy": Step("return", "Draft.write"),
    "before the commit": Step("call", "BufferWriter.commit"),
    "between manifest and pointer": Step("return", "BufferWriter._put", nth=2),
}


def publish_and_stop(connection: Connection, store: Path, step: Step) -> None:
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1, 2, 3)
        at_step(step, stop)
        try:
            sender.send((OTHER if step.function == "Draft.write" else SMALL).weights(4))
        except dbuffer.DBufferError as error:
            connection.send(type(error).__name__)
        else:
            connection.send("published")


@pytest.mark.parametrize("step", BEFORE_THE_FLIP.values(), ids=BEFORE_THE_FLIP)
def test_frozen_sender_that_was_replaced_does_not_publish_when_it_wakes(store, step):
    with Child(publish_and_stop, store, step) as first:
        first.wait_until_stopped()
        (store / "writer.lock").unlink()
        with dbuffer.WeightSender(store, reader_timeout_s=0.1) as second:
            for version in (4, 5):
                second.send(SMALL.weights(version + 100), version=version + 100)
            first.signal(signal.SIGCONT)
            assert first.receive() == "WriterSupersededError"
            assert newest(store) == 105
            second.send(SMALL.weights(106), version=106)
    assert newest(store) == 106


# Forked children


def fork_and_use(connection: Connection, use: Callable[[], object]) -> None:
    """Fork a child that tries ``use``, sends the error, and then lives as long as the test."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            use()
        except dbuffer.ClosedError as error:
            connection.send(str(error))
        os.write(writing, b"!")
        with contextlib.suppress(EOFError):
            connection.recv()
        os._exit(0)
    os.read(reading, 1)


def fork_with_a_sender(connection: Connection, store: Path, in_a_publish: bool) -> None:
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1, 2, 3)
        fork_and_use(connection, lambda: sender.send(SMALL.weights(4)))
        if in_a_publish:
            at_step(Step("return", "Draft.write"), stop)
            sender.send(SMALL.weights(4))
        stop()


@pytest.mark.parametrize("in_a_publish", [False, True], ids=["between publishes", "in a publish"])
def test_forked_child_cannot_publish_and_keeps_no_lock(store, in_a_publish):
    """A data loader's worker outlives the trainer that was killed."""
    with Child(fork_with_a_sender, store, in_a_publish) as parent:
        assert "is of a parent process" in parent.receive()
        parent.wait_until_stopped()
        parent.kill()
        with dbuffer.WeightSender(store, reader_timeout_s=60) as sender:
            for version in (4, 5):
                assert sender.send(SMALL.weights(version)).duration_s < SOON_S
        assert newest(store) == 5


def fork_at_each_opening(connection: Connection, store: Path) -> None:
    """Fork as another thread may, before a child can know that a file is open."""
    patch, open_file = pytest.MonkeyPatch(), os.open
    children: dict[str, int] = {}

    def open_and_fork(path: Any, *arguments: Any) -> int:
        number = open_file(path, *arguments)
        name = Path(path).name
        is_to_lock = "receiver-" in name or name == places.WRITER_LOCK_FILE
        if is_to_lock and name not in children:
            children[name] = os.fork()
            if children[name] == 0:
                signal.alarm(60)
                signal.pause()
        return number

    with patch.context() as patched:
        patched.setattr(os, "open", open_and_fork)
        with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
            publish(sender, 1)
            load(receiver)
    connection.send(len(children))
    is_locked: bool | None = None
    with contextlib.suppress(dbuffer.StoreBusyError), dbuffer.WeightSender(store):
        is_locked = filesystem.is_locked(receiver.record.path)
    for child in children.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    connection.send(is_locked)  # last: the test then kills this process


def test_a_child_forked_while_a_file_is_opened_keeps_no_lock(store):
    with Child(fork_at_each_opening, store) as parent:
        assert parent.receive() >= 2
        assert parent.receive() is False


class NeverCleared(set[int]):
    """Holds a forked child up before it closes the files of its parent."""

    def clear(self) -> None:
        signal.alarm(60)
        signal.pause()


def test_a_forked_child_that_has_not_run_yet_keeps_no_lock(store, monkeypatch):
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        publish(sender, 1)
        load(receiver)
        monkeypatch.setattr(filesystem, "_forking", NeverCleared())
        child = os.fork()
    try:
        assert not filesystem.is_locked(receiver.record.path)
        with dbuffer.WeightSender(store) as sender:
            publish(sender, 2)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_forked_child_that_ends_takes_no_lock_along(store):
    """The child closes its copies of the descriptors; the parent's locks must hold."""
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        assert in_a_fork(lambda: None) == 0
        with (store / "writer.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert sender.send(SMALL.weights(1)).version == 1


@pytest.mark.timing(keep_superseded_s=0.0)
def test_a_version_published_while_another_takes_over_keeps_its_file(store, monkeypatch):
    """Where locks hold nobody back, the old sender may publish until it sees the new one."""
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    monkeypatch.setattr(filesystem, "try_lock", lambda *_, **__: True)
    monkeypatch.setattr(filesystem, "lock_within", lambda *_, **__: True)
    put, late = filesystem.replace_file, [3]

    def put_late(path: Path, data: bytes, **options: Any) -> bool:
        if path.name == "writer.json" and late:
            first.send(SMALL.weights(late.pop()))
        return put(path, data, **options)

    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(SMALL.weights(4).items())[:2]
        raise KeyError("the trainer fails")

    with dbuffer.WeightSender(store, reader_timeout_s=0.0) as first:
        publish(first, 1, 2)
        monkeypatch.setattr(filesystem, "replace_file", put_late)
        with dbuffer.WeightSender(store, reader_timeout_s=0.0) as second:
            with pytest.raises(KeyError):
                second.send(fail())
            assert newest(store, verify=True) == 3


def knows_no_locks(_: int, kind: int) -> None:
    if not kind & fcntl.LOCK_UN:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("mount", ["local", "network"])
def test_locks_are_needed_on_a_local_mount_alone(store, monkeypatch, caplog, mount):
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send(SMALL.weights(1))
        monkeypatch.setattr(fcntl, "flock", knows_no_locks)
        if mount == "local":
            for use in (
                lambda: receiver.load_into(SMALL.empty()),
                lambda: sender.send(SMALL.weights(2)),
                lambda: dbuffer.WeightSender(store),
            ):
                message = r"(\.td|writer\.lock): .*DBUFFER_MOUNT=network"
                with pytest.raises(dbuffer.StoreAccessError, match=message):
                    use()
    assert "detected, not prevented" not in caplog.text
    if mount == "network":
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(2))
        assert newest(store, verify=True) == 2
        assert "detected, not prevented" in caplog.text
