"""`Watcher`: wakes a thread when a store's version pointer, or another file, changes.

An event is only a hint. A waiting thread also wakes after a poll interval, and always reads the
version pointer itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from pathlib import Path

from watchdog.events import (
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import BaseObserver
from watchdog.observers.inotify import InotifyEmitter

from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store.medium import medium_of

logger = logging.getLogger(__name__)


def _setting(changed: threading.Event, name: str) -> type[InotifyEmitter]:
    """Return an inotify emitter that sets ``changed`` when the file ``name`` is made or replaced.

    The thread that reads from inotify sets the event, and not watchdog's dispatcher thread: in an
    engine's process, a switch to one more thread may take milliseconds.
    """

    class Emitter(InotifyEmitter):
        def queue_event(self, event: FileSystemEvent) -> None:
            for path in (event.src_path, event.dest_path):
                if name == os.path.basename(os.fsdecode(path)):  # noqa: PTH119
                    changed.set()

    return Emitter


class Watcher(ProcessBound):
    """Watches a directory for a file that is made or replaced.

    On a network mount, or if no inotify watch or thread is available, :meth:`wait` only sleeps. If
    the directory is made or replaced later, :meth:`wait` begins to watch the new directory.
    """

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__()
        self._directory = directory
        self._name = name
        self._changed = threading.Event()
        self._observer: BaseObserver | None = None
        self._watched: tuple[int, int] | None = None
        self._watch_from = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait until the file may have changed since the last call; return False on time-out."""
        self._follow_directory()
        return wait_and_clear(self._changed, timeout_s)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._stop()
        self._watch_from = math.inf
        self.wake()

    def _follow_directory(self) -> None:
        """Watch the directory at the path, unless this directory is watched already."""
        try:
            status = self._directory.stat()
        except OSError:  # the caller gets the error when it reads the pointer
            return
        identity = (status.st_dev, status.st_ino)
        # A new directory may get the inode of a removed one. So also check whether watchdog's
        # emitter has ended, as it does when its directory is removed.
        is_unwatched = identity != self._watched or self._has_ended()
        if is_unwatched and time.monotonic() >= self._watch_from:
            self._stop()
            self._watched = identity if self._start() else None
            # Wake the waiter: a change before the watch began caused no event.
            self._changed.set()

    def _start(self) -> bool:
        directory = self._directory
        medium = medium_of(directory)
        if medium.reaches_other_hosts:
            logger.info("%s is on %s: polling, no inotify", directory, medium.filesystem)
            self._watch_from = math.inf
            return False
        observer: BaseObserver | None = None
        try:
            observer = BaseObserver(_setting(self._changed, self._name))
            changes = [FileCreatedEvent, FileMovedEvent]
            handler = FileSystemEventHandler()  # gets no events; see `_setting`
            observer.schedule(handler, str(directory), event_filter=changes)
            observer.start()
        except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no more threads
            if observer is not None:
                observer.stop()  # ends the thread that it has started
            if not isinstance(error, FileNotFoundError):  # the directory was removed meanwhile
                log_once(logger, "no inotify for %s (%s): polling", directory, str(error))
                self._watch_from = time.monotonic() + TIMING.inotify_retry_s
            return False
        self._observer = observer
        self._dropped = weakref.finalize(self, _stop_dropped, observer, self._pid)
        self._dropped.atexit = False
        return True

    def _has_ended(self) -> bool:
        return self._observer is not None and not all(
            emitter.is_alive() for emitter in self._observer.emitters
        )

    def _stop(self) -> None:
        if self._is_inherited:
            # Don't remove the kernel's watch: the parent process shares it, and would lose it.
            self._observer = self._watched = None
        if self._observer is not None:
            self._dropped.detach()
            self._observer.stop()
            self._observer.join()
            self._observer = None
            self._watched = None


def _stop_dropped(observer: BaseObserver, pid: int) -> None:
    if pid == os.getpid():
        # Stop it in another thread: the garbage collector may call this function while this thread
        # has watchdog's locks.
        with contextlib.suppress(RuntimeError):  # no more threads
            threading.Thread(target=observer.stop, daemon=True).start()


def wait_and_clear(event: threading.Event, timeout_s: float) -> bool:
    if not event.wait(timeout_s):
        return False  # without clearing it: another thread may be setting it
    event.clear()
    return True
