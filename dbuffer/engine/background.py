"""`BackgroundFollower`: keeps an engine on a store's newest version, in a thread, until closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from typing import Any, Self

from dbuffer.engine.contract import Switch
from dbuffer.engine.follower import Follower
from dbuffer.errors import EngineEndedError, WaitTimeoutError
from dbuffer.runtime import options as checks
from dbuffer.runtime.closing import Closing, join
from dbuffer.runtime.trouble import RetryLoop

logger = logging.getLogger(__name__)

_SERVER_CLOSE_S = 30.0


class BackgroundFollower(Closing):
    """Keeps an engine, or each of its replicas, on a store's newest version.

    Made by :func:`follow`.

    Each replica has its own thread. A failure is logged, counted, and retried with backoff. Until a
    retry succeeds, the engine serves its old weights, labeled with their version. A thread ends
    when the follower is closed. It also ends, and logs so, when its engine is in this process and
    has died.
    """

    def __init__(self, *replicas: Follower) -> None:
        for follower in replicas:
            follower.require_followable()
        self.replicas = replicas
        self._stop = threading.Event()
        self._attempted = threading.Condition()
        self._errors: dict[Follower, Exception | None] = {}
        self._running = {*replicas}
        self._threads = [
            threading.Thread(
                target=self._run, args=(follower,), name="dbuffer-follower", daemon=True
            )
            for follower in replicas
        ]
        for thread in self._threads:
            thread.start()

    @property
    def engine_id(self) -> str:
        return ", ".join(follower.engine_id for follower in self.replicas)

    @property
    def applied(self) -> int | None:
        """Number of the version that the engine serves, or None if it serves no version.

        With replicas: the oldest of their versions, or None if a replica serves no version.
        """
        applied = [follower.applied for follower in self.replicas]
        return None if None in applied else min(filter(None, applied))

    @property
    def applied_metadata(self) -> dict[str, Any]:
        oldest = min(self.replicas, key=lambda follower: follower.applied or 0)
        return oldest.applied_metadata

    @property
    def error(self) -> Exception | None:
        """Error of the last attempt to switch, or None.

        With replicas, the error of one replica whose last attempt failed.
        """
        return next((error for error in self._errors.copy().values() if error is not None), None)

    def wait_applied(self, version: int, timeout_s: float = 60.0) -> int:
        """Wait until the engine serves ``version`` or a later one; return the version served.

        Raises:
            WaitTimeoutError: the engine did not switch in time, or the follower's thread has ended.
                The message contains the last error.
        """
        checks.whole_number("version", version)
        checks.seconds("timeout_s", timeout_s)
        behind: list[Follower] = []

        def is_over() -> bool:
            nonlocal behind
            behind = [f for f in self.replicas if not f.has_applied(version)]
            return not behind or not self._running.issuperset(behind)

        with self._attempted:
            self._attempted.wait_for(is_over, timeout_s)
            applied = self.applied
        if behind or applied is None:
            raise WaitTimeoutError(
                "; ".join(
                    f"{follower.engine_id} has {follower.weights}, and did not reach version "
                    f"{version} within {timeout_s:g} s; last problem: "
                    f"{self._errors.get(follower) or 'none'}"
                    for follower in behind
                )
            )
        return applied

    async def wait_applied_async(self, version: int, timeout_s: float = 60.0) -> int:
        return await asyncio.to_thread(self.wait_applied, version, timeout_s)

    async def wait_started_async(self) -> None:
        """Wait until the engine serves the version that was newest when this follower started.

        If an attempt to switch fails, raise its error.
        """

        def wait() -> None:
            with self._attempted:
                self._attempted.wait_for(lambda: self._running <= self._errors.keys())

        await asyncio.to_thread(wait)
        if self.error is not None:
            raise self.error

    def done(self) -> None:
        """Let the engine switch again, if the option ``until_done`` made it keep its version."""
        for follower in self.replicas:
            follower.done()

    def stop(self) -> None:
        """Begin to stop, without waiting. From now on, the end of the engine is not logged."""
        self._stop.set()

    def close(self) -> None:
        """Finish the switch in progress, then stop.

        The event loop of an ``AsyncLLM`` must keep running meanwhile, because the switch needs it.
        If a server does not answer for 30 seconds, this method stops waiting for it.
        """
        self.stop()
        with contextlib.ExitStack() as stack:
            for follower, thread in zip(self.replicas, self._threads, strict=True):
                stack.callback(_end, follower, thread)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _run(self, follower: Follower) -> None:
        loop = RetryLoop(logger, final=(EngineEndedError,), stop=self._stop)
        is_current = False
        try:
            while not self._stop.is_set():
                switch: Switch | None = None
                with loop.attempt():
                    if is_current:
                        follower.wait_for_version(self._stop)
                        loop.succeeded(follower.engine_id)
                    switch = follower.sync(stop_event=self._stop)
                is_current = switch is None and loop.error is None
                if switch is not None:
                    loop.succeeded(follower.engine_id)
                self._note(follower, loop.error)
                if loop.error is not None:
                    follower.wait_to_retry(loop.retry_s, self._stop)
        except EngineEndedError as error:
            if not self._stop.is_set():
                logger.warning("%s gets no more versions: %s", follower.engine_id, str(error))
                self._note(follower, error)
        finally:
            with self._attempted:
                self._running.remove(follower)
                self._attempted.notify_all()

    def _note(self, follower: Follower, error: Exception | None) -> None:
        with self._attempted:
            self._errors[follower] = error
            self._attempted.notify_all()


def _end(follower: Follower, thread: threading.Thread) -> None:
    join(thread, _SERVER_CLOSE_S if follower.drives_server else math.inf)
    if thread.is_alive():
        logger.error(
            "%s has not answered for %g s during a switch: closing stops waiting for it, and the "
            "engine may be left paused",
            follower.engine_id,
            _SERVER_CLOSE_S,
        )
    else:
        follower.close()
