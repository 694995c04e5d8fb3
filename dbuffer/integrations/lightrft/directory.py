"""A store for the length of one job, in shared memory."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
import threading
import weakref
from pathlib import Path
from types import FrameType

from dbuffer.errors import StoreAccessError
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a directory of our own there
_PREFIX = "dbuffer-lightrft-"
_STORE = "store"


class JobDirectory:
    """A private directory, which is removed with the last of the ranks that use it.

    A rank leaves it with this object, at its process's exit, or at a ``SIGTERM`` that would end the
    process with no clean-up. For that a handler is installed where there is none, in the main
    thread only; it removes the directory and lets the signal do what it would have done. A handler
    that is there already is left alone, and decides how the process ends.

    A process that is killed leaves it behind, and the memory that is in it: so its lock tells
    whether anybody in it lives, and the next of the same user on this machine removes it.

    Args:
        store: the :attr:`store` of the rank that has made the directory, to enter it before there
            is a store in it; None: make a new one.

    Raises:
        OSError: it cannot be made, or is not there, since that rank is on another machine.
    """

    def __init__(self, store: Path | None = None) -> None:
        path = _make() if store is None else store.parent
        lock = _open(path)
        if not filesystem.try_lock(lock.number, exclusive=False):
            raise StoreAccessError(f"{path} is being removed by another process")
        self.store = path / _STORE
        """Where a store may be; made by whoever writes it."""
        self.remove = weakref.finalize(self, _leave, path, lock, os.getpid())
        """Leave it now, and remove it if nobody else is in it."""
        _end_with(self)


def _make() -> Path:
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    _remove_left_over(base)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))


def _open(path: Path) -> Descriptor:
    return Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def _leave(path: Path, lock: Descriptor, owner: int) -> None:
    if os.getpid() != owner:  # a child that was forked off it
        return
    # First of all: of two that leave at once, one must find itself the last.
    filesystem.unlock(lock.number)
    if filesystem.try_lock(lock.number, exclusive=True):
        shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_left_over(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or someone else's
            lock = _open(path)
            try:
                # One without a store may be so new that it is not locked yet.
                if (path / _STORE).exists() and filesystem.try_lock(lock.number, exclusive=True):
                    shutil.rmtree(path)
            finally:
                lock.close()


_entered: weakref.WeakSet[JobDirectory] = weakref.WeakSet()
"""What this process is in."""


def _end_with(directory: JobDirectory) -> None:
    _entered.add(directory)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_and_end)
        _not_in_forked_children()


@functools.cache
def _not_in_forked_children() -> None:
    """They have nothing to leave, and no Python code need run for a signal to end them."""
    os.register_at_fork(after_in_child=_uninstall)


def _uninstall() -> None:
    if signal.getsignal(signal.SIGTERM) is _leave_and_end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_and_end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    for directory in list(_entered):
        directory.remove()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
