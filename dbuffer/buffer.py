"""`DoubleBuffer`: the two buffers, the version pointer and the locks, as readers see them.

A read is: pointer, weights file, shared lock on that file, manifest. The manifest read *under
the lock* decides. If it still is the one that the pointer names, no writer has begun to rewrite
the file, and none that respects the lock will while it is held. Every weights file is its own
lock, so a file that is replaced needs no lock taken over: the old one goes with the old file.

A reader that cannot trust locks compares generations: :meth:`DoubleBuffer.is_unchanged` after
the last byte was read tells whether a writer has begun since.

On a network mount there are no locks that all can trust, and each version has a file of its own,
which is never written again. There a reader says in its record what it is about to read, and then
looks at the manifest once more; a writer takes the manifest away, and then looks at the records
before it removes a file. Whichever is first, one of them sees the other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dbuffer import filesystem
from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
    VersionRegressedError,
)
from dbuffer.filesystem import Descriptor, Mount, os_errors
from dbuffer.layout import Layout, digest
from dbuffer.manifest import (
    BUFFERS,
    MAX_RECORD_BYTES,
    Manifest,
    Pointer,
    ReceiverRecord,
    RecordT,
    WriterRecord,
    decode,
)

logger = logging.getLogger(__name__)

POINTER_FILE = "CURRENT"
MANIFEST_FILE = "manifest.json"
WRITER_FILE = "writer.json"
WRITER_LOCK_FILE = "writer.lock"
RECEIVERS_DIRECTORY = "receivers"
SCRATCH_DIRECTORY = "tmp"
"""Where files are written before they are renamed to their places. A directory of its own: over
NFSv3 a second change of a directory within one tick of the server's clock is not seen by other
hosts for a minute, and watchdog holds back the first of two events in one directory."""

_SETTLE_S = 2.0
"""How long pointer and manifest may disagree. A writer is between the two for microseconds; a
disagreement that lasts, while the pointer stands still, is damage."""

_RETRY_S = 0.0005

_LOCKED = "is locked by a writer"

Announce = Callable[[int], None]
"""Says in the store which version is about to be read."""


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A buffer held for reading: its manifest, and its open weights file."""

    buffer: str
    manifest: Manifest
    path: Path
    file: Descriptor

    def release(self) -> None:
        """Drop the lock."""
        self.file.close()

    def read_layout(self) -> Layout:
        """The layout at the end of the file.

        Raises:
            StoreCorruptError: it is not the one that the manifest names.
        """
        manifest = self.manifest
        data = self._read_at(manifest.layout_offset, manifest.layout_bytes)
        if digest(data) != manifest.layout_xxh3:
            raise StoreCorruptError(f"{self.path}: its layout was damaged after it was published")
        try:
            layout = Layout.decode(data, end=manifest.checksums_offset)
        except StoreCorruptError as error:
            raise type(error)(f"{self.path}: {error}") from None
        if len(layout.specs) != manifest.num_tensors:
            raise StoreCorruptError(f"{self.path}: its layout and its manifest disagree")
        return layout

    def read_checksums(self) -> bytes:
        """The table of checksums, not yet compared with the manifest's digest of it."""
        return self._read_at(self.manifest.checksums_offset, 8 * self.manifest.num_tensors)

    def _read_at(self, offset: int, num_bytes: int) -> bytes:
        with os_errors("read", self.path):
            return filesystem.read_at(self.file.number, offset, num_bytes)


class DoubleBuffer:
    """A store's directory, read-only: what is newest, and holding it still while it is read."""

    def __init__(self, root: str | os.PathLike[str], *, allow_shared_store: bool = False) -> None:
        # Absolute: the store stays where it is when the process changes its directory.
        self.root = Path(root).absolute()
        self.allow_shared_store = allow_shared_store
        self._owner_only = not allow_shared_store
        self._went_by_manifests = False

    def check(self) -> None:
        """Refuse a store that is not there, or in which others could put weights."""
        if not self.exists():
            raise StoreNotFoundError(f"there is no store at {self.root}")
        if not self.allow_shared_store:
            filesystem.check_trust(self.root)
            for name in (*BUFFERS, SCRATCH_DIRECTORY):
                with contextlib.suppress(StoreNotFoundError):  # a sender is making them
                    filesystem.check_trust(self.root / name)

    @functools.cached_property
    def mount(self) -> Mount:
        """What the store lies on. Looked up once, when the store is there."""
        return filesystem.mount_of(self.root)

    def exists(self) -> bool:
        """Whether there is a directory, published to or not."""
        with os_errors("look for a store", self.root):
            if self.root.is_dir():
                return True
            # A host that has looked before may keep in mind for a minute that it was not there.
            for directory in reversed(self.root.parents):
                with contextlib.suppress(OSError):
                    filesystem.refresh(directory)
            return self.root.is_dir()

    def pointer(self) -> Pointer | None:
        """What ``CURRENT`` says; None before the first publish."""
        return self._read(Pointer, self.root / POINTER_FILE)

    def newest_pointer(self, *, not_below: int) -> Pointer | None:
        """What ``CURRENT`` says, for a reader that has seen version ``not_below``.

        Raises:
            VersionRegressedError: the store went back below that version.
        """
        pointer = self.pointer()
        if pointer is None and self.mount.is_network:
            pointer = self._pointer_by_manifests(not_below)
        found = 0 if pointer is None else pointer.version
        if found < not_below:
            raise VersionRegressedError(
                f"{self.root} went back from version {not_below} to {found}: it was emptied or "
                "replaced; make a new receiver to follow what is there now"
            )
        return pointer

    def _pointer_by_manifests(self, not_below: int) -> Pointer | None:
        """What ``CURRENT`` would say, were it there.

        Over NFSv3 it is away while it is replaced, if a process on the writer's host has it open.
        Of two whole versions the lower one was published for certain; the higher one was, if it
        has been seen. While one buffer is being written the other one holds the newest.
        """
        manifests = self._manifests_of_one_moment()
        if None in manifests.values():
            return None  # the first version is on its way
        whole = [
            _pointer_to(buffer, manifest)
            for buffer, manifest in manifests.items()
            if manifest is not None and manifest.state == "complete"
        ]
        whole.sort(key=lambda pointer: pointer.version)
        seen = [pointer for pointer in whole if pointer.version >= not_below]
        if seen and not self._went_by_manifests:
            self._went_by_manifests = True
            logger.warning("%s has no %s: going by its manifests", self.root, POINTER_FILE)
        return seen[0] if seen else None

    def _manifests_of_one_moment(self) -> dict[str, Manifest | None]:
        """Both, as they stood together: a writer may come round between one look and the other."""
        before = None
        while (found := {buffer: self.manifest(buffer) for buffer in BUFFERS}) != before:
            before = found
        return found

    def manifest(self, buffer: str) -> Manifest | None:
        """What a buffer holds; None if it never held anything."""
        return self._read(Manifest, self.root / buffer / MANIFEST_FILE)

    def writer(self) -> WriterRecord | None:
        """Who writes the store, or wrote it last."""
        return self._read(WriterRecord, self.root / WRITER_FILE)

    def receiver(self, receiver_id: str) -> ReceiverRecord | None:
        """What one receiver says of itself; None if it never came, or has gone."""
        return self._read(ReceiverRecord, self.root / RECEIVERS_DIRECTORY / f"{receiver_id}.json")

    def receivers(self) -> Iterator[ReceiverRecord]:
        """What each receiver that ever came says of itself; a damaged record is passed over."""
        for path in sorted((self.root / RECEIVERS_DIRECTORY).glob("[!.]*.json")):
            try:
                record = self._read(ReceiverRecord, path)
            except StoreCorruptError as error:
                logger.warning("passing over a damaged record, remove it: %s", error)
            else:
                if record is not None:
                    yield record

    def hold_newest(
        self,
        *,
        newer_than: int | None,
        not_below: int = 0,
        announce: Announce | None = None,
    ) -> HeldBuffer | None:
        """Hold the newest version for reading; None if there is none above ``newer_than``.

        The caller must release what is returned. On a network mount, who does not ``announce``
        the version may lose its file while reading it.

        Raises:
            StoreNotFoundError, StoreInsecureError: see :meth:`check`.
            StoreCorruptError: pointer, manifest and file do not agree.
            VersionRegressedError: the newest version is below ``not_below``.
        """
        self.check()
        disagreement = _Disagreement()
        while True:
            pointer = self.newest_pointer(not_below=not_below)
            if pointer is None or (newer_than is not None and pointer.version <= newer_than):
                return None
            held, reason = self._hold(pointer, announce)
            if held is not None:
                return held
            disagreement.note(pointer, reason, self.root)

    def hold_buffer(self, buffer: str, announce: Announce | None = None) -> HeldBuffer | None:
        """Hold one of the buffers for reading, newest or not; None if it is being written.

        Raises:
            StoreCorruptError: its manifest and its file do not agree.
        """
        manifest = self.manifest(buffer)
        if manifest is None or manifest.state != "complete":
            return None
        held, reason = self._hold(_pointer_to(buffer, manifest), announce)
        # A writer locks a file before it marks its buffer: locked is as good as being written.
        is_locked = reason.endswith(_LOCKED)
        if held is None and not is_locked and self.manifest(buffer) == manifest:
            raise StoreCorruptError(f"{self.root}: {reason}")
        return held

    def hold_version(self, version: int, announce: Announce | None = None) -> HeldBuffer | None:
        """Hold this version for reading; None if neither buffer holds it (any more, or yet)."""
        self.check()
        for buffer in BUFFERS:
            manifest = self.manifest(buffer)
            if manifest is not None and manifest.version == version:
                held = self.hold_buffer(buffer, announce)
                if held is not None and held.manifest.version == version:
                    return held
                if held is not None:
                    held.release()
        return None

    def is_unchanged(self, held: HeldBuffer) -> bool:
        """Whether no writer has begun to rewrite the bytes that were held."""
        is_never_rewritten = self.mount.is_network and held.manifest.is_final
        return is_never_rewritten or self.is_still_named(held)

    def is_still_named(self, held: HeldBuffer) -> bool:
        """Whether the buffer's manifest is the one that was held."""
        manifest = self.manifest(held.buffer)
        return manifest is not None and (
            (manifest.run, manifest.generation) == (held.manifest.run, held.manifest.generation)
        )

    def _hold(self, pointer: Pointer, announce: Announce | None) -> tuple[HeldBuffer | None, str]:
        """Hold what the pointer names, or say why that cannot be done just now."""
        manifest = self.manifest(pointer.buffer)
        if manifest is None or not _names(pointer, manifest):
            return None, f"buffer {pointer.buffer} does not hold version {pointer.version}"
        self._check_fit_for_network(manifest)
        if announce is not None:
            announce(pointer.version)
        path = self.root / pointer.buffer / manifest.file
        try:
            with os_errors("read", path):
                filesystem.refresh(path.parent)
                file = Descriptor(
                    filesystem.open_regular(path, os.O_RDONLY, owner_only=self._owner_only)
                )
        except StoreNotFoundError:
            return None, f"{path} is not there"
        reason = self._reason_not_to_read(file, path, pointer.buffer, manifest)
        if reason:
            file.close()
            return None, reason
        return HeldBuffer(pointer.buffer, manifest, path, file), ""

    def _reason_not_to_read(
        self, file: Descriptor, path: Path, buffer: str, manifest: Manifest
    ) -> str:
        # Over a network, locks may hold nobody back, and no file there is written a second time.
        if not self.mount.is_network and not filesystem.try_lock(file.number, exclusive=False):
            return f"{path} {_LOCKED}"
        # Read again, now that it is locked or announced: a writer marks the manifest only after
        # it has locked the file, and removes the file only after it has marked the manifest and
        # then found nobody who announced it.
        if self.manifest(buffer) != manifest:
            return f"buffer {buffer} was rewritten"
        try:
            with os_errors("read", path):
                size = os.fstat(file.number).st_size
        except StoreNotFoundError:
            return f"{path} is not there"
        if size != manifest.file_bytes:
            return f"{path} has {size} bytes, and was published with {manifest.file_bytes}"
        return ""

    def _check_fit_for_network(self, manifest: Manifest) -> None:
        """Refuse bytes that could be mixed without anybody seeing it.

        Raises:
            StoreAccessError: the sender takes for a disk of its own what is a network here.
        """
        if self.mount.is_network and not manifest.is_final and manifest.checksums_xxh3 is None:
            raise StoreAccessError(
                f"version {manifest.version} in {self.root} was published for one host only: there "
                f"the store is a local disk, and here a network mount ({self.mount.filesystem}); "
                f"set {filesystem.MOUNT_VARIABLE}=network in the sender's environment"
            )

    def _read(self, kind: type[RecordT], path: Path) -> RecordT | None:
        try:
            with os_errors("read", path):
                data = filesystem.read_small(path, MAX_RECORD_BYTES, owner_only=self._owner_only)
        except StoreNotFoundError:
            return None
        try:
            return decode(kind, data)
        except StoreCorruptError as error:
            raise type(error)(f"{path}: {error}") from None


class _Disagreement:
    """Tells a read that raced with a writer, and is tried again, from a damaged store."""

    def __init__(self) -> None:
        self._pointer: Pointer | None = None
        self._since = 0.0

    def note(self, pointer: Pointer, reason: str, root: Path) -> None:
        """Wait a moment, or give up when nothing has moved for long enough."""
        now = time.monotonic()
        if pointer != self._pointer:
            self._pointer, self._since = pointer, now
        elif now - self._since > _SETTLE_S:
            raise StoreCorruptError(
                f"{root}: {POINTER_FILE} names version {pointer.version} in buffer "
                f"{pointer.buffer}, but {reason}; publish again to repair the store"
            )
        time.sleep(_RETRY_S)


class LostFiles:
    """Tells a version whose files went while they were read from one whose files are lacking."""

    def __init__(self, store: DoubleBuffer) -> None:
        self._store = store
        self._identity: str | None = None
        self._since = 0.0

    def note(self, held: HeldBuffer, error: StoreNotFoundError) -> None:
        """Wait a moment, before the newest version is looked for once more.

        Raises:
            StoreCorruptError: the manifest names these files, and has for long enough.
        """
        logger.warning("version %d went while it was read: %s", held.manifest.version, error)
        now = time.monotonic()
        if held.manifest.identity != self._identity:
            self._identity, self._since = held.manifest.identity, now
        elif now - self._since > _SETTLE_S and self._store.is_still_named(held):
            raise StoreCorruptError(f"{error}; publish again to repair the store") from error
        time.sleep(_RETRY_S)


def _names(pointer: Pointer, manifest: Manifest) -> bool:
    """Whether the manifest is the one that the pointer was written for."""
    return manifest.state == "complete" and (
        (manifest.version, manifest.generation, manifest.run)
        == (pointer.version, pointer.generation, pointer.run)
    )


def _pointer_to(buffer: str, manifest: Manifest) -> Pointer:
    return Pointer(
        version=manifest.version,
        buffer=buffer,
        generation=manifest.generation,
        run=manifest.run,
    )


def other_buffer(buffer: str) -> str:
    """``"B"`` for ``"A"``, and ``"A"`` for ``"B"``."""
    return BUFFERS[1 - BUFFERS.index(buffer)]
