"""`BackgroundFollower`: follows until it is closed, and retries whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self

from dbuffer.errors import EngineEndedError, WaitTimeoutError
from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.engine.reporting import Switch
from dbuffer.runtime import options as checks
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.trouble import RetryLoop

logger = logging.getLogger(__name__)


class BackgroundFollowing(Closing, ABC):
    """An engine, or all replicas of one, followed until :meth:`close`."""

    @property
    @abstractmethod
    def engine_id(self) -> str:
        """The engine's name among the store's receivers."""

    @property
    @abstractmethod
    def applied(self) -> int | None:
        """The version that the engine serves; None: weights that are no version of the store."""

    @abstractmethod
    def wait_applied(self, version: int, timeout_s: float = 60.0) -> int:
        """Wait until the engine serves this version or a later one, and return it.

        Raises:
            OptionError: a value is invalid.
            WaitTimeoutError: it does not, in time; the message has the last problem.
        """

    async def wait_applied_async(self, version: int, timeout_s: float = 60.0) -> int:
        """Wait as :meth:`wait_applied` does, in an event loop."""
        return await asyncio.to_thread(self.wait_applied, version, timeout_s)

    @abstractmethod
    async def wait_started_async(self) -> None:
        """Wait until the engine serves what was there when following began.

        Raises:
            DBufferError: why it does not.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop following, after the switch that is under way. Not for the engine's event loop."""

    async def aclose(self) -> None:
        """Close as :meth:`close` does, in the engine's event loop, which a switch needs to end."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


class BackgroundFollower(BackgroundFollowing):
    """Follows in a thread of its own, until it is closed. Made by :func:`follow`.

    Whatever fails is logged and counted, the engine serves on with what it has, and the next
    attempt follows after a while. It ends when it is closed, or when an engine of this process is
    dead, which is logged once.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._stop = threading.Event()
        self._condition = threading.Condition()
        self._has_begun = threading.Event()
        self.error: Exception | None = None
        """Why the last attempt failed; None if it did not."""
        self._thread = threading.Thread(target=self._run, name="dbuffer-follower", daemon=True)
        self._thread.start()

    @property
    def engine_id(self) -> str:
        return self._follower.engine_id

    @property
    def applied(self) -> int | None:
        return self._follower.applied

    def wait_applied(self, version: int, timeout_s: float = 60.0) -> int:
        checks.whole_number("version", version)
        checks.seconds("timeout_s", timeout_s)
        with self._condition:
            self._condition.wait_for(
                lambda: self._follower.has_applied(version) or not self._thread.is_alive(),
                timeout_s,
            )
            applied = self.applied if self._follower.has_applied(version) else None
        if applied is None:
            raise WaitTimeoutError(
                f"{self.engine_id} has version {self.applied}, and not {version} within "
                f"{timeout_s:g} s; last problem: {self.error or 'none'}"
            )
        return applied

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._follower.close()

    async def wait_started_async(self) -> None:
        await asyncio.to_thread(self._has_begun.wait)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            for outcome in follow_for_ever(self._follower, self._stop):
                with self._condition:
                    self.error = outcome if isinstance(outcome, Exception) else None
                    self._condition.notify_all()
                self._has_begun.set()
        finally:
            self._has_begun.set()
            with self._condition:
                self._condition.notify_all()


class ReplicaFollowers(BackgroundFollowing):
    """Follows with each replica of an engine by itself, so that the others serve on meanwhile.

    A replica that cannot switch serves on with the weights that it has, under their label, and is
    retried. All have a version when :attr:`applied` says so. The followers, one of each replica,
    must not have started.
    """

    def __init__(self, followers: Sequence[Follower]) -> None:
        for follower in followers:
            follower.require_followable()
        self.replicas = [BackgroundFollower(follower) for follower in followers]
        """Followers, one for each replica."""

    @property
    def engine_id(self) -> str:
        return ", ".join(replica.engine_id for replica in self.replicas)

    @property
    def applied(self) -> int | None:
        """The version that all replicas serve, or the oldest of those that they serve."""
        applied = [replica.applied for replica in self.replicas]
        return None if None in applied else min(filter(None, applied))

    @property
    def error(self) -> Exception | None:
        """Why the last attempt failed with the first replica with which it did."""
        return next((replica.error for replica in self.replicas if replica.error), None)

    def wait_applied(self, version: int, timeout_s: float = 60.0) -> int:
        deadline = time.monotonic() + checks.seconds("timeout_s", timeout_s)
        return min(
            replica.wait_applied(version, max(0.0, deadline - time.monotonic()))
            for replica in self.replicas
        )

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for replica in self.replicas:
                stack.callback(replica.close)

    async def wait_started_async(self) -> None:
        await asyncio.gather(*(replica.wait_started_async() for replica in self.replicas))


def begin(follower: Follower, *, on_demand: bool) -> Follower | BackgroundFollower:
    """Let an engine follow: switched on demand, or in the background."""
    if on_demand:
        follower.start()
        return follower
    follower.require_followable()
    return BackgroundFollower(follower)


def follow_for_ever(
    follower: Follower, stop_event: threading.Event
) -> Iterator[Switch | Exception | None]:
    """Switch to each newer version; yield each switch, each failure, and None when up to date.

    Ends when ``stop_event`` is set, and when an engine of this process is dead. Failures are
    retried with backoff; a server that was restarted begins to follow again, and is switched at
    once.
    """
    loop = RetryLoop(logger, final=(EngineEndedError,), stop=stop_event)
    is_current = False
    while not stop_event.is_set():
        switch: Switch | None = None
        try:
            with loop.attempt():
                if is_current:
                    follower.wait_for_version(stop_event)
                    loop.succeeded(follower.engine_id)
                switch = follower.sync(stop_event=stop_event)
        except EngineEndedError as error:
            if not stop_event.is_set():
                logger.warning("%s is followed no longer: %s", follower.engine_id, error)
                yield error
            return
        is_current = switch is None and loop.error is None
        if loop.error is not None:
            yield loop.error
            follower.wait_to_retry(loop.retry_s, stop_event)
        elif switch is not None:
            loop.succeeded(follower.engine_id)
            yield switch
        elif not stop_event.is_set():
            yield None
