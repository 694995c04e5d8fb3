"""`Publisher`: one thread at a time publishes with it or closes it, and no forked child does.

A writer that was closed in the middle of a publish would write into whatever file has got its
descriptor's number since; a lock that was held during a fork is never released in the child.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

from dbuffer.errors import StoreBusyError
from dbuffer.format.layout import Layout
from dbuffer.publish.publication import Publication
from dbuffer.runtime.closing import Closing, ProcessBound


class Publisher(Closing, ProcessBound, ABC):
    """What all senders are: a writer, closed for good when its ``with`` block is left."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: a callback in a publish, or a signal handler on top of it, may come here too.
        self._lock = threading.RLock()
        self._publishing_thread: int | None = None
        self._must_close = False
        names = ("versions", "bytes", "deltas", "delta_bytes", "publish_s")
        self._stats = dict.fromkeys(names, 0.0)

    @property
    def stats(self) -> dict[str, float]:
        """Versions and their bytes, deltas and theirs, seconds that publishing took."""
        return dict(self._stats)

    def _note(
        self, started: float, version: int, layout: Layout, delta_bytes: int | None
    ) -> Publication:
        """Count a version in, which took since ``started``, by `time.monotonic`."""
        publication = Publication.of(version, layout, started, delta_bytes)
        self._stats["versions"] += 1
        self._stats["bytes"] += publication.num_bytes
        self._stats["publish_s"] += publication.duration_s
        if delta_bytes is not None:
            self._stats["deltas"] += 1
            self._stats["delta_bytes"] += delta_bytes
        return publication

    @abstractmethod
    def _check_open(self) -> None:
        """Raise a `ClosedError` where it is closed, or this is a forked child."""

    @abstractmethod
    def _close(self) -> None:
        """Close it, for good; called once at least."""

    @property
    def _is_publishing(self) -> bool:
        """Whether a publish is under way; with the lock held, in this very thread."""
        return self._publishing_thread is not None

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Publish in a ``with`` block, when those of other threads are over.

        Raises:
            ClosedError: before anything is waited for, and after.
            StoreBusyError: this very thread is in the middle of a publish.
        """
        self._check_open()
        with self._lock:
            if self._is_publishing:
                raise StoreBusyError("this thread is already publishing with this sender")
            self._publishing_thread = threading.get_ident()
            try:
                self._check_open()
                yield
            finally:
                self._publishing_thread = None
                if self._must_close:
                    self._close()

    def close(self) -> None:
        """Give the store up, after the publish under way. The last version stays published."""
        if self._pid != os.getpid():  # nobody publishes here, and who had the lock is not here
            self._close()
            return
        with self._lock:
            if self._is_publishing:
                self._must_close = True  # this very thread: when it ends
            else:
                self._close()
