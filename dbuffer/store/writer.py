"""`BufferWriter`: the one writer of a store, which claims buffers and commits versions.

A publish has three steps. The writer claims the idle buffer: it waits for the buffer's readers and
marks the manifest ``writing``. It writes the weights file. It commits: it marks the manifest
``complete`` and then moves the version pointer. Only :meth:`BufferWriter.commit` makes a version
visible.

If the writer is killed before the pointer moves, the pointer still names the other buffer, which is
intact. The kernel drops the writer's locks. The next writer finds the idle buffer marked
``writing`` and overwrites it. `retention` says which files a writer removes, and when.

On a local mount where files can be rewritten in place, each buffer has one weights file, and each
version in the buffer overwrites it. The writer first locks the file, so it waits for readers. A
version gets a new file if the layout changed, if readers are evicted, or if the sender keeps
versions. On all other mounts, each version gets a new file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dbuffer.errors import (
    ClosedError,
    DBufferError,
    StoreAccessError,
    StoreBusyError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
    VersionError,
)
from dbuffer.format import places
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import MAX_RUNS, Lineage, Run, VersionId
from dbuffer.format.manifest import (
    FILE_FIELDS,
    Manifest,
    Pointer,
    Record,
    WriterRecord,
    encode,
)
from dbuffer.runtime.trouble import TranslatedErrors
from dbuffer.store import filesystem, kept
from dbuffer.store.buffer import (
    Contents,
    DoubleBuffer,
    parts_of,
    pointer_to,
    require_own_directory,
)
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.liveness import owner_fields
from dbuffer.store.open_version import OpenStoreVersion, Patience
from dbuffer.store.retention import Retention

logger = logging.getLogger(__name__)

_CLEAR_UP_S = 10.0
_QUIET_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Idle buffer into which a version is being written. On a local mount its file is locked."""

    buffer: str
    path: Path
    file: Descriptor | None
    """Weights file, or None if the version has no new file: it uses the file of an earlier version
    (its anchor), or a kept version's file (`republish`)."""
    marked: Manifest
    earlier: VersionId | None
    deltas: dict[Path, int] = field(default_factory=dict)

    @property
    def weights(self) -> Descriptor:
        assert self.file is not None  # noqa: S101
        return self.file


class BufferWriter:
    """Writer of a store. It holds the store's writer lock from construction to :meth:`close`.

    A mirror's writer continues the runs (starts of a sender) of the versions that it copies. Any
    other writer begins a new run. The store keeps ``keep`` versions besides the two in its buffers.

    Raises:
        OptionError: the directory holds files that are not a store's.
        StoreBusyError: another writer has the store.
        StoreAccessError: the directory cannot be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durable: bool,
        reader_timeout_s: float,
        allow_shared_store: bool,
        run_name: str | None = None,
        keep: int = 0,
    ) -> None:
        self._keep = keep
        self.store = DoubleBuffer(root, allow_shared_store=allow_shared_store)
        self.root = self.store.root
        filesystem.make_directory(self.root, parents=True, durable=durable)
        require_own_directory(self.root)
        self._make_directories()
        if keep:  # fail now, not at the first publish that needs links
            filesystem.require_second_names(self.root / places.SCRATCH_DIRECTORY)
        self.medium = self.store.medium
        self._sync = durable or self.medium.reaches_other_hosts
        self._open_records: dict[Path, Descriptor | None] = {}
        self._reader_timeout_s = reader_timeout_s
        self._open_files: dict[Path, Descriptor] = {}
        """Open weights files: on a local mount the files that this writer may overwrite, on a
        network mount all files that it made (`replace_file` says why)."""
        self._retention = Retention(self.store, self._open_files, reader_timeout_s, num_kept=keep)
        self._is_shown = not self.medium.reaches_other_hosts
        """Whether the store's directory, which may be new, has been made visible to other hosts."""
        self._generation = 0
        self.written_before: dict[tuple[str, str], float] = {}
        """Time of each receiver's last record before this writer began, keyed by id and token."""
        self._last_number = 0
        """Number of the last version that this writer may have published. The store may have lost
        the version since."""
        # A network mount may lack locks. There a writer detects a second writer by its record.
        path, may_lack_locks = self.root / places.WRITER_LOCK_FILE, self.medium.reaches_other_hosts
        lock = filesystem.take_lock(path, "writer's", may_lack_locks=may_lack_locks)
        if lock is None:
            holder = self.store.undamaged_writer()
            process = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise StoreBusyError(
                f"{process} has {self.root} open for writing; a store has one sender at a time: "
                "close that sender, or use another directory"
            )
        self._lock = lock
        try:
            with os_errors("recover the store", self.root):
                self.record, self._runs = self._recover(run_name)
        except BaseException:
            self._lock.close()
            raise
        # When this writer is closed or dropped, or its program ends, write its token into the lock
        # file. The token shows that the writer ended cleanly (`DoubleBuffer.was_closed`).
        self._note_close = weakref.finalize(self, _note_close, lock, self.record.token)

    @property
    def is_open(self) -> bool:
        return self._lock.is_open

    @property
    def rewrites_files(self) -> bool:
        return self.medium.can_rewrite_in_place and not self._keep

    def close(self) -> None:
        for file in (*self._open_files.values(), *self._open_records.values()):
            if file is not None:
                file.close()
        self._note_close()
        self._lock.close()

    def version(self, number: int) -> Lineage:
        return Lineage(VersionId(self.record.token, number), self._runs)

    def next_version(self, version: int | None) -> int:
        """Return the number of the next version; see :meth:`Contents.next_version`."""
        with os_errors("read", self.root):
            self.store.require_writer(self.record)
            return Contents(self.store).next_version(version, above=self._last_number)

    def claim(
        self, version: Lineage, layout: Layout | None = None, *, with_file: bool = True
    ) -> Claim:
        """Claim the idle buffer: lock it and mark it as being written.

        If versions are kept, first keep the buffer's version. On a local mount, wait for readers of
        the buffer. Once the buffer is marked, remove files that the store no longer needs
        (`Retention.sweep`). If the buffer's file cannot be overwritten, make a new file, and
        allocate all its blocks if the ``layout`` is known. Without ``with_file``, make no file: the
        version uses an earlier version's file.

        Raises:
            StoreFullError: the filesystem has no room for a new file.
            StoreAccessError: other users can now write to the store, so readers would refuse it.
            WriterSupersededError: another writer took the store over.
        """
        self._check_open()
        with os_errors("publish", self.root), contextlib.ExitStack() as undo:
            self.store.require_writer(self.record)
            self._make_directories()
            contents = Contents(self.store)
            buffer = contents.idle_buffer
            old = contents.manifests[buffer]
            if self._keep and old is not None and contents.has_published(old):
                self._keep_version(buffer, old)
            file, name, earlier = None, None, None
            if old is not None:
                file = self._reuse_file(buffer, old, layout if with_file else None)
                if file is not None:
                    undo.callback(self._close_file, self.root / buffer / old.file)
                    name, earlier = old.file, old.id
            # During the wait for readers, another writer may have taken the store over.
            self.store.require_writer(self.record)
            marked = self._mark(buffer, version, contents.last_generation, name)
            path = self.root / buffer / marked.file
            self._retention.sweep(contents.manifests | {buffer: marked}, version)
            if file is None and with_file:
                file = self._make_file(path, 0 if layout is None else layout.file_bytes)
            undo.pop_all()
            return Claim(buffer, path, file, marked, earlier)

    def _keep_version(self, buffer: str, manifest: Manifest) -> None:
        try:
            kept.keep(self.store, buffer, manifest, durable=self._sync)
        except (StoreNotFoundError, VersionError) as error:
            logger.warning("version %d is not kept: %s", manifest.version, str(error))

    def _reuse_file(self, buffer: str, old: Manifest, layout: Layout | None) -> Descriptor | None:
        """Wait for readers of the idle buffer's file, then lock the file and return it.

        Return None if the file cannot be overwritten. Its readers are evicted all the same.
        """
        # Don't wait for readers of a file that is never rewritten, such as an anchor. `Retention`
        # removes the file.
        if self.medium.reaches_other_hosts or old.is_final:
            return None
        path = self.root / buffer / old.file
        file = self._open_file(path)
        if file is None:
            return None
        is_fit = (
            not _has_second_name(file)  # a kept version's file: don't wait for its readers
            and self._lock_against_readers(file, buffer, old.version)
            and self.rewrites_files
            and old.state == "complete"
            and layout is not None
            and (old.layout_xxh3, old.file_bytes) == (layout.xxh3, layout.file_bytes)
            # If another program truncated the file, mapping it would end in a SIGBUS.
            and os.fstat(file.number).st_size == layout.file_bytes
            and not _has_second_name(file)
        )
        if is_fit:
            return file
        self._close_file(path)
        return None

    def _open_file(self, path: Path) -> Descriptor | None:
        before = self._open_files.get(path)
        try:
            if before is not None and filesystem.is_at(before, path):
                return before
            self._close_file(path)
            owner_only = self.store.owner_only
            file = filesystem.open_regular(path, os.O_RDWR, owner_only=owner_only)
        except FileNotFoundError:
            return None
        except StoreCorruptError as error:
            logger.warning(
                "making a new weights file, because the old one cannot be reused: %s", str(error)
            )
            return None
        self._open_files[path] = file
        return file

    def _lock_against_readers(self, file: Descriptor, buffer: str, version: int) -> bool:
        """Wait for a weights file's readers, then lock the file; return False on time-out.

        After a time-out the version gets a new file, and the readers are evicted: they keep the
        bytes that they have mapped, and notice the eviction when they next check the manifest.
        """
        patience_s = self._reader_timeout_s
        quiet_s = min(patience_s, _QUIET_WAIT_S)
        if filesystem.lock_within(file.number, quiet_s):
            return True
        if quiet_s < patience_s:
            message = "waiting up to %g s for %s, which reads version %d of %s"
            logger.info(message, patience_s, self._holders(version), version, self.root)
            if filesystem.lock_within(file.number, patience_s - quiet_s):
                return True
        message = "evicting %s from buffer %s of %s (version %d): read for more than %g s"
        logger.warning(message, self._holders(version), buffer, self.root, version, patience_s)
        return False

    def _holders(self, version: int) -> str:
        holders = ", ".join(
            f"receiver {record.receiver} (pid {record.pid}, {record.host})"
            for record in self.store.readers()
            if record.held is not None and record.held.number == version
        )
        return holders or "a reader"

    def _make_file(self, path: Path, num_bytes: int) -> Descriptor:
        is_remote = self.medium.reaches_other_hosts
        # Open it write-only: with read access, an NFS client would first read each page.
        file = filesystem.make_file(path, os.O_WRONLY if is_remote else os.O_RDWR)
        try:
            if is_remote:
                # Only check for space: some network filesystems cannot allocate blocks in advance.
                filesystem.check_room(path, num_bytes)
            else:
                # Lock it now, before another process learns its name.
                filesystem.try_lock(file.number, exclusive=True)
                if num_bytes:
                    filesystem.allocate(file.number, num_bytes, path)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._open_files[path] = file
        return file

    def _close_file(self, path: Path) -> None:
        if (file := self._open_files.pop(path, None)) is not None:
            file.close()

    def _mark(
        self, buffer: str, version: Lineage, last_generation: int, file: str | None
    ) -> Manifest:
        # Exceed all generations in the store. Also exceed this writer's last claim and its commit
        # (one higher): if their manifest is damaged, the store no longer shows their generations.
        self._generation = generation = max(self._generation, last_generation) + 2
        no_file: dict[str, Any] = dict.fromkeys(FILE_FIELDS, 0)
        no_file |= {"layout_xxh3": None, "checksums_xxh3": None}
        marked = Manifest(
            state="writing",
            id=version.id,
            runs=list(version.runs),
            generation=generation,
            writer=self.record.token,
            file=file or f"weights-{self.record.token}-{generation}.td",
            **no_file,
            is_final=False,
            anchor=None,
            anchor_buffer=None,
            chain=[],
            published_at=0.0,
            metadata={},
        )
        self._put(self.root / buffer / places.MANIFEST_FILE, marked)
        return marked

    def idle_file(self) -> tuple[int, int] | None:
        """Return device and inode of the file that the next version overwrites, or None if none."""
        contents = Contents(self.store)
        buffer = contents.idle_buffer
        manifest = contents.manifests[buffer]
        if manifest is None or not self.rewrites_files:
            return None
        path = self.store.weights_path(buffer, manifest)
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_nlink == 1:  # else a kept version shares the file: it is never rewritten
                return status.st_dev, status.st_ino
        return None

    def add_delta(self, claim: Claim, version: VersionId, chunks: Iterable[bytes]) -> int:
        self._check_open()
        directory = self.root / places.DELTAS_DIRECTORY
        path = self.store.delta_path(version)
        num_bytes = 0
        with os_errors("write a delta", path):
            filesystem.make_directory(directory, durable=self._sync)
            path.unlink(missing_ok=True)  # left by a failed attempt, or by a mirror that died
            try:
                with filesystem.make_file(path, os.O_WRONLY) as file:
                    for chunk in chunks:
                        filesystem.write_at(file.number, num_bytes, chunk)
                        num_bytes += len(chunk)
                    if self._sync:
                        filesystem.sync_file(file.number, path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            claim.deltas[path] = num_bytes
            if self._sync:
                filesystem.sync_directory(directory)
        return num_bytes

    def problem_with(self, files: Mapping[Path, int]) -> str | None:
        """Return why readers could not open one of these files, or None if they can open all.

        ``files`` has the expected size of each file.
        """
        try:
            for directory in {path.parent for path in files}:
                with os_errors("look into", directory):
                    filesystem.refresh(directory)
            for path, num_bytes in files.items():
                filesystem.check_file(path, num_bytes, owner_only=self.store.owner_only)
        except (StoreNotFoundError, StoreCorruptError, StoreAccessError) as error:
            return str(error)
        return None

    def commit(self, claim: Claim, **described: Any) -> Manifest:
        """Make the claimed buffer the newest version, by moving the version pointer atomically.

        ``described`` are the manifest's fields that describe the weights file. Return the manifest.

        Raises:
            WriterSupersededError: another writer took the store over.
            StoreFullError, StoreAccessError: a flush or write failed, or the version cannot be read
                back. Nothing was published, unless the message says that the version is published.
            ClosedError: this writer is closed. Nothing was published.
        """
        self._check_open()
        complete = replace(
            claim.marked,
            state="complete",
            generation=claim.marked.generation + 1,
            **{"published_at": time.time(), "is_final": not self.rewrites_files} | described,
        )
        pointer = pointer_to(claim.buffer, complete)
        with os_errors("publish", self.root):
            if self._sync and claim.file is not None:
                filesystem.sync_file(claim.file.number, claim.path)
            # A writer that was suspended or cut off finds out here if another writer has taken
            # over: before it overwrites that writer's manifest, and again before the flip. A
            # takeover between a check and the line after the check is not detected.
            self.store.require_writer(self.record)
            self._put(self.root / claim.buffer / places.MANIFEST_FILE, complete)
            self.store.require_writer(self.record)
            # Unlock first: a receiver that the pointer wakes must find the file unlocked.
            if claim.file is not None:
                filesystem.unlock(claim.file.number)
            if not complete.is_copy:  # from now on readers may have seen this number
                self._last_number = complete.version
            with self._saying_if_published(pointer):
                self._put(self.root / places.POINTER_FILE, pointer)
                self._retention.note_flip(claim.buffer, complete)
                if not self._is_shown:  # other hosts have now been shown all names
                    filesystem.show_new_names(self.root, self.root.parent)
                    self._is_shown = True
                if self.medium.reaches_other_hosts:
                    sizes = {self.store.weights_path(claim.buffer, complete): complete.file_bytes}
                    self._read_back(pointer, complete, sizes | claim.deltas)
        self._retention.clear_up(pause_s=_CLEAR_UP_S)
        return complete

    def _saying_if_published(self, pointer: Pointer) -> TranslatedErrors:
        """Return a ``with`` block for a flip. Errors say if the version was published anyway."""

        def translate(error: BaseException) -> None:
            if not isinstance(error, OSError | StoreCorruptError):
                return
            is_published = "may be"
            with contextlib.suppress(DBufferError):
                if self.store.undamaged_pointer() != pointer:
                    return
                is_published = "is"
            kind = StoreFullError if isinstance(error, StoreFullError) else StoreAccessError
            raise kind(
                f"version {pointer.version} {is_published} published, but some hosts may be unable "
                f"to read it, and a power cut may undo it: {error}"
            ) from error

        return TranslatedErrors(translate)

    @contextlib.contextmanager
    def open_kept(self, version: int | VersionId) -> Iterator[OpenStoreVersion]:
        """Keep a version of the store, unless it is kept already, and open it for a ``with`` block.

        During the block, no publish drops the version. Afterwards, a publish drops it like any
        other kept version.
        """
        self._check_open()
        with os_errors("publish", self.root):
            opened = kept.open_kept(self.store, version, durable=self._sync)
        with opened:
            self._retention.spared = opened.buffer
            try:
                yield opened
            finally:
                self._retention.spared = None

    def republish(
        self, opened: OpenStoreVersion, number: int, metadata: dict[str, Any]
    ) -> Manifest:
        """Publish a kept version's weights file as a new version, by a hard link to the file."""
        claim = self.claim(self.version(number), with_file=False)
        try:
            for part in parts_of(opened.path):
                if self._sync:  # its sender may not have flushed it
                    with os_errors("flush", part):
                        file = filesystem.open_regular(part, os.O_RDONLY, owner_only=False)
                    with file:
                        filesystem.sync_file(file.number, part)
                suffix = part.name[len(opened.path.stem) :]
                filesystem.link(part, claim.path.with_name(claim.path.stem + suffix))
            described = opened.manifest.of_file | {"is_final": True, "metadata": metadata}
            return self.commit(claim, **described)
        except BaseException:
            self.abandon(claim)
            raise

    def _read_back(self, pointer: Pointer, complete: Manifest, sizes: dict[Path, int]) -> None:
        """Read pointer, manifest and file sizes back; raise if they differ from those written."""
        patience = Patience()
        while True:
            try:
                with os_errors("read back", self.root):
                    self.store.require_writer(self.record)
                    sizes_read = {path: path.stat().st_size for path in sizes}
                    read = self.store.pointer(), self.store.manifest(pointer.buffer), sizes_read
                break
            except (StoreNotFoundError, StoreAccessError):
                if not patience.wait(pointer):
                    raise
        if read != (pointer, complete, sizes):
            raise StoreAccessError(
                f"version {pointer.version} of {self.root} was read back, and differs from what "
                f"was written: {read!r:.400}; does the mount show all hosts the same files?"
            )

    def withdraw(self) -> None:
        with os_errors("withdraw versions", self.root):
            manifests = [self.root / buffer / places.MANIFEST_FILE for buffer in places.BUFFERS]
            for path in (self.root / places.POINTER_FILE, *manifests):
                path.unlink(missing_ok=True)

    def abandon(self, claim: Claim) -> None:
        """Give up a claimed buffer after a failure. The next claim fills the buffer again."""
        if claim.file is not None:
            self._close_file(claim.path)
        # Remove the unfinished version's files, which only take space. But if the commit has
        # replaced the manifest, keep them: the version may be published already.
        with contextlib.suppress(DBufferError, OSError):
            if self.store.manifest(claim.buffer) == claim.marked:
                for path in (*parts_of(claim.path), *claim.deltas):
                    path.unlink(missing_ok=True)

    def _recover(self, run_name: str | None) -> tuple[WriterRecord, list[Run]]:
        """Begin a run in a new store, or in a store that an earlier writer left.

        Return the new writer's record, and a list of the new run and the runs that led to it.
        """
        before = self.store.undamaged_writer()
        contents = Contents(self.store)
        self._generation = contents.last_generation
        record = WriterRecord(
            epoch=before.epoch + 1 if before else 1,
            token=secrets.token_hex(8),
            started_at=time.time(),
            **owner_fields(),  # type: ignore[arg-type]  # types differ by field
        )
        self._put(self.root / places.WRITER_FILE, record)
        # From now on, an earlier writer that still lives learns at its next step that it is
        # superseded. Until now it may have published, so read the manifests again.
        self._retention.sweep(Contents(self.store).manifests)
        self._retention.clear_up()
        with contextlib.suppress(DBufferError, OSError):  # `clear_up` has logged it
            self.written_before = {
                (written.receiver, written.token): written.updated_at
                for written in self.store.receivers()
            }
        newest = Contents(self.store).newest
        upon, earlier = (None, []) if newest is None else (newest.id.number, newest.runs)
        run = Run(record.token, run_name, record.host, record.pid, record.started_at, upon)
        return record, [run, *earlier][:MAX_RUNS]

    def _put(self, path: Path, record: Record) -> None:
        self._open_records[path] = self.medium.publish_file(
            path, encode(record), durable=self._sync, before=self._open_records.get(path)
        )

    def _make_directories(self) -> None:
        """Make the store's missing directories. Raise if other users can write to the store."""
        self.store.check()
        for name in (places.SCRATCH_DIRECTORY, *places.BUFFERS, places.RECEIVERS_DIRECTORY):
            filesystem.make_directory(self.root / name)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ClosedError(f"the writer of {self.root} is closed, or is of a parent process")


def _has_second_name(file: Descriptor) -> bool:
    return os.fstat(file.number).st_nlink > 1


def _note_close(lock: Descriptor, token: str) -> None:
    if lock.is_open:
        with contextlib.suppress(OSError):  # the disk may be full
            filesystem.write_at(lock.number, 0, token.encode())
