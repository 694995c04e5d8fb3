"""Operations on files: the only module that flushes, renames, locks and allocates files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
import weakref
from pathlib import Path

from dbuffer.errors import (
    ClosedError,
    DBufferError,
    StoreAccessError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
)
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.runtime.messages import format_bytes
from dbuffer.runtime.timing import doubling
from dbuffer.runtime.trouble import TranslatedErrors, log_once

logger = logging.getLogger(__name__)

MOUNT_VARIABLE = "DBUFFER_MOUNT"
"""Environment variable that overrides the detected type of a mount.

``network`` is for a local disk that other hosts see over a network, ``local`` for a FUSE mount that
only this host uses.
"""

TICK_S = 0.02
"""Pause in seconds before a directory is changed again: longer than a tick of a file server's clock
(10 ms)."""

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

_MFD_CLOEXEC = 1

_STALE_RETRIES = 4
"""Retries after a stale NFS file handle. A file was replaced between its lookup and its read, so
the next lookup finds the new file."""

_FORK_RETRIES = 100
"""Number of times that a file is opened again because another thread forked meanwhile (the child
process may have the file). A fork takes only a few of them. More are needed only if the fork waits
for a lock of the thread that opens the file, and these would never end."""

_TEMPORARY = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9._-]*\.[0-9a-f]{16}\.tmp")
"""Pattern of the names of temporary files and directories: the final name and a random number."""
_STALE_TEMPORARY_S = 60.0
LOCK_PAUSES_S = (0.0005, 0.02)
"""First and longest pause, in seconds, between attempts to lock a file or to open a version that is
being written."""


def real_path(path: Path) -> Path:
    """Resolve a path and its links. The path need not exist."""
    try:
        with os_errors("resolve links", path):
            return path.resolve()
    except RuntimeError as error:  # Python's error for a loop of links
        raise StoreAccessError(f"cannot resolve links at {path}: {error}") from None


def os_errors(action: str, path: Path | str, num_bytes: int = 0) -> TranslatedErrors:
    """Return a ``with`` block that translates an OSError into an error of dbuffer.

    The message names the ``action`` and, on a full disk, the ``num_bytes`` that the action needs.
    """

    def translate(error: BaseException) -> None:
        if isinstance(error, DBufferError) or not isinstance(error, OSError):
            return
        if isinstance(error, FileNotFoundError):
            missing = error.filename or path
            raise StoreNotFoundError(f"cannot {action}: {missing} does not exist") from error
        if error.errno == errno.ESTALE:  # over NFS: another host removed the open file
            raise StoreNotFoundError(f"cannot {action}: {path} is gone") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = f", which needs {_room(Path(path), num_bytes)}" if num_bytes else ""
            raise StoreFullError(
                f"cannot {action}: no room left for {path}{room}; make room on its filesystem"
            ) from error
        owner = ""
        if error.errno == errno.EACCES:
            owner = f" for user {os.geteuid()}; only the user who made a store can use it"
        raise StoreAccessError(f"cannot {action} at {path}: {error.strerror}{owner}") from error

    return TranslatedErrors(translate)


def _room(path: Path, num_bytes: int) -> str:
    with contextlib.suppress(OSError):
        status = os.statvfs(path.parent)
        return f"{format_bytes(num_bytes)} ({format_bytes(status.f_bavail * status.f_frsize)} free)"
    return format_bytes(num_bytes)


def list_matching(directory: Path, pattern: str) -> list[Path]:
    """List the paths in a directory that match a pattern; return [] if it does not exist."""
    with os_errors("list", directory):
        return list(directory.glob(pattern))


def make_directory(path: Path, *, parents: bool = False, durable: bool = False) -> None:
    """Make a directory that only its owner can enter, unless the directory exists.

    ``durable``: flush each directory that got a new entry.
    """
    with os_errors("make the directory", path):
        if path.is_dir():
            return
        made = [new for new in (path, *path.parents) if durable and not new.is_dir()]
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
        for new in made:
            sync_directory(new.parent)


def check_trust(path: Path) -> None:
    with os_errors("look at a store", path):
        status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise StoreAccessError(f"{path} is not a directory, so not a store")
    _check_trusted(status, path)


def _check_trusted(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise StoreAccessError(
            f"{path} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}; "
            "pass allow_shared_store=True (--allow-shared-store) to use it anyway"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # The remedy must not change the mode of /tmp or a mount, which others share.
        is_for_all = status.st_mode & stat.S_ISVTX or path.is_mount()
        remedy = "name a directory below it" if is_for_all else f"run 'chmod go-w {path}'"
        raise StoreAccessError(
            f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); {remedy}, or "
            "pass allow_shared_store=True (--allow-shared-store)"
        )


def open_regular(path: Path, flags: int, *, owner_only: bool = True) -> Descriptor:
    """Open a plain file.

    Raises:
        FileNotFoundError: the file does not exist.
        StoreCorruptError: the path is a link, a directory or a pipe.
        StoreAccessError: ``owner_only`` is set, and another user could have written the file.
    """
    try:
        # O_NONBLOCK: if a pipe has the file's name, opening it must not hang.
        file = Descriptor.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise StoreCorruptError(f"{path} is not a plain file") from None
        raise
    try:
        _check_regular(os.fstat(file.number), path, owner_only=owner_only)
    except BaseException:
        file.close()
        raise
    return file


def _check_regular(status: os.stat_result, path: Path, *, owner_only: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise StoreCorruptError(f"{path} is not a plain file")
    if owner_only:
        _check_trusted(status, path)


def check_file(path: Path, num_bytes: int, *, owner_only: bool) -> None:
    """Raise if a file's size is not ``num_bytes``, or if `open_regular` would refuse the file."""
    with os_errors("look at", path):
        status = path.lstat()
    _check_regular(status, path, owner_only=owner_only)
    if status.st_size != num_bytes:
        raise StoreCorruptError(
            f"{path} has {status.st_size} bytes, but was written with {num_bytes}"
        )


def refresh(directory: Path) -> None:
    """Make this host's NFS client look again at a directory that another host writes to.

    Another host may have replaced a file that a process here still has open. Without this call,
    opening the path can then give the old file for up to a minute (measured with NFSv3 and v4.2).
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def show_new_names(*directories: Path) -> None:
    """Change the directories' times, so that NFSv3 clients look for new names in them again.

    If a directory changes twice within one tick of the server's clock, both changes set the same
    time. A client that looked in between does not notice the second change. So this call waits for
    a tick, and changes the time once more.
    """
    time.sleep(TICK_S)
    for directory in directories:
        with contextlib.suppress(OSError):
            os.utime(directory)


def read_small(path: Path, max_bytes: int, *, owner_only: bool = True) -> bytes:
    """Read a small file. If the file is replaced during the read, read the new file."""
    for num_retries in itertools.count():
        try:
            refresh(path.parent)
            with open_regular(path, os.O_RDONLY, owner_only=owner_only) as file:
                data = os.read(file.number, max_bytes + 1)
            break
        except OSError as error:
            if error.errno != errno.ESTALE or num_retries == _STALE_RETRIES:
                raise
    if len(data) > max_bytes:
        raise StoreCorruptError(f"{path} is larger than {max_bytes} bytes")
    return data


def read_at(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """Read ``num_bytes`` from ``offset``, or fewer at the end of the file."""
    chunks = []
    while num_bytes > 0 and (chunk := os.pread(descriptor, min(num_bytes, 1 << 30), offset)):
        chunks.append(chunk)
        offset += len(chunk)
        num_bytes -= len(chunk)
    return b"".join(chunks)


def read_into(descriptor: int, offset: int, memory: memoryview) -> int:
    """Fill ``memory`` with a file's bytes from ``offset``; return how many bytes were read."""
    done = 0
    while done < memory.nbytes and (
        num_bytes := os.preadv(descriptor, [memory[done:]], offset + done)
    ):
        done += num_bytes
    return done


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


def replace_file(
    path: Path,
    data: bytes,
    *,
    scratch: Path,
    flush: bool = False,
    durable: bool = False,
    lock: bool = False,
    before: Descriptor | None = None,
) -> Descriptor:
    """Put ``data`` at ``path`` atomically: write a temporary file in ``scratch`` and rename it.

    Return the open file. ``flush``: flush the file. ``durable``: flush the file and its directory.
    ``lock``: lock the file exclusively before its rename.

    On a network mount, pass as ``before`` the open file that ``path`` names until now. An NFSv4
    server can delegate a file to a host that reads it, and the file then cannot be replaced while
    that host is cut off, until the server's lease ends (90 s by default). The server delegates no
    file that is open for writing. ``before`` is closed just before the rename, because a removed
    file takes space as long as it is open.
    """
    with os_errors("write", path):
        temporary, file = _open_temporary(scratch, path)
        try:
            write_at(file.number, 0, data)
            if flush or durable:
                os.fsync(file.number)
            if lock:
                try_lock(file.number, exclusive=True)
            if before is not None:
                before.close()
            _rename(temporary, path, file)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        with os_errors("flush", path):
            sync_directory(path.parent)
    return file


def _rename(temporary: Path, path: Path, file: Descriptor) -> None:
    """Rename a finished file, which is still open."""
    try:
        os.replace(temporary, path)
    except FileNotFoundError:
        # An NFS client repeats a request that got no answer. If the server was restarted in
        # between, the repeated rename fails although the first one succeeded.
        refresh(path.parent)  # otherwise an NFS client answers from its cache
        if not is_at(file, path):
            raise


def _temporary_in(scratch: Path, name: str) -> Path:
    # Don't use the process id: in a restarted container, a process may get the id of a dead process
    # that left a file.
    return scratch / f".{name}.{secrets.token_hex(8)}.tmp"


def _open_temporary(scratch: Path, path: Path) -> tuple[Path, Descriptor]:
    temporary = _temporary_in(scratch, path.name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return temporary, Descriptor.open(temporary, flags)


def rename_directory(directory: Path, path: Path) -> None:
    """Rename a directory to ``path`` atomically. If ``path`` exists already, it stays as it is."""
    try:
        with os_errors("rename a directory", path):
            directory.rename(path)
    except OSError:
        if not path.is_dir():
            raise


def link(path: Path, name: Path) -> None:
    with os_errors("give a second name to", path):
        os.link(path, name, follow_symlinks=False)


def require_second_names(scratch: Path) -> None:
    temporary, file = _open_temporary(scratch, Path("name"))
    file.close()
    second = _temporary_in(scratch, "name")
    try:
        link(temporary, second)
    finally:
        temporary.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def rename(path: Path, name: Path) -> None:
    with os_errors("rename", path):
        path.rename(name)


def make_scratch_directory(scratch: Path) -> Path:
    path = _temporary_in(scratch, "directory")
    make_directory(path)
    return path


def remove_stale_temporaries(directory: Path, now_s: float) -> None:
    """Remove this user's temporary files and directories that dead processes left behind.

    ``now_s`` is the time by the clock that sets the files' times. Files of the last minute stay: a
    live process may be about to rename them.
    """
    oldest = now_s - _STALE_TEMPORARY_S
    for path in list_matching(directory, ".*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_ours = _TEMPORARY.fullmatch(path.name) is not None and status.st_uid == os.geteuid()
            if not is_ours or status.st_mtime >= oldest:
                continue
            if stat.S_ISREG(status.st_mode):
                path.unlink()
            elif stat.S_ISDIR(status.st_mode) and path.name.startswith(".directory."):
                shutil.rmtree(path)


def make_file(path: Path, access: int) -> Descriptor:
    """Make a file that only its owner can read or write. ``access`` is a flag of `os.open`."""
    with os_errors("make a file", path):
        return Descriptor.open(path, access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)


def make_memory_file(name: str) -> Descriptor:
    # Not os.memfd_create: a Python that was built with an older libc lacks it.
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.memfd_create(name.encode(), _MFD_CLOEXEC)
    if number < 0:
        raise OSError(ctypes.get_errno(), "cannot make a file in memory")
    return Descriptor(number)


def allocate(descriptor: int, num_bytes: int, path: Path) -> None:
    """Allocate all blocks of a new file: a write to a mapped page without a block raises SIGBUS."""
    with os_errors("allocate a buffer", path, num_bytes):
        os.posix_fallocate(descriptor, 0, num_bytes)


def check_room(path: Path, num_bytes: int) -> None:
    """Raise if the filesystem has too little free space.

    This check is for filesystems that cannot allocate space in advance, such as NFSv3.
    """
    with os_errors("look for room", path, num_bytes):
        status = os.statvfs(path.parent)
        # A filesystem without a disk may report no size.
        if status.f_blocks and status.f_bavail * status.f_frsize < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync_file(descriptor: int, path: Path) -> None:
    with os_errors("flush", path):
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Flush a directory, so that a rename in the directory survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        # SMB and some FUSE mounts cannot flush a directory.
        message = "cannot flush the directory %s: its server decides when renames are durable"
        log_once(logger, message, path)
    finally:
        os.close(descriptor)


def sync_contents(directory: Path) -> None:
    """Flush all files of a directory. Otherwise a power cut may leave files without their bytes."""
    for file in directory.iterdir():
        with file.open("rb") as written:
            sync_file(written.fileno(), file)
    sync_directory(directory)


def touched_at(path: Path) -> float:
    """Return the time of a file's last change, or 0 if the file does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def identity_of(descriptor: int) -> tuple[int, int]:
    """Return the device and inode of an open file. A file that replaces it has other numbers."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def take_lock(path: Path, owner: str, *, may_lack_locks: bool) -> Descriptor | None:
    """Make a lock file, locked until it is closed; return None if another process has the lock.

    On a mount without locks, such as Lustre by default, raise a StoreAccessError. With
    ``may_lack_locks``, return the unlocked file instead: the caller must detect a second owner.
    """
    with os_errors(f"open the {owner} lock", path):
        lock = Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            if try_lock(lock.number, exclusive=True):
                return lock
        except OSError as error:
            if error.errno not in NO_LOCKS or not may_lack_locks:
                raise
            message = "no locks on %s: a second sender is detected, not prevented"
            log_once(logger, message, path)
            return lock
    lock.close()
    return None


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock an open file until it is closed; return False if another descriptor's lock conflicts.

    Raises:
        StoreAccessError: the file cannot be locked, for instance because the mount has no locks.
            The error's ``errno`` is the reason.
    """
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _cannot_lock(descriptor, error) from error
    return True


def _cannot_lock(descriptor: int, error: OSError) -> StoreAccessError:
    path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    advice = ""
    if error.errno in NO_LOCKS:
        advice = (
            "; its mount has no locks (flock), which a store on a local disk needs: use another "
            f"directory, or set {MOUNT_VARIABLE}=network for all processes that use the store"
        )
    refused = StoreAccessError(f"cannot lock {path}: {error.strerror}{advice}")
    refused.errno = error.errno
    return refused


def is_locked(path: Path) -> bool:
    """Whether a process has an exclusive lock on a file; False if the file does not exist."""
    try:
        lock = share_lock(path)
    except StoreNotFoundError:
        return False
    if lock is None:
        return True
    lock.close()
    return False


def share_lock(path: Path) -> Descriptor | None:
    """Take a shared lock on a file; return the open file, or None if it is locked exclusively.

    Raises:
        StoreNotFoundError: the file does not exist.
    """
    while True:
        with os_errors("look for a lock", path):
            file = open_regular(path, os.O_RDONLY, owner_only=False)
            if not try_lock(file.number, exclusive=False):
                file.close()
                return None
            # If another process has replaced the file meanwhile, lock the new file instead.
            if is_at(file, path):
                return file
            file.close()


def was_touched_since(path: Path, since_s: float) -> bool:
    """Whether a file was written or touched since ``since_s``, by the clock of the file's mount."""
    try:
        with os_errors("look at", path):
            refresh(path.parent)
            # Open the file: otherwise an NFS client may report its time from a minute ago.
            with open_regular(path, os.O_RDONLY, owner_only=False) as file:
                return os.fstat(file.number).st_mtime > since_s
    except StoreNotFoundError:  # it was removed just now
        return False


def time_at(scratch: Path) -> float:
    """Return seconds since the epoch, by the clock that sets file times in ``scratch``."""
    temporary, file = _open_temporary(scratch, Path("clock"))
    try:
        with file:
            return os.fstat(file.number).st_mtime
    finally:
        temporary.unlink(missing_ok=True)


def is_at(file: Descriptor, path: Path) -> bool:
    try:
        return file.is_open and os.path.samestat(os.fstat(file.number), path.lstat())
    except OSError:
        return False


def lock_within(descriptor: int, timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` to lock an open file exclusively; return whether it is locked."""
    deadline = time.monotonic() + timeout_s
    pauses_s = doubling(*LOCK_PAUSES_S)
    while not try_lock(descriptor, exclusive=True):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(next(pauses_s), left_s))
    return True


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


class Descriptor(Closing, ProcessBound):
    """Open file that is closed in every forked child, and when its last reference is dropped.

    A forked child that kept the file open would share the file's lock. For instance, a data
    loader's worker that outlives a killed trainer would keep the store locked.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        try:
            # FileIO closes the number, and marks itself as closed, in one call of C. If a signal
            # handler could raise in between, a second close could close a new file of this number.
            self._file = io.FileIO(number)
        except OSError:  # a directory
            os.close(number)
            raise
        self._finalizer = weakref.finalize(self, _close_quietly, self._file)
        _open_descriptors.add(self)

    @classmethod
    def open(cls, path: Path | str, flags: int) -> Descriptor:
        """Open a file so that child processes do not inherit it. ``flags`` are as in `os.open`."""
        for num_retries in itertools.count():
            before = _fork_moment
            file = cls(os.open(path, flags | os.O_CLOEXEC, 0o600))
            is_alone = _fork_moment == before and not _forking
            if is_alone or num_retries == _FORK_RETRIES:
                break
            # Another thread forked meanwhile, and the child may have the file. Open it again.
            file.close()
            flags &= ~os.O_EXCL
        return file

    @property
    def number(self) -> int:
        if not self.is_open:
            raise ClosedError("this file is closed, or was opened by a parent process")
        return self._file.fileno()

    def close(self) -> None:
        if not self._is_inherited:
            # Unlock the file, because closing it may not: a child that was just forked shares the
            # lock until the child first runs and closes its copy of the file.
            with contextlib.suppress(OSError, ValueError):  # the file has no lock, or is closed
                fcntl.flock(self._file, fcntl.LOCK_UN)
        _close_quietly(self._file)
        self._finalizer.detach()

    @property
    def is_open(self) -> bool:
        return not (self._file.closed or self._is_inherited)


def _close_quietly(file: io.FileIO) -> None:
    with contextlib.suppress(OSError):
        file.close()


_open_descriptors: weakref.WeakSet[Descriptor] = weakref.WeakSet()


_forking: set[int] = set()
_fork_moment = 0
"""Number of forks that have begun, plus the number of forks that have ended."""


def _begin_fork() -> None:
    global _fork_moment
    _forking.add(threading.get_ident())
    _fork_moment += 1


def _end_fork() -> None:
    global _fork_moment
    _forking.discard(threading.get_ident())
    _fork_moment += 1


def _close_inherited() -> None:
    _forking.clear()  # other threads' forks end only in the parent
    for descriptor in list(_open_descriptors):
        descriptor.close()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_close_inherited)
