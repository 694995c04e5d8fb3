"""`Trouble`: retries of what keeps failing, less and less often, and logged even less often.

`log_once` is for what is no failure, and stays as it is.
"""

from __future__ import annotations

import functools
import logging
import time

from dbuffer.errors import DBufferError, EngineUnreachableError

_RETRY_MIN_S = 0.5
_RETRY_MAX_S = 30.0
_RETRY_AWAY_MAX_S = 1.0
"""For a server that is away: once it is back, it must not serve old weights for long."""

_LOG_MIN_S = 60.0
_LOG_MAX_S = 3600.0


class Trouble:
    """One incident after the other, of something that is tried until it works.

    An incident is logged when it begins, when it becomes one of another kind, after a minute, after
    two more, and so on up to every hour; and once more when it is over.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._kinds: set[type[Exception]] = set()
        self._num_failures = 0
        self._retry_s = _RETRY_MIN_S
        self._log_s = _LOG_MIN_S
        self._log_at = 0.0

    def note(self, error: Exception) -> float:
        """Record a failure; the seconds to wait before the next try."""
        now = time.monotonic()
        if self._since is None:
            self._begin()
            self._since = now
        self._num_failures += 1
        if type(error) not in self._kinds:
            self._log_at = now + self._log_s
            self._log(error, "trying again until it works")
        elif now >= self._log_at:
            self._log_s = min(2 * self._log_s, _LOG_MAX_S)
            self._log_at = now + self._log_s
            self._log(error, f"still failing after {now - self._since:.0f} s")
        self._kinds.add(type(error))
        wait_s = self._retry_s
        is_away = isinstance(error, EngineUnreachableError)
        self._retry_s = min(2 * wait_s, _RETRY_AWAY_MAX_S if is_away else _RETRY_MAX_S)
        return wait_s

    def end(self, what: str) -> bool:
        """Record a success of ``what``; True, after logging it, if there was trouble before."""
        if self._since is None:
            return False
        duration_s = time.monotonic() - self._since
        self._logger.warning(
            "%s works again, after %.1f s and %d failures", what, duration_s, self._num_failures
        )
        self._since = None
        return True

    def _log(self, error: Exception, more: str) -> None:
        # A server that is not there yet is no error.
        level = logging.WARNING if isinstance(error, EngineUnreachableError) else logging.ERROR
        is_known = isinstance(error, DBufferError | OSError)
        what = error if is_known else f"{type(error).__name__}: {error}"
        self._logger.log(level, "%s; %s", what, more, exc_info=None if is_known else error)


@functools.lru_cache(maxsize=256)
def log_once(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Warn of something, unless this process has done so already."""
    logger.warning(message, *arguments)
