"""`Turns`: one thread at a time publishes with a writer or closes it, and no forked child does.

A writer that was closed in the middle of a publish would write into whatever file has got its
descriptor's number since; a lock that was held during a fork is never released in the child.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from dbuffer.errors import WriterActiveError


class Turns:
    """Whose turn it is.

    Args:
        check_open: raises where the writer is closed, or this is a forked child.
        close: closes it, for good; called once at least.
    """

    def __init__(self, check_open: Callable[[], None], close: Callable[[], None]) -> None:
        self._check_open = check_open
        self._close = close
        self._pid = os.getpid()
        # Reentrant: a callback in a publish, or a signal handler on top of it, may come here too.
        self._lock = threading.RLock()
        self._is_publishing = False
        self._must_close = False

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish in a ``with`` block, when those of other threads are over.

        Raises:
            ClosedError: what ``check_open`` raises; before anything is waited for, and after.
            WriterActiveError: this very thread is in the middle of a publish.
        """
        self._check_open()
        with self._lock:
            if self._is_publishing:
                raise WriterActiveError("this thread is already publishing with this sender")
            self._is_publishing = True
            try:
                self._check_open()
                yield
            finally:
                self._is_publishing = False
                if self._must_close:
                    self._close()

    def close(self) -> None:
        """Close, after the publish that is under way; from inside of one: when it ends."""
        if self._pid != os.getpid():  # nobody publishes here, and who had the lock is not here
            self._close()
            return
        with self._lock:
            if self._is_publishing:
                self._must_close = True
            else:
                self._close()
