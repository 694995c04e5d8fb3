"""`DoubleBuffer`: the two buffers, the version pointer and the locks, as readers see them.

A read is: pointer, weights file, shared lock on that file, manifest. The manifest read *under
the lock* decides. If it still is the one that the pointer names, no writer has begun to rewrite
the file, and none that respects the lock will while it is held. Every weights file is its own
lock, so a file that is replaced needs no lock taken over: the old one goes with the old file.

A reader that cannot trust locks compares generations: :meth:`DoubleBuffer.is_unchanged` after
the last byte was read tells whether a writer has begun since.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dbuffer import filesystem
from dbuffer.errors import StoreCorruptError, StoreNotFoundError, VersionRegressedError
from dbuffer.filesystem import Descriptor, os_errors
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

_SETTLE_S = 2.0
"""How long pointer and manifest may disagree. A writer is between the two for microseconds; a
disagreement that lasts, while the pointer stands still, is damage."""

_RETRY_S = 0.0005

_LOCKED = "is locked by a writer"


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A buffer under a shared lock: its manifest, and its open weights file."""

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
        data = filesystem.read_at(self.file.number, manifest.layout_offset, manifest.layout_bytes)
        if digest(data) != manifest.layout_xxh3:
            raise StoreCorruptError(f"{self.path}: its layout was damaged after it was published")
        try:
            layout = Layout.decode(data, end=manifest.checksums_offset)
        except StoreCorruptError as error:
            raise type(error)(f"{self.path}: {error}") from None
        if len(layout.specs) != manifest.num_tensors:
            raise StoreCorruptError(f"{self.path}: its layout and its manifest disagree")
        return layout


class DoubleBuffer:
    """A store's directory, read-only: what is newest, and holding it still while it is read."""

    def __init__(self, root: str | os.PathLike[str], *, allow_shared_store: bool = False) -> None:
        # Absolute: the store stays where it is when the process changes its directory.
        self.root = Path(root).absolute()
        self.allow_shared_store = allow_shared_store
        self._owner_only = not allow_shared_store

    def check(self) -> None:
        """Refuse a store that is not there, or in which others could put weights."""
        if not self.exists():
            raise StoreNotFoundError(f"there is no store at {self.root}")
        if not self.allow_shared_store:
            filesystem.check_trust(self.root)
            for buffer in BUFFERS:
                with contextlib.suppress(StoreNotFoundError):  # a sender is making them
                    filesystem.check_trust(self.root / buffer)

    def exists(self) -> bool:
        """Whether there is a directory, published to or not."""
        with os_errors("look for a store", self.root):
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
        found = 0 if pointer is None else pointer.version
        if found < not_below:
            raise VersionRegressedError(
                f"{self.root} went back from version {not_below} to {found}: it was emptied or "
                "replaced; make a new receiver to follow what is there now"
            )
        return pointer

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

    def hold_newest(self, *, newer_than: int | None, not_below: int = 0) -> HeldBuffer | None:
        """Lock the newest version for reading; None if there is none above ``newer_than``.

        The caller must release what is returned.

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
            held, reason = self._hold(pointer)
            if held is not None:
                return held
            disagreement.note(pointer, reason, self.root)

    def hold_buffer(self, buffer: str) -> HeldBuffer | None:
        """Lock one of the buffers for reading, newest or not; None if it is being written.

        Raises:
            StoreCorruptError: its manifest and its file do not agree.
        """
        manifest = self.manifest(buffer)
        if manifest is None or manifest.state != "complete":
            return None
        pointer = Pointer(
            version=manifest.version,
            buffer=buffer,
            generation=manifest.generation,
            run=manifest.run,
        )
        held, reason = self._hold(pointer)
        # A writer locks a file before it marks its buffer: locked is as good as being written.
        is_locked = reason.endswith(_LOCKED)
        if held is None and not is_locked and self.manifest(buffer) == manifest:
            raise StoreCorruptError(f"{self.root}: {reason}")
        return held

    def hold_version(self, version: int) -> HeldBuffer | None:
        """Lock this version for reading; None if neither buffer holds it (any more, or yet)."""
        self.check()
        for buffer in BUFFERS:
            manifest = self.manifest(buffer)
            if manifest is not None and manifest.version == version:
                held = self.hold_buffer(buffer)
                if held is not None and held.manifest.version == version:
                    return held
                if held is not None:
                    held.release()
        return None

    def is_unchanged(self, held: HeldBuffer) -> bool:
        """Whether no writer has begun to rewrite the buffer since it was held."""
        manifest = self.manifest(held.buffer)
        return manifest is not None and (
            (manifest.run, manifest.generation) == (held.manifest.run, held.manifest.generation)
        )

    def _hold(self, pointer: Pointer) -> tuple[HeldBuffer | None, str]:
        """Lock what the pointer names, or say why that cannot be done just now."""
        manifest = self.manifest(pointer.buffer)
        if manifest is None or not _names(pointer, manifest):
            return None, f"buffer {pointer.buffer} does not hold version {pointer.version}"
        path = self.root / pointer.buffer / manifest.file
        try:
            with os_errors("read", path):
                file = Descriptor(
                    filesystem.open_regular(path, os.O_RDONLY, owner_only=self._owner_only)
                )
        except StoreNotFoundError:
            return None, f"{path} is not there"
        if not filesystem.try_lock(file.number, exclusive=False):
            file.close()
            return None, f"{path} {_LOCKED}"
        # Read again, under the lock: a writer marks the manifest only after it has locked the
        # file, so a manifest that has not changed by now cannot change until we unlock.
        if self.manifest(pointer.buffer) != manifest:
            file.close()
            return None, f"buffer {pointer.buffer} was rewritten"
        size = os.fstat(file.number).st_size
        if size != manifest.file_bytes:
            file.close()
            return None, f"{path} has {size} bytes, and was published with {manifest.file_bytes}"
        return HeldBuffer(pointer.buffer, manifest, path, file), ""

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


def _names(pointer: Pointer, manifest: Manifest) -> bool:
    """Whether the manifest is the one that the pointer was written for."""
    return manifest.state == "complete" and (
        (manifest.version, manifest.generation, manifest.run)
        == (pointer.version, pointer.generation, pointer.run)
    )


def other_buffer(buffer: str) -> str:
    """``"B"`` for ``"A"``, and ``"A"`` for ``"B"``."""
    return BUFFERS[1 - BUFFERS.index(buffer)]
