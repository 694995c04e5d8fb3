"""`FollowLoop`: waits for a store's versions, retries after errors, and logs the errors.

In each attempt, a ``with`` block, the follower waits for a version (`FollowLoop.wait`), uses the
version, and reports its use (`FollowLoop.used`). An error in the block is logged once, reported in
the receiver's record, and retried with backoff. If a sender overwrote the version during its use,
the attempt does not count as failed: the next attempt looks for a newer version at once.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
import time
import traceback
from pathlib import Path
from typing import Literal, Self

from dbuffer import errors
from dbuffer.format.lineage import MAX_NUMBER, Lineage
from dbuffer.runtime import options
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop, message_of
from dbuffer.store.records import OwnRecord

Forked = Literal["follow", "refuse"]
"""Reaction if the store's newest version does not descend from the follower's version (a fork)."""


class Followed(abc.ABC):
    """Base class of receivers that wait for the versions of a store or of a bucket."""

    record: OwnRecord
    """The receiver's record: `FollowLoop` reports problems and counts failures there."""
    poll_interval_s: float

    @property
    @abc.abstractmethod
    def store(self) -> Path | str:
        """Directory or URL of the store, for messages."""

    @property
    @abc.abstractmethod
    def last_seen(self) -> Lineage | None:
        """Newest version that the receiver has seen."""

    @abc.abstractmethod
    def follow_fork(self) -> None:
        """Accept the store's newest version, whichever run (start of a sender) published it."""

    @abc.abstractmethod
    def _look(self) -> int | None:
        """Return the newest version's number, or None if there is none."""

    @abc.abstractmethod
    def _wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for a sign of a new version; return True if there was one."""

    def _until_next_look_s(self) -> float:
        """Return the number of seconds after which `_look` is called again, at the latest."""
        return self.poll_interval_s

    def wait_for_version(
        self,
        newer_than: int | None = None,
        timeout_s: float | None = 60.0,
        stop_event: threading.Event | None = None,
    ) -> int | None:
        """Wait until a version above ``newer_than`` is published; return the newest one's number.

        Return None if ``timeout_s`` passes or ``stop_event`` is set first. Raise
        :class:`VersionRegressedError` if the newest version does not follow the last one seen.
        """
        check_version("newer_than", newer_than)
        if timeout_s is not None:
            options.seconds("timeout_s", timeout_s)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        step_s = math.inf if stop_event is None else TIMING.stop_check_s
        while stop_event is None or not stop_event.is_set():
            version = self._look()
            if version is not None and (newer_than is None or version > newer_than):
                return version
            if (now_s := time.monotonic()) >= deadline:
                return None
            look_at = min(deadline, now_s + self._until_next_look_s())
            while (left_s := look_at - time.monotonic()) > 0:
                if self._wait(min(left_s, step_s)) or (stop_event and stop_event.is_set()):
                    break
        return None


def check_version(name: str, value: int | None) -> None:
    if value is not None:
        options.whole_number(name, value, at_least=-1)


class FollowLoop(RetryLoop):
    """Loop of a receiver that follows a store, with retries. Only :meth:`retry_now` is thread-safe.

    Each round is a ``with`` block of :meth:`attempt`.

    Args:
        doing: the follower's action, for the log, such as ``"staging"``.
        forked: whether to follow a fork from the version that the receiver has seen, or to treat
            the fork like any other failure.
        final: errors that end the loop. The ``with`` block raises them.
        stop: event that ends waits. Errors after the event is set are ignored.
    """

    def __init__(
        self,
        receiver: Followed,
        doing: str,
        logger: logging.Logger,
        *,
        forked: Forked = "refuse",
        final: tuple[type[Exception], ...] = (),
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(logger, final=final, stop=stop)
        self._receiver = receiver
        self._doing = doing
        self._forked = forked
        self._is_due = False
        self._version: int | None = None
        self._used: int | None = None
        self._is_exact = False
        self.has_forked = False
        """Whether the last attempt found that the store has forked. If so, the receiver has
        followed the fork."""
        self.failed_version: int | None = None
        """Version that the last failed attempt could not use, or None if it had found none."""
        self._is_looking = False
        """Whether the attempt is looking for a version."""
        self._is_unreadable = False
        """Whether the last failed attempt failed because it could not look for a version."""
        self._retry_at: float | None = None
        """Time of the next attempt to use ``failed_version``, or None to wait for a newer
        version."""

    def attempt(self) -> Self:
        if self._version is not None and self.is_failing and self.error is None:
            self._is_due = True  # the last attempt did not use its version
        self._version, self._used, self._is_exact = None, None, False
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
        """Wait for a version to use; return None after the timeout or an interrupt.

        A version whose use has failed is returned again only after the backoff.

        Args:
            newer_than: wait for a version above this one, or None for any version.
            exactly: wait until this version or a later one is published, and return this version.
            timeout_s: how long to wait. Default: no limit.
            interrupt: event that ends the wait. Default: the loop's stop event.
        """
        if exactly is not None:
            newer_than, self._is_exact = exactly - 1, True
        interrupt = interrupt or self._stop
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_due, self._is_due = self._is_due, False
        version = None
        if self.is_failing:
            left_s = _time_until(0.0 if is_due else self._retry_at, deadline)
            version = self._wait_to_retry(newer_than, left_s, interrupt)
        if version is None:
            left_s = _time_until(deadline)
            version = self._look(newer_than, left_s, interrupt)
        self._version = version if version is None or exactly is None else exactly
        if version is not None:
            # This attempt fulfills a call of `retry_now` during the wait. So if this attempt fails,
            # the next attempt waits for the backoff.
            self._is_due = False
        elif is_due and interrupt.is_set():
            self._is_due = True  # the interrupted wait made no attempt
        return self._version

    def uses(self, version: int) -> None:
        """Note the attempt's version. If the attempt fails, log and record name this version."""
        self._used = version

    def used(self) -> None:
        """Note that the version was used: clear the failure and the reported problem."""
        if self.succeeded(f"{self._doing} {self._receiver.store}"):
            self._receiver.record.write(problem=None, problem_version=None)

    def retry_now(self) -> None:
        """Make the next attempt without backoff. Any thread can call this method."""
        self._is_due = True

    def _fail(self, error: Exception) -> None:
        if isinstance(error, errors.SnapshotEvictedError):
            message = "a sender overwrote the version during %s, trying again: %s"
            self._logger.warning(message, self._doing, str(error))
        elif (
            self._forked == "follow"
            and isinstance(error, errors.VersionRegressedError)
            and error.is_forked
        ):
            self._logger.warning("%s; %s goes on with the fork", str(error), self._doing)
            self.used()
            self._receiver.follow_fork()
            self.has_forked = True
        else:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        version, last_seen = self._version, self._receiver.last_seen
        if version is not None and last_seen is not None and not self._is_exact:
            version = max(version, last_seen.id.number)  # a newer version was opened instead
        named = self._used or version
        of = "" if named is None else f"version {named} of "
        problem = f"{self._doing} {of}{self._receiver.store}: {message_of(error)}"
        is_lasting = isinstance(error, errors.WeightsMismatchError) or (
            isinstance(error, errors.StoreCorruptError) and error.is_lasting
        )
        self._back_off(error, problem, is_short=version is None, is_lasting=is_lasting)
        # Clear the error's frames: their variables keep the file mapped. If the file was removed,
        # its space is free only once the file is unmapped.
        traceback.clear_frames(error.__traceback__)
        self.failed_version = version
        self._is_unreadable, self._is_looking = self._is_looking, False
        self._retry_at = None if is_lasting else time.monotonic() + self.retry_s
        self._receiver.record.count(failures=1)
        problem_version = None if named is None or last_seen is None else last_seen.at(named)
        self._receiver.record.write_problem(error, problem_version)

    def _wait_to_retry(
        self, newer_than: int | None, left_s: float | None, interrupt: threading.Event
    ) -> int | None:
        """Wait until the backoff ends, or a version newer than the failed one is published."""
        if self.failed_version is not None:
            # If the caller waits for one exact version, a newer one does not end the backoff.
            above = MAX_NUMBER if self._is_exact else max(self.failed_version, newer_than or 0)
            return self._look(above, left_s, interrupt)
        if not interrupt.wait(left_s) and self._is_unreadable:
            # If reading the store works now, the failure is over: don't wait for a new version to
            # find out, because none may come.
            self._look(None, 0.0)
            self.used()
        return None

    def _look(
        self,
        newer_than: int | None,
        timeout_s: float | None,
        interrupt: threading.Event | None = None,
    ) -> int | None:
        self._is_looking = True
        version = self._receiver.wait_for_version(newer_than, timeout_s, interrupt)
        self._is_looking = False
        return version


def _time_until(*times: float | None) -> float | None:
    ends = [end for end in times if end is not None]
    return max(0.0, min(ends) - time.monotonic()) if ends else None
