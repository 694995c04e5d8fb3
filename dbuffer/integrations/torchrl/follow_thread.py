"""`FollowThread`: keeps a receiver's engine on the newest version, and records it in the store."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from dbuffer.errors import ClosedError, DBufferError
from dbuffer.format.manifest import Pointer, host_in_id
from dbuffer.format.places import RECEIVERS_DIRECTORY, SCRATCH_DIRECTORY
from dbuffer.runtime.trouble import RetryLoop
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import RecordFile

logger = logging.getLogger(__name__)

_NAME = "torchrl-vllm-"
_BUSY_RETRY_S = 0.005
"""Interval at which to ask whether an ``LLM`` has finished; the next generation waits."""


class Switching(Protocol):
    """A receiver, as far as the thread knows it. All calls come from that thread."""

    @property
    def store(self) -> Path:
        """The store that is followed now."""

    @property
    def applied(self) -> int | None:
        """The version that the engine has of the store; None: none yet."""

    def catch_up(self) -> bool:
        """Switch to the newest version, or raise; False: the engine generates, and does it soon."""

    def wait_for_news(self, beyond: int | None, timeout_s: float, wake: threading.Event) -> None:
        """Return when there is a version above ``beyond``, or earlier if ``wake`` is set."""


class FollowThread:
    """Keeps a receiver's engine on the newest version of a store until it is closed.

    It is one receiver of the store, whose record says which version the engine has, or why it does
    not have the newest: senders wait for it.
    """

    def __init__(
        self,
        receiver: Switching,
        *,
        is_to_be_made: bool,
        allow_shared_store: bool,
        poll_interval_s: float,
    ) -> None:
        self._receiver = receiver
        self._allow_shared_store = allow_shared_store
        self._name = f"{_NAME}{host_in_id()}-{secrets.token_hex(4)}"
        self._is_to_be_made = is_to_be_made
        self._poll_interval_s = poll_interval_s
        self._register(receiver.store)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._is_closed = False
        self._closing = threading.Lock()
        self._say(None, None)
        self._thread = threading.Thread(target=self._run, name="dbuffer-torchrl", daemon=True)
        self._thread.start()

    def _register(self, store: Path) -> None:
        self._store = DoubleBuffer(store, allow_shared_store=self._allow_shared_store)
        self._record = RecordFile(store, self._name)
        self._record.set(is_ephemeral=True)

    def do(self, call: Callable[[], Any]) -> Any:
        """Make a call in the thread; return or raise its outcome."""
        if threading.current_thread() is self._thread:
            return call()
        future: Future[Any] = Future()
        with self._closing:
            if self._is_closed:
                raise ClosedError("this receiver was shut down")
            self._jobs.put((call, future))
        self._wake.set()
        return future.result()

    def close(self) -> None:
        """Stop, after the switch that is under way. The engine keeps its weights."""
        with self._closing:
            self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._record.remove()

    def _run(self) -> None:
        loop = RetryLoop(logger)
        while not self._is_closed:
            self._wake.clear()
            self._do_jobs()
            newest, wait_s = None, self._poll_interval_s
            with loop.attempt():
                if (store := self._receiver.store) != self._store.root:
                    self._record.remove()
                    self._register(store)
                newest = self._store.newest_pointer()
                if self._receiver.catch_up():
                    loop.succeeded(self._name)
                    self._say(newest, self._receiver.applied)
                else:
                    wait_s = _BUSY_RETRY_S
            if loop.error is not None:
                wait_s = loop.retry_s
                self._say(newest, None, problem=str(loop.error) or repr(loop.error))
            beyond = None if newest is None else newest.version
            # What is wrong with the store, the next look tells.
            with contextlib.suppress(DBufferError, OSError):
                self._receiver.wait_for_news(beyond, wait_s, self._wake)
                continue
            self._wake.wait(wait_s)
        self._do_jobs()

    def _do_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call, future = self._jobs.get_nowait()
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - of who waits for it
                    future.set_exception(error)

    def _say(self, newest: Pointer | None, applied: int | None, problem: str | None = None) -> None:
        """Record the engine's version, of the history that ``newest`` belongs to."""
        version, history = (newest.version, newest.history) if newest else (None, None)
        before = self._record.current
        if applied != version:  # a version came meanwhile, maybe of another run: look again
            applied = before.applied_version if before.history == history else None
        changes = {
            "applied_version": applied,
            "history": history,
            "problem": problem,
            "problem_version": version if problem is not None else None,
        }
        is_there = self._record.path.exists()
        if is_there and all(getattr(before, name) == value for name, value in changes.items()):
            return
        if newest is None and self._is_to_be_made:
            # Before the first version: the sender is to find this receiver when it publishes.
            with contextlib.suppress(DBufferError):
                for path in (SCRATCH_DIRECTORY, RECEIVERS_DIRECTORY):
                    filesystem.make_directory(self._store.root / path, parents=True)
        with contextlib.suppress(DBufferError):
            self._record.write(**changes)


class RegisteredReceivers:
    """Receivers that :class:`FollowThread` has registered in a store, for a sender to wait for."""

    def __init__(self, store: Path, *, allow_shared_store: bool) -> None:
        self._store = DoubleBuffer(store, allow_shared_store=allow_shared_store)
        self._known: set[str] = set()

    def names(self) -> set[str]:
        """Return those that live, and those that have ended since the last call without leaving."""
        records = [
            record for record in self._store.receivers() if record.receiver.startswith(_NAME)
        ]
        living = {record.receiver for record in records if self._store.may_live(record)}
        ended = self._known & {record.receiver for record in records} - living
        self._known = living
        return living | ended
