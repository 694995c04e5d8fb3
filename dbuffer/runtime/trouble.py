"""Handling of errors: `RetryLoop`, `log_once` and `TranslatedErrors`."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from dbuffer.errors import DBufferError, EngineUnreachableError
from dbuffer.runtime.messages import described
from dbuffer.runtime.timing import TIMING

ErrorT = TypeVar("ErrorT", bound=BaseException)
_LOG_MIN_S = 60.0
"""Time after which a failure that continues is logged again. The time doubles with each message."""
_LOG_MAX_S = 3600.0


class RetryLoop:
    """Retries of an operation. Each attempt is a block: ``with loop.attempt():``.

    An error of a type in ``final`` leaves the block, and ends the retries. Any other `Exception` is
    stored in :attr:`error`, and the caller waits :attr:`retry_s` before the next attempt.

    The first failure of each type is logged. If failures continue, one is logged after a minute,
    one after two more minutes, and so on up to every hour. The first success after a failure is
    logged, too.

    Each message about a failure begins with the argument ``failed``, such as ``"cannot look: "``.
    Once the event ``stop`` is set, errors are ignored.
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
        self._forget_failures()
        self.error: Exception | None = None
        """Error of the last attempt, or None if it worked."""
        self.retry_s = 0.0

    def _forget_failures(self) -> None:
        self._num_failed = 0
        self._failed_since = 0.0
        self._kinds: set[tuple[type[Exception], bool | None]] = set()
        self._log_s = _LOG_MIN_S
        self._log_at = 0.0
        """Earliest time at which the next failure is logged, whatever its kind."""

    @property
    def is_failing(self) -> bool:
        """Whether no attempt has succeeded since the last failure."""
        return self._num_failed > 0

    def attempt(self) -> Self:
        self.error = None
        return self

    def succeeded(self, action: str) -> bool:
        """Record a success. If the last attempts failed, log that ``action`` recovered.

        Return whether the last attempts failed.
        """
        if not self.is_failing:
            return False
        duration_s = time.monotonic() - self._failed_since
        self._logger.warning(
            "%s recovered after %.1f s (%d failed attempts)", action, duration_s, self._num_failed
        )
        self._forget_failures()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        # Catch all errors that are not final, even from bugs, so that no error ends the retries.
        if not isinstance(error, Exception) or isinstance(error, self._final):
            return False
        if not self._stop.is_set():
            self._fail(error)
        return True

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
        """Log a failure, unless it was logged recently, and set the backoff.

        ``is_short``: whether a retry costs little, so that the backoff stays short.
        ``is_lasting``: whether only a newer version can end the failures. The log then says so.
        """
        now_s = time.monotonic()
        is_short = is_short or isinstance(error, EngineUnreachableError)
        longest_s = 2 * TIMING.retry_min_s if is_short else TIMING.retry_max_s
        if self.is_failing:
            self.retry_s = min(2 * self.retry_s, longest_s, TIMING.retry_max_s)
        else:
            self.retry_s, self._failed_since = TIMING.retry_min_s, now_s
        self._num_failed += 1
        # A replaced store (``is_forked``) and an emptied store raise errors of one type. Log them
        # as two types of failures.
        kind = type(error), getattr(error, "is_forked", None)
        if kind not in self._kinds:
            self._log_at = now_s + self._log_s
            plan = "waiting for a newer version" if is_lasting else "trying again until it works"
            self._log(error, f"{problem}; {plan}")
        elif now_s >= self._log_at:
            self._log_s = min(2 * self._log_s, _LOG_MAX_S)
            self._log_at = now_s + self._log_s
            self._log(error, f"{problem}; still failing after {now_s - self._failed_since:.0f} s")
        self._kinds.add(kind)
        self.error = without_frames(error)

    def _log(self, error: Exception, message: str) -> None:
        # Only warn if an engine's server does not answer: it may still be starting.
        level = logging.WARNING if isinstance(error, EngineUnreachableError) else logging.ERROR
        self._logger.log(level, "%s", message, exc_info=None if _is_known(error) else error)


def message_of(error: Exception) -> str:
    """Return an error's message, with its type unless it is a DBufferError or an OSError."""
    return str(error) if _is_known(error) else described(error)


def without_frames(error: ErrorT) -> ErrorT:
    """Drop the frames of an error, so that it can be stored, and return the error.

    Frames refer to weights and mapped files, whose memory would stay in use until Python collects
    garbage. Unless it is a DBufferError or an OSError, the error gets its traceback as a note.
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
    """Log a warning, once in this process."""
    logger.warning(message, *arguments)


class TranslatedErrors(contextlib.AbstractContextManager[None]):
    """Calls ``translate`` with each exception that leaves a ``with`` block.

    To replace the exception, ``translate`` raises another one. This is a class, because a generator
    with `contextlib.contextmanager` would leave a cycle of frames on Python 3.13. The cycle would
    keep the callers' objects, such as a version's memory, until Python collects garbage.
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
