"""`RetryLoop`: attempts until one works, with backoff, and with a log that backs off further.

`log_once` is for conditions that are no failures, and last. `TranslatedErrors` replaces exceptions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from dbuffer.errors import DBufferError, EngineUnreachableError
from dbuffer.runtime.messages import described
from dbuffer.runtime.timing import TIMING

ErrorT = TypeVar("ErrorT", bound=BaseException)
_LOG_MIN_S = 60.0
"""Time before a lasting failure is logged again; it doubles with each further message."""
_LOG_MAX_S = 3600.0
"""Upper bound of that time."""


@dataclass(slots=True)
class _Failures:
    """Failures in a row."""

    since: float
    """Time of the first one."""
    number: int = 0
    kinds: set[tuple[type[Exception], str | None]] = field(default_factory=set)
    next_retry_s: float = field(default_factory=lambda: TIMING.retry_min_s)
    """Backoff after the next one."""
    log_s: float = _LOG_MIN_S
    log_at: float = 0.0
    """Earliest time at which the next failure is logged, whatever its kind."""


class RetryLoop:
    """Attempts at one operation, each the block of a ``with loop.attempt():``.

    The block lets only the final errors out. All others are kept in :attr:`error`; the caller
    waits :attr:`retry_s` before the next attempt.

    Failures are logged when they begin, when an error is of another type than those before it,
    after a minute, after two more, and so on up to every hour; and once more when they are over.

    Args:
        logger: the caller's logger.
        failed: the beginning of messages about failures, as ``"cannot look: "``.
        final: errors that end the attempts.
        stop: an error after it is set is ignored: it comes of closing.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        failed: str = "",
        final: tuple[type[Exception], ...] = (),
        stop: threading.Event | None = None,
    ) -> None:
        self._logger = logger
        self._failed = failed
        self._final = final
        self._stop = stop or threading.Event()
        self._failures: _Failures | None = None
        """Failures since the last success, or None if there were none."""
        self.error: Exception | None = None
        """Error of the last attempt, or None if it worked."""
        self.retry_s = 0.0
        """Backoff after the last failure."""

    def attempt(self) -> Self:
        self.error = None
        return self

    def succeeded(self, action: str) -> bool:
        """Note that an action works; return whether it did not before."""
        failures, self._failures = self._failures, None
        if failures is None:
            return False
        duration_s = time.monotonic() - failures.since
        self._logger.warning(
            "%s recovered after %.1f s (%d failed attempts)", action, duration_s, failures.number
        )
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        # Whatever it is, a bug of ours included, must not end the attempts silently.
        if not isinstance(error, Exception) or self._is_final(error):
            return False
        if not self._stop.is_set():
            self._fail(error)
        return True

    def _is_final(self, error: Exception) -> bool:
        return isinstance(error, self._final)

    def _fail(self, error: Exception) -> None:
        self._back_off(error, self._failed + message_of(error))

    def _back_off(
        self,
        error: Exception,
        problem: str,
        *,
        is_short: bool = False,
        is_lasting: bool = False,
    ) -> None:
        """Log a failure if it is time to, and set the backoff.

        ``is_short``: a retry costs little, so the wait stays short. ``is_lasting``: the caller
        does not retry the same thing, and the log says so.
        """
        now_s = time.monotonic()
        failures = self._failures = self._failures or _Failures(now_s)
        failures.number += 1
        # To replace a store and to empty it are failures of two kinds.
        kind = type(error), getattr(error, "is_forked", None)
        if kind not in failures.kinds:
            failures.log_at = now_s + failures.log_s
            plan = "waiting for a newer version" if is_lasting else "trying again until it works"
            self._log(error, f"{problem}; {plan}")
        elif now_s >= failures.log_at:
            failures.log_s = min(2 * failures.log_s, _LOG_MAX_S)
            failures.log_at = now_s + failures.log_s
            self._log(error, f"{problem}; still failing after {now_s - failures.since:.0f} s")
        failures.kinds.add(kind)
        self.error = without_frames(error)
        self.retry_s = failures.next_retry_s
        is_short = is_short or isinstance(error, EngineUnreachableError)
        longest_s = 2 * TIMING.retry_min_s if is_short else math.inf
        failures.next_retry_s = min(2 * self.retry_s, longest_s, TIMING.retry_max_s)

    def _log(self, error: Exception, message: str) -> None:
        # A server that is not there yet is no error.
        level = logging.WARNING if isinstance(error, EngineUnreachableError) else logging.ERROR
        self._logger.log(level, "%s", message, exc_info=None if _is_known(error) else error)


def message_of(error: Exception) -> str:
    """Return an error's message, with its type if it is not an error that users may expect."""
    return str(error) if _is_known(error) else described(error)


def without_frames(error: ErrorT) -> ErrorT:
    """Drop the frames of an error that is kept, and return it.

    They refer to weights and mapped files, whose room is not free until they are unmapped; in a
    cycle with what keeps the error, that is when Python collects garbage. The traceback of an error
    that users do not expect becomes a note of its text.
    """
    if not _is_known(error):
        error.add_note("".join(traceback.format_exception(error)))
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__context__
    return error


def _is_known(error: BaseException) -> bool:
    return isinstance(error, DBufferError | OSError)


@functools.lru_cache(maxsize=256)
def log_once(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning, unless this process has logged it already."""
    logger.warning(message, *arguments)


class TranslatedErrors(contextlib.AbstractContextManager[None]):
    """Gives each exception that leaves a ``with`` block to ``translate``.

    If ``translate`` returns, the exception goes on; to replace it, ``translate`` raises another.

    This is no generator that catches one exception and raises another: on Python 3.13 (not on 3.11)
    its frame and contextlib's would then hold each other, and with them all objects of the callers
    (memory of a version, descriptors), until the garbage collector runs, which engines rarely
    let.
    """

    def __init__(self, translate: Callable[[BaseException], None]) -> None:
        self._translate = translate

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._translate(error)
