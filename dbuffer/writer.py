"""`BufferWriter`: the writing side of a `DoubleBuffer`: one writer, claim, commit, recovery.

A publish is: claim the idle buffer (wait for its readers, mark its manifest ``writing``), write
the weights file, commit (manifest ``complete``, then the pointer). Killed anywhere in between, a
writer leaves the pointer on the other buffer, which it never touches; the kernel drops its
locks; the next writer finds the idle buffer marked ``writing`` and starts it anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dbuffer import filesystem
from dbuffer.buffer import (
    MANIFEST_FILE,
    POINTER_FILE,
    RECEIVERS_DIRECTORY,
    SCRATCH_DIRECTORY,
    WRITER_FILE,
    WRITER_LOCK_FILE,
    DoubleBuffer,
    other_buffer,
)
from dbuffer.errors import (
    DBufferError,
    StoreAccessError,
    StoreCorruptError,
    StoreFormatError,
    StoreNotFoundError,
    VersionError,
    WriterActiveError,
    WriterSupersededError,
)
from dbuffer.filesystem import Descriptor, os_errors
from dbuffer.manifest import (
    BUFFERS,
    MAX_INTEGER,
    Manifest,
    Pointer,
    ReceiverRecord,
    Record,
    WriterRecord,
    encode,
    is_part_of,
)
from dbuffer.retirement import RetiredFiles

logger = logging.getLogger(__name__)

FORGET_RECEIVERS_AFTER_S = 7 * 24 * 3600.0
"""Records of receivers that did not update them for so long go when a writer starts."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The idle buffer, locked and marked as being written."""

    buffer: str
    path: Path
    file: Descriptor
    is_new: bool
    """The file was made for this claim; its layout is yet to be written."""
    marked: Manifest


class BufferWriter:
    """Holds the writer's lock of a store from construction to :meth:`close`.

    A mirror gives the ``history`` of the store whose versions it writes.

    Raises:
        WriterActiveError: another writer has the store.
        StoreInsecureError, StoreAccessError: the directory cannot be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durable: bool,
        reader_timeout_s: float,
        allow_shared_store: bool,
        history: str | None = None,
    ) -> None:
        self.store = DoubleBuffer(root, allow_shared_store=allow_shared_store)
        self.root = self.store.root
        self._reader_timeout_s = reader_timeout_s
        self._owner_only = not allow_shared_store
        filesystem.make_directory(self.root, parents=True)
        self.store.check()
        for name in (SCRATCH_DIRECTORY, *BUFFERS, RECEIVERS_DIRECTORY):
            filesystem.make_directory(self.root / name)
        self.mount = self.store.mount
        # Other hosts see what was flushed, and nothing else.
        self._sync = durable or self.mount.is_network
        self._files: dict[Path, Descriptor] = {}
        self._open_files = filesystem.open_files_for(self.root)
        self._retired = RetiredFiles(self._live_receivers, reader_timeout_s, self._let_go)
        self._generation = 0
        self._lock = self._take_writer_lock()
        try:
            self.record = self._recover(history)
        except BaseException:
            self._lock.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the lock is held, by this very process."""
        return self._lock.is_open

    def close(self) -> None:
        """Give the store up. The last version stays published."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._open_files is not None:
            self._open_files.close()
        self._lock.close()

    def next_version(self, version: int | None) -> int:
        """The version to publish: ``version`` if that goes up, else one above the last.

        Raises:
            VersionError: ``version`` is no version, or not above the last one.
        """
        last = self._last_version()
        if version is None:
            version = last + 1
        if isinstance(version, bool) or not isinstance(version, int) or version > MAX_INTEGER:
            raise VersionError(f"a version is an integer below 2**63, not {version!r:.80}")
        if version <= last:
            raise VersionError(
                f"version {version} is not above version {last}, the last one in {self.root}; "
                "versions only go up (put a trainer's step in the metadata)"
            )
        return version

    def claim(self, version: int, *, layout_xxh3: str | None, file_bytes: int) -> Claim:
        """Lock the idle buffer and mark it as being written.

        The buffer's file is rewritten if it has this layout already and nobody reads it;
        otherwise it is unlinked, which leaves the bytes to those who still map them, and a new
        one of ``file_bytes`` is made (of no size yet, if that is 0). On a network mount the file
        is a new one always, of no size, and the old one goes when nobody reads it any more.

        Raises:
            StoreFullError: there is no room for a new file.
            WriterSupersededError: another writer took the store over.
        """
        self._check_not_superseded()
        buffer = self._idle_buffer()
        old = self._readable_manifest(buffer)
        file = None
        if old is not None and not self.mount.is_network:
            file = self._lock_existing(buffer, old)
        if file is not None and not self._can_rewrite(file, old, layout_xxh3, file_bytes):
            self._forget(file)
            file = None
        # Counted on from our own last one too: the record that held it may be damaged by now.
        self._generation = generation = max(self._generation, self._last_generation()) + 2
        name = f"weights-{self.record.run}-{generation}.td"
        if file is not None and old is not None:
            name = old.file
        marked = Manifest(
            state="writing", version=version, generation=generation, run=self.record.run, file=name
        )
        self._put(self.root / buffer / MANIFEST_FILE, marked)
        path = self.root / buffer / name
        is_new = file is None
        if file is None:
            self._put_away(buffer, old, keep=name)
            file = self._create(path, file_bytes)
        return Claim(buffer, path, file, is_new, marked)

    def _put_away(self, buffer: str, old: Manifest | None, *, keep: str | None) -> None:
        """Remove a buffer's old files; on a network mount, those that nobody needs any more."""
        if not self.mount.is_network:
            self._remove_unnamed_files(buffer, keep=keep)
            return
        if old is not None:
            for path in self._files_of(buffer, old.file):
                if _was_never_published(old):
                    self._let_go(path)
                    path.unlink(missing_ok=True)
                else:
                    self._retired.add(path, old.version)
        # And what a publish left that failed between its mark and this.
        self._retire_unnamed_files(buffer, keep=keep)
        self._retired.remove_unneeded()

    def _retire_unnamed_files(self, buffer: str, *, keep: str | None) -> None:
        kept = self._files_of(buffer, keep)
        for path in (self.root / buffer).glob("weights-*.td"):
            if path not in kept:
                self._retired.add(path, None)

    def commit(self, claim: Claim, complete: Manifest) -> None:
        """Make the claimed buffer the newest version, in the one step of moving the pointer.

        ``complete`` describes the file; its state, generation and run are set here.

        Raises:
            WriterSupersededError: another writer took the store over. Nothing was published.
            StoreFullError, StoreAccessError: a flush or write failed. Nothing was published.
        """
        if self._sync:
            filesystem.sync_file(claim.file.number, claim.path)
        complete = dataclasses.replace(
            complete,
            state="complete",
            generation=claim.marked.generation + 1,
            run=self.record.run,
            is_final=not self.mount.can_rewrite_in_place,
        )
        directory = self.root / claim.buffer
        # A writer that was paused or cut off learns here that it has a successor, before it
        # writes over that one's manifest, and once more before the flip. A successor that comes
        # between a check and the line after it is not seen.
        self._check_not_superseded()
        self._put(directory / MANIFEST_FILE, complete)
        self._check_not_superseded()
        pointer = Pointer(
            version=complete.version,
            buffer=claim.buffer,
            generation=complete.generation,
            run=complete.run,
        )
        # Unlocked first: a receiver that is woken by the pointer finds the file free.
        filesystem.unlock(claim.file.number)
        self._put(self.root / POINTER_FILE, pointer)
        self._retired.note_newest()
        if self.mount.is_network:
            self._read_back(pointer, complete, claim.path)
            self._retired.remove_unneeded()

    def _read_back(self, pointer: Pointer, complete: Manifest, path: Path) -> None:
        """See what other hosts see: caches and successors may have it otherwise.

        Raises:
            WriterSupersededError: another writer has published since.
            StoreAccessError: the filesystem does not give back what was written.
        """
        self._check_not_superseded()
        with os_errors("read back", path):
            size = path.stat().st_size
        found = self.store.pointer(), self.store.manifest(pointer.buffer), size
        if found != (pointer, complete, complete.file_bytes):
            raise StoreAccessError(
                f"{self.root} does not give back version {pointer.version} as it was written: "
                f"{found!r:.400}; is it a mount that all hosts see alike?"
            )

    def abandon(self, claim: Claim) -> None:
        """Drop a claim that failed. Its buffer stays marked, and is started anew next time."""
        self._forget(claim.file)
        # Half a version takes room and is of no use. One that failed in the commit is whole, and
        # may be published already.
        with contextlib.suppress(DBufferError, OSError):
            if self.store.manifest(claim.buffer) == claim.marked:
                for path in self._files_of(claim.buffer, claim.path.name):
                    path.unlink(missing_ok=True)

    def _take_writer_lock(self) -> Descriptor:
        lock = _try_writer_lock(self.root)
        if lock is None:
            holder = self._readable_writer()
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise WriterActiveError(
                f"{who} has {self.root} open for writing; a store has one sender at a time: "
                "close that one, or use another directory"
            )
        return lock

    def _recover(self, history: str | None) -> WriterRecord:
        """Begin an epoch, and clear away what dead writers and receivers left behind."""
        before = self._readable_writer()
        self._generation = self._last_generation()
        run = secrets.token_hex(8)
        record = WriterRecord(
            epoch=before.epoch + 1 if before else 1,
            run=run,
            history=history or (before.history if before else run),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=time.time(),
        )
        self._put(self.root / WRITER_FILE, record)
        filesystem.remove_stale_temporaries(self.root / SCRATCH_DIRECTORY)
        for buffer in BUFFERS:
            self._clear_away(buffer)
        self._forget_old_receivers()
        return record

    def _clear_away(self, buffer: str) -> None:
        """Remove the weights files of dead writers."""
        manifest = self._readable_manifest(buffer)
        keep = manifest.file if manifest else None
        if not self.mount.is_network:
            self._remove_unnamed_files(buffer, keep=keep)
            return
        self._retire_unnamed_files(buffer, keep=keep)

    def _put(self, path: Path, record: Record) -> None:
        scratch = self.root / SCRATCH_DIRECTORY
        filesystem.replace_file(
            path, encode(record), scratch=scratch, durable=self._sync, open_files=self._open_files
        )

    def _check_not_superseded(self) -> None:
        record = self.store.writer()
        if record is None:
            raise StoreNotFoundError(f"the store at {self.root} was removed; make a new sender")
        if record.run != self.record.run:
            raise WriterSupersededError(
                f"process {record.pid} on {record.host} took {self.root} over; this sender must "
                "stop (was writer.lock removed by hand, or this host cut off?)"
            )

    def _idle_buffer(self) -> str:
        pointer = self._readable_pointer()
        if pointer is not None:
            return other_buffer(pointer.buffer)
        if self._was_nothing_published():
            # What a dead writer began: it must not come to light as the older of two versions.
            return BUFFERS[1]
        # With no pointer to go by, spare the buffer that may hold the newest version.
        newest = max(BUFFERS, key=lambda buffer: self._version_in(buffer))
        return other_buffer(newest)

    def _last_version(self) -> int:
        pointer = self._readable_pointer()
        if pointer is not None:
            return pointer.version
        manifests = [self._readable_manifest(buffer) for buffer in BUFFERS]
        complete = [found.version for found in manifests if found and found.state == "complete"]
        if None in manifests and not (self.root / POINTER_FILE).exists():
            # The first version of all: its writer died before it moved the pointer.
            return max(complete, default=1) - 1
        return max(complete, default=0)

    def _was_nothing_published(self) -> bool:
        first, second = (self.root / buffer / MANIFEST_FILE for buffer in BUFFERS)
        return not (self.root / POINTER_FILE).exists() and not (first.exists() and second.exists())

    def _version_in(self, buffer: str) -> int:
        manifest = self._readable_manifest(buffer)
        return manifest.version if manifest and manifest.state == "complete" else 0

    def _last_generation(self) -> int:
        records = [self._readable_pointer(), *map(self._readable_manifest, BUFFERS)]
        return max((record.generation for record in records if record), default=0)

    def _readable_pointer(self) -> Pointer | None:
        try:
            return self.store.pointer()
        except StoreFormatError:
            raise  # a newer dbuffer wrote it: not damage, and not ours to replace
        except StoreCorruptError as error:
            logger.warning("ignoring a damaged pointer, the next publish replaces it: %s", error)
            return None

    def _readable_manifest(self, buffer: str) -> Manifest | None:
        try:
            return self.store.manifest(buffer)
        except StoreFormatError:
            raise
        except StoreCorruptError as error:
            logger.warning("ignoring a damaged manifest, the next publish replaces it: %s", error)
            return None

    def _readable_writer(self) -> WriterRecord | None:
        try:
            return self.store.writer()
        except StoreFormatError:
            raise
        except StoreCorruptError as error:
            logger.warning("ignoring a damaged writer record: %s", error)
            return None

    def _can_rewrite(
        self, file: Descriptor, old: Manifest | None, layout_xxh3: str | None, file_bytes: int
    ) -> bool:
        return (
            self.mount.can_rewrite_in_place
            and old is not None
            and old.state == "complete"
            and old.layout_xxh3 == layout_xxh3
            and old.file_bytes == file_bytes
            # A file that someone cut short would be a SIGBUS.
            and os.fstat(file.number).st_size == file_bytes
        )

    def _lock_existing(self, buffer: str, manifest: Manifest) -> Descriptor | None:
        """The buffer's file, locked against readers; None if there is none, or readers hold on.

        A reader that outlasts the time-out keeps the bytes it maps: the buffer moves to a new
        file. It is told that it was evicted when it compares generations.
        """
        path = self.root / buffer / manifest.file
        file = self._open_again(path)
        if file is None:
            return None
        if not filesystem.lock_within(file.number, self._reader_timeout_s):
            logger.warning(
                "evicting %s from buffer %s of %s (version %d): held for more than %g s",
                self._holders(manifest.version) or "a reader",
                buffer,
                self.root,
                manifest.version,
                self._reader_timeout_s,
            )
            self._forget(file)
            return None
        return file

    def _open_again(self, path: Path) -> Descriptor | None:
        """The file now at ``path``, open since an earlier publish where it still is the same."""
        known = self._files.get(path)
        try:
            if known is not None and os.path.samestat(os.fstat(known.number), path.stat()):
                return known
            if known is not None:
                self._forget(known)
            file = Descriptor(filesystem.open_regular(path, os.O_RDWR, owner_only=self._owner_only))
        except FileNotFoundError:
            return None
        except StoreCorruptError as error:
            logger.warning("making a new weights file: %s", error)
            return None
        self._files[path] = file
        return file

    def _create(self, path: Path, num_bytes: int) -> Descriptor:
        # Over NFS, a page that is written in part is read first if it may be read at all.
        access = os.O_WRONLY if self.mount.is_network else os.O_RDWR
        flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os_errors("make a buffer", path):
            file = Descriptor(os.open(path, flags, 0o600))
        try:
            if self.mount.is_network:
                filesystem.check_room(path, num_bytes)
            else:
                filesystem.try_lock(file.number, exclusive=True)
                if num_bytes:
                    filesystem.allocate(file.number, num_bytes, path)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._files[path] = file
        return file

    def _let_go(self, path: Path) -> None:
        """Close a file that was kept open so that no host holds up its removal; see `OpenFiles`."""
        if (file := self._files.get(path)) is not None:
            self._forget(file)

    def _forget(self, file: Descriptor) -> None:
        self._files = {path: known for path, known in self._files.items() if known is not file}
        file.close()

    def _remove_unnamed_files(self, buffer: str, *, keep: str | None) -> None:
        kept = self._files_of(buffer, keep)
        for path in (self.root / buffer).glob("weights-*.td"):
            is_ours = path.is_symlink() or not path.is_dir()  # we make no directories here
            if path not in kept and is_ours:
                if path in self._files:
                    self._forget(self._files[path])
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _files_of(self, buffer: str, file: str | None) -> list[Path]:
        """A weights file of a buffer, and its parts."""
        if file is None:
            return []
        directory = self.root / buffer
        parts = [path for path in directory.glob("weights-*.td") if is_part_of(path.name, file)]
        return [directory / file, *parts]

    def _live_receivers(self) -> list[ReceiverRecord]:
        return [r for r in self.store.receivers() if process_may_live(r.host, r.pid)]

    def _holders(self, version: int) -> str:
        return ", ".join(
            f"receiver {record.receiver} (pid {record.pid}, {record.host})"
            for record in self._live_receivers()
            if record.held_version == version
        )

    def _forget_old_receivers(self) -> None:
        for record in list(self.store.receivers()):
            is_here = record.host == socket.gethostname()
            if is_here and process_may_live(record.host, record.pid):
                continue
            if time.time() - record.updated_at > FORGET_RECEIVERS_AFTER_S:
                path = self.root / RECEIVERS_DIRECTORY / f"{record.receiver}.json"
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def writer_lock(root: Path) -> Iterator[None]:
    """Keep senders out of a store for a ``with`` block.

    Raises:
        WriterActiveError: one has it open.
    """
    lock = _try_writer_lock(root)
    if lock is None:
        raise WriterActiveError(f"a sender has {root} open for writing; give another directory")
    try:
        yield
    finally:
        lock.close()


def _try_writer_lock(root: Path) -> Descriptor | None:
    path = root / WRITER_LOCK_FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os_errors("open the writer's lock", path):
        lock = Descriptor(os.open(path, flags, 0o600))
        if filesystem.try_lock_if_any(lock.number, path):
            return lock
    lock.close()
    return None


def _was_never_published(manifest: Manifest) -> bool:
    """Whether the file that a manifest names was made for a version that did not come about."""
    own = f"weights-{manifest.run}-{manifest.generation}.td"
    return manifest.state == "writing" and manifest.file == own


def process_may_live(host: str, pid: int) -> bool:
    """Whether a process may be alive; that of another host always may."""
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    except OverflowError:  # a number that is no process id here
        return False
    return True
