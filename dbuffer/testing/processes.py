"""Child processes for tests, and a sender in a child process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from dbuffer.publish.publisher import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.testing.moments import CHANGING_CALLS, at_call, die
from dbuffer.testing.timings import current_timings, set_timings
from dbuffer.testing.waiting import TIMEOUT_S, until

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload([__name__])  # an import of torch takes seconds


class Child:
    """Child process that runs ``function(connection, *args)``. The end of ``with`` kills it.

    The child has the environment and timings of its parent at the time of the start.

    Args:
        function: function to run.
        *args: arguments of the function after ``connection``.
        processes: :mod:`multiprocessing` context that starts the process.
    """

    def __init__(
        self, function: Callable[..., None], *args: Any, processes: Any = FORK_SERVER
    ) -> None:
        self._connection, other_end = processes.Pipe()
        self._process = processes.Process(
            target=_run,
            args=(function, other_end, args, dict(os.environ), current_timings()),
        )
        self._process.start()
        other_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(TIMEOUT_S)
        self._process.close()
        self._connection.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the next object that the child sends."""
        assert self._connection.poll(timeout_s), f"the child sent nothing for {timeout_s} s"
        try:
            return self._connection.recv()
        except EOFError:
            raise AssertionError(f"the child ended with {self.wait()}") from None

    def has_sent(self) -> bool:
        """Wait until the child sends an object or ends; return whether it has sent an object."""
        assert self._connection.poll(TIMEOUT_S), "the child neither sends anything nor ends"
        with socket.socket(fileno=os.dup(self._connection.fileno())) as connection:
            try:
                return connection.recv(1, socket.MSG_PEEK) != b""
            except ConnectionResetError:  # the child ended before it read a message
                return False

    def send(self, value: Any = None) -> None:
        self._connection.send(value)

    def signal(self, number: int) -> None:
        if self._process.exitcode is None:
            # The fork server may have reaped the child before this object gets the exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait until the process has ended."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait until the process ends; return its exit status, which is negative for a signal."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"the child still runs after {timeout_s} s"
        return int(self._process.exitcode)

    def wait_until_stopped(self) -> None:
        """Wait until a SIGSTOP has stopped the process."""

        def has_stopped() -> bool:
            assert self._process.exitcode is None, "the child ended"
            return state_of(self.pid) == "T"

        until("the child has stopped", has_stopped, TIMEOUT_S)


def _run(
    function: Callable[..., None],
    connection: Connection,
    args: tuple[Any, ...],
    environment: dict[str, str],
    seconds: dict[str, float],
) -> None:
    # Copy the parent's state: the fork server has the state from the time when it was started.
    set_timings(seconds)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # so that the child uses one processor, and can itself fork
    try:
        function(connection, *args)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


class SenderProcess(Child):
    """A :class:`~dbuffer.WeightSender` in another process. :meth:`kill` acts like a crash.

    Args:
        store: the store's directory. Default: a directory in shared memory that is removed when the
            ``with`` block ends.
        **options: options of the :class:`~dbuffer.WeightSender`.
    """

    def __init__(self, store: Path | None = None, **options: Any) -> None:
        self._directory = None
        if store is None:
            shared_memory = Path("/dev/shm")  # noqa: S108 - where stores are
            base = shared_memory if shared_memory.is_dir() else None
            self._directory = tempfile.mkdtemp(prefix="dbuffer-testing-", dir=base)
            store = Path(self._directory, "store")
        self.store = store
        super().__init__(_send, store, options)
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._directory is not None:
            shutil.rmtree(self._directory)

    def publish(self, weights: Any, **options: Any) -> Publication:
        """Call :meth:`dbuffer.WeightSender.send` in the child. Raise its error in this process."""
        self.send((weights, options, 0))
        publication: Publication = self._answer()
        return publication

    def was_killed_at(self, number: int, weights: Any, **options: Any) -> bool:
        """Publish, but kill the child process before its ``number``-th call that changes the store.

        Return False if the publish made fewer such calls, so that the process was not killed.
        """
        self.send((weights, options, number))
        if not self.has_sent():
            status = self.wait()
            assert status == -signal.SIGKILL, f"the sender ended with {status}"
            return True
        self._answer()
        return False

    def _answer(self) -> Any:
        answer = self.receive()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _send(connection: Connection, store: Path, options: dict[str, Any]) -> None:
    try:
        sender = WeightSender(store, **options)
    except Exception as error:  # the parent raises the error
        connection.send(error)
        return
    with sender:
        connection.send(None)
        while True:
            weights, arguments, kill_at = connection.recv()
            if kill_at:
                at_call(kill_at, die, CHANGING_CALLS)
            try:
                answer: Any = sender.send(weights, **arguments)
            except Exception as error:  # the parent raises the error
                answer = error
            sys.setprofile(None)
            connection.send(answer)


def state_of(pid: int) -> str:
    """Return the state of a process as Linux abbreviates it, such as ``R``, ``S``, ``T``, ``Z``."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
