"""`FollowLoop`: how everything that follows a store waits, retries, logs, and follows a fork.

A follower makes one attempt after the other until it is to stop::

    loop = FollowLoop(receiver, "copying", logger, forked="follow", stop=stop)
    newer_than = None
    while not stop.is_set():
        with loop.attempt():
            version = loop.wait(newer_than)
            if version is not None:
                ...  # stage, copy, load or print it
                loop.used()
                newer_than = version
        if loop.has_forked:
            newer_than = None

The block of an attempt lets only the final errors out. All others are logged once, noted as the
receiver's problem, and retried with backoff. A snapshot that was evicted is no failure: the next
attempt looks for a newer version at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

from dbuffer import errors
from dbuffer.format.lineage import Lineage
from dbuffer.format.manifest import MAX_INTEGER
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop, message_of
from dbuffer.store.records import OwnRecord

Forked = Literal["follow", "refuse"]
"""Policy if the store forks from a follower's version."""

FORKED: tuple[Forked, ...] = ("follow", "refuse")


class Followed(Protocol):
    """Receiver that a loop follows a store with, as `WeightReceiver`."""

    @property
    def store(self) -> Path | str:
        """The store, for messages."""

    @property
    def record(self) -> OwnRecord:
        """The receiver's record, with counts and problems."""

    @property
    def last_seen(self) -> Lineage | None:
        """Newest version that was seen."""

    def wait_for_version(
        self,
        newer_than: int | None = None,
        timeout_s: float | None = ...,
        stop_event: threading.Event | None = None,
    ) -> int | None:
        """Wait until a version above ``newer_than`` is published; return its number."""

    def follow_fork(self) -> None:
        """Follow the store's newest version, whatever it was before."""


def wait_until_newer(
    look: Callable[[], int | None],
    wait: Callable[[float], bool],
    poll_interval_s: Callable[[], float],
    newer_than: int | None,
    timeout_s: float | None,
    stop_event: threading.Event | None,
) -> int | None:
    """Wait as `Followed.wait_for_version` does; return None after the time-out or a stop.

    ``look`` returns the newest version's number. ``wait`` waits for at most so many seconds, and
    returns whether to look before the poll interval is over.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    step_s = math.inf if stop_event is None else TIMING.stop_check_s
    while stop_event is None or not stop_event.is_set():
        version = look()
        if version is not None and (newer_than is None or version > newer_than):
            return version
        if (now_s := time.monotonic()) >= deadline:
            return None
        look_at = min(deadline, now_s + poll_interval_s())
        while (left_s := look_at - time.monotonic()) > 0:
            if wait(min(left_s, step_s)) or (stop_event is not None and stop_event.is_set()):
                break
    return None


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed."""

    error: Exception
    version: int | None
    """Version that could not be used, or None if the store could not be read."""
    retry_at: float | None
    """Time of the next attempt, or None if only a newer version is attempted."""


class FollowLoop(RetryLoop):
    """Policy and state of one follower's attempts. It serves one thread.

    Args:
        receiver: waits for versions, and follows a fork.
        doing: present participle for the log: ``"staging"``.
        logger: the follower's logger.
        forked: if the store forks from the version that was seen, ``"follow"``: go on with the
            fork, and log it. ``"refuse"``: treat it as a failure like others. ``"raise"``: end
            following.
        final: errors that end following. They leave the block of an attempt.
        stop: ends waits; an error of an attempt that it ended is ignored.
    """

    def __init__(
        self,
        receiver: Followed,
        doing: str,
        logger: logging.Logger,
        *,
        forked: Forked | Literal["raise"] = "refuse",
        final: tuple[type[Exception], ...] = (),
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(logger, final=final, stop=stop)
        self._receiver = receiver
        self._doing = doing
        self._forked = forked
        self._is_due = False
        self._version: int | None = None
        self._is_exact = False
        self.has_forked = False
        """Whether the last attempt found a fork, and follows it from now on."""
        self.failure: Failure | None = None
        """Last failure, until an attempt succeeds."""

    def attempt(self) -> Self:
        """Begin an attempt, for a ``with`` block."""
        self._version, self._is_exact = None, False
        self.has_forked = False
        return super().attempt()

    def wait(
        self,
        newer_than: int | None,
        *,
        exactly: int | None = None,
        timeout_s: float | None = None,
        interrupt: threading.Event | None = None,
    ) -> int | None:
        """Wait for a version to use; return None after the time-out or an interrupt.

        A version that failed before is returned again only after a while.

        Args:
            newer_than: only a version above this one, or any.
            exactly: this version, when it or a later one was published.
            timeout_s: how long to wait. Default: without end.
            interrupt: ends the wait. Default: the loop's stop event.
        """
        if exactly is not None:
            newer_than, self._is_exact = exactly - 1, True
        version = self._wait(newer_than, timeout_s, interrupt or self._stop)
        self._version = version if version is None or exactly is None else exactly
        if version is not None:
            # This attempt answers `retry_now`: if it fails, the backoff applies again.
            self._is_due = False
        return self._version

    def used(self) -> None:
        """Note that the version was used, which ends any failure."""
        if self.succeeded(f"{self._doing} {self._receiver.store}"):
            self._receiver.record.write(problem=None, problem_version=None)
        self.failure = None

    def retry_now(self) -> None:
        """Let the next attempt be made without backoff. Any thread may call it."""
        self._is_due = True

    def _is_final(self, error: Exception) -> bool:
        is_refused = self._forked == "raise" and _is_fork(error)
        return is_refused or super()._is_final(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, errors.SnapshotEvictedError):
            self._logger.warning("%s was overtaken, beginning anew: %s", self._doing, str(error))
        elif self._forked == "follow" and _is_fork(error):
            self._logger.warning("%s (%s that)", str(error), self._doing)
            self.used()
            self._receiver.follow_fork()
            self.has_forked = True
        else:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        version, last_seen = self._version, self._receiver.last_seen
        if version is not None and last_seen is not None and not self._is_exact:
            version = max(version, last_seen.id.number)  # the version that overtook it
        of = "" if version is None else f"version {version} of "
        problem = f"{self._doing} {of}{self._receiver.store}: {message_of(error)}"
        is_lasting = isinstance(error, errors.WeightsMismatchError) or (
            isinstance(error, errors.StoreCorruptError) and error.is_lasting
        )
        self._back_off(error, problem, is_short=version is None, is_lasting=is_lasting)
        # Its frames hold on to the mapping of a file that may be long gone.
        traceback.clear_frames(error.__traceback__)
        retry_at = None if is_lasting else time.monotonic() + self.retry_s
        self.failure = Failure(error, version, retry_at)
        self._receiver.record.count(failures=1)
        problem_version = None if version is None or last_seen is None else last_seen.at(version)
        self._receiver.record.write_problem(error, problem_version)

    def _wait(
        self, newer_than: int | None, timeout_s: float | None, interrupt: threading.Event
    ) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_due, self._is_due = self._is_due, False
        if self.failure is not None:
            left_s = _time_until(0.0 if is_due else self.failure.retry_at, deadline)
            version = self._wait_to_retry(self.failure, newer_than, left_s, interrupt)
            if version is not None or interrupt.is_set():
                return version
        return self._receiver.wait_for_version(newer_than, _time_until(deadline), interrupt)

    def _wait_to_retry(
        self,
        failure: Failure,
        newer_than: int | None,
        left_s: float | None,
        interrupt: threading.Event,
    ) -> int | None:
        """Wait out the backoff; end early, and return it, if a newer version than failed comes."""
        if failure.version is not None:
            # If exactly one version will do, a newer one does not end the backoff.
            above = MAX_INTEGER if self._is_exact else max(failure.version, newer_than or 0)
            return self._receiver.wait_for_version(above, left_s, interrupt)
        if not interrupt.wait(left_s):
            # There may be nothing new: a look shows whether the store can be read again.
            self._receiver.wait_for_version(None, 0.0)
            self.used()
        return None


def _is_fork(error: Exception) -> bool:
    return isinstance(error, errors.VersionRegressedError) and error.is_forked


def _time_until(*times: float | None) -> float | None:
    """Return the seconds until the first of these times, or None if all are None."""
    ends = [end for end in times if end is not None]
    return max(0.0, min(ends) - time.monotonic()) if ends else None
