"""`OpenStoreVersion`: a version of a store, open for reading.

``docs/design.md`` says why a read never mixes two versions: "Reading" for local mounts, where the
reader locks the weights file; "Network mounts" for network mounts, where the reader announces the
version in its record.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dbuffer import errors
from dbuffer.format import places
from dbuffer.format.layout import Layout, digest
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Manifest, Pointer, naming
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.timing import TIMING, doubling
from dbuffer.store import filesystem
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.store.filesystem import Descriptor, os_errors

logger = logging.getLogger(__name__)

_LOCKED = "a writer has locked its weights file"

Announce = Callable[[VersionId], None]
"""Function that writes, into a reader's record, the version that the reader is about to read."""


class OvertakenError(Exception):
    """Internal error: a writer replaced a version while it was read. Callers read again."""


class OpenVersion(Closing, abc.ABC):
    manifest: Manifest

    @property
    @abc.abstractmethod
    def name(self) -> str: ...
    @abc.abstractmethod
    def is_unchanged(self) -> bool:
        """Whether no writer has begun to overwrite the version's bytes."""

    def require_unchanged(self) -> None:
        if not self.is_unchanged():
            raise OvertakenError

    @abc.abstractmethod
    def is_still_named(self) -> bool: ...
    @abc.abstractmethod
    def open_delta(self, version: VersionId) -> tuple[Path | str, Descriptor]: ...
    @abc.abstractmethod
    def read_at(self, offset: int, num_bytes: int) -> bytes: ...

    @contextlib.contextmanager
    def noticing_loss(self) -> Iterator[None]:
        """Raise an `OvertakenError` if a file of the version is removed during the ``with`` block.

        If the manifest still names the removed file, raise a `StoreCorruptError` instead.
        """
        try:
            yield
        except errors.StoreNotFoundError as error:
            self._raise_for_loss(error)

    def _raise_for_loss(self, error: errors.StoreNotFoundError) -> NoReturn:
        if self.is_still_named():
            raise errors.StoreCorruptError(f"{error}; publish again to repair the store") from error
        raise OvertakenError from error

    def read_layout(self) -> Layout:
        manifest = self.manifest
        data = self.read_at(manifest.layout_offset, manifest.layout_bytes)
        if digest(data) != manifest.layout_xxh3:
            raise errors.StoreCorruptError(
                f"{self.name}: its layout was damaged after it was published; publish again to "
                "repair the store"
            )
        with naming(self.name):
            layout = Layout.decode(data, manifest.checksums_offset)
        if len(layout.specs) != manifest.num_tensors:
            raise errors.StoreCorruptError(
                f"{self.name}: its layout has {len(layout.specs)} tensors, and its manifest says "
                f"{manifest.num_tensors}; publish again to repair the store"
            )
        return layout


@dataclass(frozen=True)
class OpenStoreVersion(OpenVersion):
    store: DoubleBuffer
    buffer: str
    manifest: Manifest
    path: Path
    file: Descriptor

    @property
    def name(self) -> str:
        return str(self.path)

    def close(self) -> None:
        self.file.close()

    def is_unchanged(self) -> bool:
        if self.manifest.is_final or places.is_kept(self.buffer):
            return True
        # No writer overwrites the file of a version that is kept since it was opened.
        kept_buffer = places.kept_buffer(self.manifest.id)
        return self.is_still_named() or self._is_named_in(kept_buffer)

    def is_still_named(self) -> bool:
        return self._is_named_in(self.buffer)

    def _is_named_in(self, buffer: str) -> bool:
        manifest = self.store.manifest(buffer)
        return manifest is not None and (
            (manifest.writer, manifest.generation)
            == (self.manifest.writer, self.manifest.generation)
        )

    def wait_after_loss(self, error: errors.StoreNotFoundError, patience: Patience) -> NoReturn:
        """Pause after a file was missing; raise an `OvertakenError`, so that the caller rereads.

        If the manifest has named the missing file for `Timing.settle_s`, raise a
        `StoreCorruptError` instead.
        """
        logger.warning(
            "a file of version %d was removed while it was read: %s",
            self.manifest.version,
            str(error),
        )
        if patience.wait(self.manifest.id):
            raise OvertakenError from error
        self._raise_for_loss(error)

    def open_delta(self, version: VersionId) -> tuple[Path, Descriptor]:
        return self.store.open_delta(version)

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        with os_errors("read", self.path):
            return filesystem.read_at(self.file.number, offset, num_bytes)


def open_newest(
    store: DoubleBuffer,
    *,
    newer_than: int | None,
    last: Pointer | None = None,
    reread: bool = True,
    announce: Announce | None = None,
) -> OpenStoreVersion | None:
    """Open the newest version; return None if no version is above ``newer_than``.

    ``last`` is the version pointer that the reader read last. If ``reread`` is False, ``last`` is
    used without a new read. ``announce`` is called with the version's id before the version's file
    is opened.

    Raises:
        StoreCorruptError: pointer, manifest and file have contradicted each other for
            `Timing.settle_s`.
        VersionRegressedError: see :meth:`DoubleBuffer.newest_pointer`.
    """
    store.check()
    patience = Patience()
    while True:
        pointer = store.newest_pointer(last) if reread or last is None else last
        reread = True
        if pointer is None or (newer_than is not None and pointer.version <= newer_than):
            return None
        opened = _try_open(store, pointer.buffer, pointer, announce)
        if isinstance(opened, OpenStoreVersion):
            return opened
        if not patience.wait(pointer):
            raise errors.StoreCorruptError(
                f"{store.root}: {places.POINTER_FILE} names version {pointer.version} in buffer "
                f"{pointer.buffer}, but {opened}; publish again to repair the store"
            )


def open_buffer(
    store: DoubleBuffer, buffer: str, announce: Announce | None = None
) -> OpenStoreVersion | None:
    """Open the version in a buffer; return None if the buffer is being written or dropped."""
    manifest = store.manifest(buffer)
    if manifest is None or manifest.state != "complete":
        return None
    opened = _try_open(store, buffer, manifest, announce)
    if isinstance(opened, OpenStoreVersion):
        return opened
    # A locked file is no damage: the writer that locked it marks the manifest next.
    if opened != _LOCKED and store.manifest(buffer) == manifest:
        raise errors.StoreCorruptError(f"{store.root}: {opened}")
    return None


def open_version(
    store: DoubleBuffer, version: int | VersionId, announce: Announce | None = None
) -> OpenStoreVersion | None:
    """Open a version of the store, in a buffer or kept; return None if the store lacks it.

    A version that does not lead to the newest version is found only by its id. If a damaged buffer
    may hold the version, raise a `StoreCorruptError`.
    """
    store.check()
    contents = Contents(store)
    goal = contents.id_of(version)
    damage: Exception | None = None
    for buffer, manifest in contents.published(lost=isinstance(version, VersionId)):
        try:
            opened = open_buffer(store, buffer, announce) if manifest.id == goal else None
        except errors.StoreCorruptError as error:
            damage = error
            continue
        if opened is not None and opened.manifest.id == goal:
            return opened
        if opened is not None:
            opened.close()
    if damage is not None:
        raise damage
    for buffer in places.BUFFERS:
        # Read both manifests, to raise if one is damaged: it may be the requested version's.
        store.manifest(buffer)
    return None


def _try_open(
    store: DoubleBuffer, buffer: str, named: Pointer | Manifest, announce: Announce | None
) -> OpenStoreVersion | str:
    """Open the version in a buffer, or return the reason why the buffer cannot be opened now."""
    manifest = store.manifest(buffer)
    if (
        manifest is None
        or manifest.state != "complete"
        or (manifest.id, manifest.generation, manifest.writer)
        != (named.id, named.generation, named.writer)
    ):
        return f"buffer {buffer} does not hold version {named.version}"
    _require_readable(store, manifest)
    if announce is not None:
        announce(named.id)
    path = store.weights_path(buffer, manifest)
    try:
        with os_errors("read", path):
            filesystem.refresh(path.parent)
            file = filesystem.open_regular(path, os.O_RDONLY, owner_only=store.owner_only)
    except errors.StoreNotFoundError:
        return f"{path} is not there"
    reason = _reason_not_to_read(store, file, path, buffer, manifest)
    if reason is not None:
        file.close()
        return reason
    return OpenStoreVersion(store, buffer, manifest, path, file)


def _require_readable(store: DoubleBuffer, manifest: Manifest) -> None:
    """Refuse a rewritable file without checksums on a network mount: reads could mix versions."""
    may_be_mixed = not manifest.is_final and manifest.checksums_xxh3 is None
    if may_be_mixed and store.medium.reaches_other_hosts:
        raise errors.StoreAccessError(
            f"version {manifest.version} in {store.root} was published on a local disk, for "
            "readers on the same host, but here the store is on a network mount "
            f"({store.medium.filesystem}); set {filesystem.MOUNT_VARIABLE}=network in the "
            "sender's environment"
        )


def _reason_not_to_read(
    store: DoubleBuffer, file: Descriptor, path: Path, buffer: str, manifest: Manifest
) -> str | None:
    # Take no lock on a network mount: locks may have no effect, and no file is rewritten there.
    if store.medium.maps_files and not filesystem.try_lock(file.number, exclusive=False):
        return _LOCKED
    # Read the manifest again, now that the version is locked or announced. If the manifest is
    # unchanged, the file is safe: a writer locks it before it marks the manifest, and removes it
    # only after it has marked the manifest and then found no record that announces the version.
    if store.manifest(buffer) != manifest:
        return f"buffer {buffer} was rewritten"
    try:
        with os_errors("read", path):
            size = os.fstat(file.number).st_size
    except errors.StoreNotFoundError:
        return f"{path} is not there"
    if size == manifest.file_bytes:
        return None
    return f"{path} has {size} bytes, and was published with {manifest.file_bytes}"


class Patience:
    """Waits between retries of a read that may have failed because a writer is at work."""

    def __init__(self) -> None:
        self._about: object = None
        self._since_s = 0.0
        self._pauses_s = doubling(*filesystem.LOCK_PAUSES_S)

    def wait(self, about: object) -> bool:
        """Pause before a file is read again; return False if reads failed for `Timing.settle_s`."""
        now_s = time.monotonic()
        if about != self._about:
            self._about, self._since_s = about, now_s
            self._pauses_s = doubling(*filesystem.LOCK_PAUSES_S)
        elif now_s - self._since_s > TIMING.settle_s:
            return False
        time.sleep(next(self._pauses_s))
        return True
