"""`SharedCopy`: a version in memory that all receivers of a host map, and one of them has read.

One process at a time has its *turn*, the lock of a small file in ``/dev/shm``. The first one reads
a version into memory, verifies it, and writes a note into that file; the others find the note, and
map the memory. The memory is a file without a name: the kernel frees it with the last process that
has it open or mapped, and the size of ``/dev/shm`` does not limit it.

Nothing is written into memory that a process has mapped. Each mapping holds a shared lock, and the
next version goes into the same memory only if its exclusive lock is free. A process that dies loses
its turn and its locks. One that stops during its turn is waited for, for a while.

A process that cannot share, for whatever reason, reads by itself: that costs time only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dbuffer.errors import DBufferError
from dbuffer.format.layout import Layout, digest
from dbuffer.format.manifest import Manifest
from dbuffer.io.tensors import FileTensors, map_file, map_locked
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.liveness import Process

logger = logging.getLogger(__name__)

NOTES = Path("/dev/shm")  # noqa: S108 - the files in it are made with care
"""Directory of the notes. It is in memory, so no other host sees it."""

_HASHING_BYTES_S = 1e9
"""Lower bound of the speed at which a version is hashed, which shows no progress."""


class SharedTensors(FileTensors):
    """Mapped tensors of a shared copy; writing into one changes this process's page of it."""

    def read_ahead(self) -> None:
        self._bytes[:: mmap.PAGESIZE].amax()


@dataclass(frozen=True, slots=True)
class _Note:
    """Version in shared memory, and the process that keeps the memory open."""

    identity: str
    layout_xxh3: str
    is_verified: bool
    pid: int
    number: int
    """Number of the memory's descriptor in that process."""
    device: int
    inode: int

    @classmethod
    def read(cls, file: Descriptor) -> _Note | None:
        """Read a note; None: there is none, or its process died while writing it."""
        try:
            return cls(**json.loads(filesystem.read_at(file.number, 0, mmap.PAGESIZE)))
        except (ValueError, TypeError):
            return None

    def open(self, access: int) -> Descriptor | None:
        """Open the memory; None: its process has ended, or has closed it."""
        path = Path(f"/proc/{self.pid}/fd/{self.number}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # Not opened before it is known: any other file may have the number by now.
            if self._is_of(path.stat()):
                file = Descriptor(os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK))
                if self._is_of(os.fstat(file.number)):
                    return file
        return None

    def _is_of(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


class SharedCopy:
    """Access of one process to the copy of a store's versions on this host.

    Args:
        store: the store's directory; receivers share by its path.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        place = digest(os.fsencode(filesystem.real_path(store)))
        # Processes of another PID namespace cannot open this one's memory.
        self._path = NOTES / f"dbuffer-{os.geteuid()}-{Process.here().pid_namespace}-{place}"
        self._memory: Descriptor | None = None
        """Memory that this process has filled, kept open for others."""
        self._is_usable = True

    @contextlib.contextmanager
    def turn(self, manifest: Manifest, layout: Layout) -> Iterator[Turn | None]:
        """Wait for this process's turn to use the copy; None: it is to read by itself."""
        lock = self._take_lock(layout.checksums_offset) if layout.checksums_offset else None
        if lock is None:
            yield None
            return
        with lock:
            turn = Turn(self, lock, manifest, layout)
            try:
                yield turn
            finally:
                turn.end()

    def keep(self, memory: Descriptor | None) -> None:
        """Keep memory open for others, in place of what was kept before."""
        if self._memory is not None:
            self._memory.close()
        self._memory = memory

    def give_up(self, error: Exception) -> None:
        """Read by itself from now on."""
        self._is_usable = False
        log_once(logger, _ALONE, self._store, str(error))

    def close(self) -> None:
        """Remove the note, if it is this process's, or of nobody."""
        with contextlib.suppress(DBufferError, OSError):
            if (lock := self._lock_at_the_end()) is not None:
                with lock:
                    note = _Note.read(lock)
                    if note is None or note.open(os.O_RDONLY) is None or note.pid == os.getpid():
                        self._path.unlink()
        self.keep(None)

    def _lock_at_the_end(self) -> Descriptor | None:
        """Lock the note's file, if there is one.

        The process that keeps the memory waits a while. Others that end at the same moment may
        have locked the file to look at the note: they find the memory still open, and leave it.
        """
        deadline = time.monotonic() + (TIMING.shared_free_s if self._memory is not None else 0.0)
        while self._is_usable and self._path.exists():
            if (lock := self._try_lock()) is not None or time.monotonic() >= deadline:
                return lock
            time.sleep(TIMING.shared_look_s)
        return None

    def _take_lock(self, num_bytes: int) -> Descriptor | None:
        """Lock the note's file; None, logged: it cannot be used, or its owner makes no progress."""
        patience_s = TIMING.shared_stall_s + num_bytes / _HASHING_BYTES_S
        progress, since = 0.0, time.monotonic()
        while self._is_usable:
            try:
                if (lock := self._try_lock()) is not None:
                    return lock
                touched_at = filesystem.touched_at(self._path)
            except (DBufferError, OSError) as error:
                self.give_up(error)
                return None
            if touched_at != progress:
                progress, since = touched_at, time.monotonic()
            elif time.monotonic() - since > patience_s:
                log_once(logger, _STALLED, self._store, f"{patience_s:.0f}", self._path)
                return None
            time.sleep(TIMING.shared_look_s)
        return None

    def _try_lock(self) -> Descriptor | None:
        lock = filesystem.take_lock(self._path, "turn's", may_lack_locks=False)
        if lock is None or not filesystem.is_at(lock, self._path):  # removed before it was locked
            return None
        status = os.fstat(lock.number)
        mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
        if (mode, owner, status.st_nlink) != (0o600, os.geteuid(), 1):
            raise PermissionError(
                f"{self._path} belongs to another user, or others can write to it"
            )
        return lock


_ALONE = (
    "this process reads all of each version of %s by itself: it cannot share memory with others of "
    "this host: %s"
)

_STALLED = (
    "reading a version of %s in this process: the one that reads for all of this host has made no "
    "progress for %s s (it has locked %s)"
)


class Turn:
    """Use of a shared copy by one process, for one version, while no other process has it."""

    def __init__(
        self, copy: SharedCopy, lock: Descriptor, manifest: Manifest, layout: Layout
    ) -> None:
        self._copy, self._lock = copy, lock
        self._manifest, self._layout = manifest, layout
        self._note = _Note.read(lock)
        self._memory: Descriptor | None = None
        """Memory that is being filled."""

    def map(self, *, verified: bool) -> SharedTensors | None:
        """Map the version; None: it is not there, or not ``verified`` with its checksums."""
        note = self._note
        if note is None or note.identity != self._manifest.identity:
            return None
        if verified and not note.is_verified:
            return None
        with self._giving_up_on_error():
            memory = note.open(os.O_RDONLY)
            if memory is None:
                return None
            if note.pid != os.getpid():
                self._copy.keep(None)
            return self._map(memory)
        return None

    def begin(self) -> tuple[FileTensors, str | None] | None:
        """Return memory to fill, and the identity of the version in it; None: there is no room.

        It is the memory that is shared, if no process has it mapped; else new memory, with the same
        contents if there are deltas to apply to them.
        """
        note, manifest = self._note, self._manifest
        with self._giving_up_on_error():
            old = None if note is None else note.open(os.O_RDWR)
            self._copy.keep(None)
            size = self._layout.checksums_offset
            if note is None or old is None or os.fstat(old.number).st_size != size:
                return self._writable(_new_memory(size)), None
            since = note.identity if note.layout_xxh3 == manifest.layout_xxh3 else None
            if filesystem.lock_within(old.number, TIMING.shared_free_s):
                os.ftruncate(self._lock.number, 0)  # from now on it holds neither version
                return self._writable(old), since
            new = self._writable(_new_memory(size))
            if since in manifest.chain:
                new.data.copy_(self._map(old).data)
            return new, since
        return None

    def finish(self, tensors: FileTensors, *, verified: bool) -> FileTensors:
        """Share the memory of :meth:`begin`, which now holds the version, and map it.

        Where it cannot be shared, ``tensors`` are this process's own.
        """
        with self._giving_up_on_error():
            return self._share(verified=verified)
        return tensors

    def _share(self, *, verified: bool) -> SharedTensors:
        memory, manifest = self._memory, self._manifest
        assert memory is not None  # noqa: S101 - after begin()
        assert manifest.layout_xxh3 is not None  # noqa: S101 - it is complete
        filesystem.unlock(memory.number)
        place = os.getpid(), memory.number, *filesystem.identity_of(memory.number)
        note = _Note(manifest.identity, manifest.layout_xxh3, verified, *place)
        own = note.open(os.O_RDONLY)
        assert own is not None  # noqa: S101 - this process has it open
        mapped = self._map(own)
        os.ftruncate(self._lock.number, 0)
        filesystem.write_at(self._lock.number, 0, json.dumps(asdict(note)).encode())
        self._copy.keep(memory)  # once it is noted
        self._memory = None
        return mapped

    def on_bytes(self, _: int) -> None:
        """Show progress to those that wait, after bytes were read."""
        os.utime(self._lock.number)

    def end(self) -> None:
        """Free memory that was begun, and not finished."""
        if self._memory is not None:
            self._memory.close()

    @contextlib.contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except (DBufferError, OSError) as error:
            self._copy.give_up(error)

    def _writable(self, memory: Descriptor) -> FileTensors:
        self._memory = memory
        size = self._layout.checksums_offset
        return FileTensors(map_file(memory.number, size, mmap.ACCESS_WRITE), self._layout)

    def _map(self, memory: Descriptor) -> SharedTensors:
        # The mapping keeps a duplicate of the descriptor, and so the lock.
        if not filesystem.try_lock(memory.number, exclusive=False):
            raise BlockingIOError("shared memory is locked out of turn")
        data = map_locked(memory.number, self._layout.checksums_offset, mmap.ACCESS_COPY)
        memory.close()
        return SharedTensors(data, self._layout)


def _new_memory(num_bytes: int) -> Descriptor:
    """Make a file without a name, with all its pages: a page that lacks room is a SIGBUS."""
    memory = filesystem.make_memory_file("dbuffer")
    os.fchmod(memory.number, 0o600)
    filesystem.allocate(memory.number, num_bytes, Path("memory"))
    return memory
