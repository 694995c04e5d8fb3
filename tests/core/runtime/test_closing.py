"""Closing while another thread publishes; and what a forked child does with what it inherited."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from dbuffer import LazyTensor, WeightReceiver, WeightSender
from dbuffer.errors import ClosedError
from dbuffer.io.copier import Copier
from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.draft import Draft
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.children import Child
from tests.support.forks import in_a_fork
from tests.support.patterns import newest
from tests.support.waiting import Gate

HANGS_S = 0.3
"""How long who must wait is watched waiting."""


def hold_up(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Gate:
    gate, method = Gate(), getattr(owner, name)

    def call_later(*arguments: Any, **options: Any) -> None:
        gate.hold_up()
        method(*arguments, **options)

    patch.setattr(owner, name, call_later)
    return gate


class InThread(threading.Thread):
    """Runs a function; its result, or what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.result = error

    def outcome(self) -> Any:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return self.result


def gated(gate: Gate) -> dict[str, Any]:
    """Weights of which the second stops in the middle of a publish."""

    def second() -> torch.Tensor:
        gate.hold_up()
        return torch.arange(100_000.0)

    return {
        "first": torch.ones(1000),
        "second": LazyTensor(torch.float32, (100_000,), second),
        "third": torch.ones(1000),
    }


def stream(gate: Gate) -> Iterator[tuple[str, Any]]:
    return iter(gated(gate).items())


@contextlib.contextmanager
def unrelated_files(directory: Path) -> Iterator[list[BinaryIO]]:
    """Files that take every number that has become free."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context((directory / f"unrelated-{n}").open("w+b")) for n in range(16)]


def close_in_the_middle(
    publish: Callable[[], Any], close: Callable[[], None], gate: Gate, directory: Path
) -> Any:
    """What the publish came to during which another thread closed; nothing went elsewhere."""
    publishing = InThread(publish)
    assert gate.is_there.wait(TIMEOUT_S)
    closing = InThread(close)
    closing.join(HANGS_S)
    did_wait = closing.is_alive()
    with unrelated_files(directory) as files:
        gate.may_go_on.set()
        outcome = publishing.outcome()
        assert closing.outcome() is None
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * len(files)
    assert did_wait
    return outcome


# Closing while another thread publishes


@pytest.mark.parametrize("make", [gated, stream])
@pytest.mark.usefixtures("mount")
def test_close_waits_for_a_send_in_another_thread(tmp_path, store, make):
    gate = Gate()
    sender = WeightSender(store, checksum=True)
    published = close_in_the_middle(lambda: sender.send(make(gate)), sender.close, gate, tmp_path)
    assert published.version == 1
    with WeightReceiver(store, verify=True) as receiver, receiver.open() as snapshot:
        assert torch.equal(snapshot.tensors["second"], torch.arange(100_000.0))
    with pytest.raises(ClosedError):
        sender.send({"a": torch.ones(1)})


def test_closed_from_inside_a_send_it_closes_when_that_ends(store):
    """By a callback, or by a signal handler on top of it, in the very thread."""
    sender = WeightSender(store)
    weights = {"lazy": LazyTensor(torch.float32, (4,), lambda: torch.ones(4))}
    assert sender.send(weights, progress=lambda *_: sender.close()).version == 1
    with pytest.raises(ClosedError):
        sender.send(weights)
    WeightSender(store).close()


@pytest.mark.usefixtures("mount")
def test_a_closed_writer_commits_nothing(tmp_path, store):
    """The second line: whoever closed it, the claim's file is not written by its number."""
    sender = WeightSender(store)

    def make() -> torch.Tensor:
        sender._writer.close()
        return torch.ones(1000)

    with unrelated_files(tmp_path) as files:
        with pytest.raises(ClosedError):
            sender.send({"a": torch.ones(4), "b": LazyTensor(torch.float32, (1000,), make)})
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * len(files)
    sender.close()
    assert newest(store) is None


# Forks


def fork_in_the_middle(
    connection: Connection, gate: Gate, publish: Callable[[], Any], close: Callable[[], None]
) -> None:
    """Send how the fork ended, and the version that is published meanwhile."""
    publishing = InThread(publish)
    assert gate.is_there.wait(TIMEOUT_S)

    def use_in_child() -> None:
        with pytest.raises(ClosedError):
            publish()
        close()

    connection.send(in_a_fork(use_in_child))
    gate.may_go_on.set()
    connection.send(publishing.outcome().version)


def fork_during_a_send(connection: Connection, store: Path) -> None:
    gate = Gate()
    with WeightSender(store) as sender:
        fork_in_the_middle(connection, gate, lambda: sender.send(gated(gate)), sender.close)
        assert sender.send({"a": torch.ones(1)}).version == 2


def fork_while_one_is_pending(connection: Connection, store: Path) -> None:
    gate = hold_up(pytest.MonkeyPatch(), Draft, "write")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with WeightSender(store) as sender:
        sender.guard(optimizer)

        def publish() -> Any:
            optimizer.step()
            return sender.send({"a": torch.ones(1)}, wait=False).wait(TIMEOUT_S)

        fork_in_the_middle(connection, gate, publish, sender.close)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("fork", [fork_during_a_send, fork_while_one_is_pending])
def test_a_child_forked_during_a_publish_neither_publishes_nor_hangs(store, fork):
    with Child(fork, store) as child:
        assert [child.receive(), child.receive()] == [0, 1]
        assert child.wait() == 0


def is_woken(receiver: WeightReceiver, sender: WeightSender) -> bool:
    """Whether a receiver sees a version when it comes, and not when its time is over."""
    newest = receiver.wait_for_version(0, timeout_s=0)
    started = time.monotonic()
    waiting = InThread(lambda: receiver.wait_for_version(newest, timeout_s=60))
    waiting.join(HANGS_S)
    sender.send({"a": torch.ones(1)})
    assert waiting.outcome() is not None
    return time.monotonic() - started < 30


def close_a_receiver_in_a_fork(connection: Connection, store: Path) -> None:
    with WeightSender(store) as sender, WeightReceiver(store, poll_interval_s=60) as receiver:
        sender.send({"a": torch.ones(1)})
        assert receiver.wait_for_version(0, timeout_s=TIMEOUT_S) == 1
        # If this one fails, the machine has no inotify to give, and the fork is not to blame.
        connection.send(is_woken(receiver, sender))
        connection.send(in_a_fork(receiver.close))
        connection.send(is_woken(receiver, sender))


def test_a_child_that_closes_its_copy_of_a_receiver_leaves_the_parents_watch(store):
    with Child(close_a_receiver_in_a_fork, store) as child:
        assert [child.receive() for _ in range(3)] == [True, 0, True]


def copy_in_a_fork(connection: Connection, store: Path) -> None:
    weights = {str(n): torch.full((1000,), float(n)) for n in range(8)}
    with WeightSender(store) as sender, WeightReceiver(store, num_threads=2) as receiver:
        sender.send(weights)
        with receiver.open() as snapshot:
            snapshot.copy()  # its threads have begun, and are not in the child

            def copy_in_child() -> None:
                assert torch.equal(snapshot.copy()["7"], weights["7"])

            connection.send(in_a_fork(copy_in_child))


def test_a_snapshot_can_be_copied_in_a_forked_child(store):
    with Child(copy_in_a_fork, store) as child:
        assert child.receive() == 0


# An interrupt in the middle of a copy that several threads make


def interrupted_while_others_work(copier: Copier, times: int) -> list[str]:
    """What happens in a call that is interrupted while another thread is in the middle of it."""
    gate, log = Gate(), []
    main = threading.get_ident()

    def interrupt_again() -> None:
        for _ in range(times - 1):
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        gate.may_go_on.set()

    def work(_first: int, _end: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert gate.is_there.wait(TIMEOUT_S)
            # One thread for all: an interrupt may come before this one could start a second.
            threading.Thread(target=interrupt_again).start()
            raise KeyboardInterrupt
        gate.hold_up()
        log.append("written")

    with pytest.raises(KeyboardInterrupt):
        copier.in_parallel(work, [(n, n + 1) for n in range(copier.num_threads)])
    log.append("raised")
    return log


@pytest.mark.parametrize("times", [1, 2, 3])
def test_nobody_copies_on_when_an_interrupt_has_left_the_call(times):
    """Not after a second one either, which comes while the first waits for the other thread."""
    copier = Copier(2)
    assert interrupted_while_others_work(copier, times) == ["written", "raised"]
    done: list[int] = []
    copier.in_parallel(lambda first, _: done.append(first), [(0, 1), (1, 2)])
    assert sorted(done) == [0, 1]
    copier.close()


def test_nothing_can_be_handed_to_a_spawned_process(tmp_path):
    """A spawned child gets what pickles; it must not get half of a sender."""
    weights = {"a": torch.ones(4)}
    with (
        WeightSender(tmp_path / "store") as sender,
        WeightReceiver(tmp_path / "store") as receiver,
        Mirror(tmp_path / "store", tmp_path / "mirror") as mirror,
    ):
        pending = sender.send(weights, wait=False)
        pending.wait()
        with receiver.open() as snapshot:
            for mine in (sender, receiver, mirror, pending, snapshot):
                with pytest.raises(ClosedError, match=type(mine).__name__):
                    ForkingPickler.dumps(mine)
            (tensor,) = pickle.loads(pickle.dumps(list(snapshot.tensors.values())))
        sender.send({"a": torch.zeros(4)})
        sender.send({"a": torch.zeros(4)})
        assert tensor.tolist() == [1.0] * 4, "a copy"
