"""`DoubleBuffer`: the two buffers, the version pointer and the locks, as readers see them.

A read is: pointer, weights file, shared lock on that file, manifest. The manifest read *under
the lock* decides. If it still is the one that the pointer names, no writer has begun to rewrite
the file, and none that respects the lock will while it is held. Every weights file is its own
lock, so a file that is replaced needs no lock taken over: the old one goes with the old file.

A reader that cannot trust locks compares generations: :meth:`Held.is_unchanged` after
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
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from dbuffer import errors
from dbuffer.format import places
from dbuffer.format.layout import KeptLayouts, Layout, digest
from dbuffer.format.manifest import (
    MAX_RECORD_BYTES,
    UNDECODABLE,
    Manifest,
    Pointer,
    ReceiverRecord,
    RecordT,
    WriterRecord,
    decode,
)
from dbuffer.runtime import options
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.foreign import other_weights
from dbuffer.store.liveness import Process
from dbuffer.store.media import medium_of
from dbuffer.store.medium import Medium

logger = logging.getLogger(__name__)

_SETTLE_S = 2.0
"""Longest time for which pointer and manifest may disagree. A writer is between the two for
microseconds; a disagreement that lasts, while the pointer stands still, is damage."""

_RETRY_S = 0.0005

_TICK_S = 1.0
"""Longer than the clock of any filesystem takes from one file time to the next; some servers count
whole seconds."""

Announce = Callable[[int], None]
"""Function that announces in the store which version is about to be read."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version held for reading, until it is released or its ``with`` block is left."""

    store: DoubleBuffer
    buffer: str
    manifest: Manifest
    path: Path
    file: Descriptor
    """The open weights file."""

    def release(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def is_unchanged(self) -> bool:
        """Whether no writer has begun to rewrite the bytes that were held."""
        return self.manifest.is_final or self.is_still_named()

    def must_verify(self, verify: bool | Literal["auto"]) -> bool:
        """Whether a reader with this option compares checksums."""
        manifest = self.manifest
        if not self.store.medium.reaches_other_hosts:
            return verify is True  # locks and generations are enough
        if not manifest.is_final:
            return True  # nothing else shows whether it was rewritten meanwhile
        return manifest.checksums_xxh3 is not None if verify == "auto" else verify

    def is_still_named(self) -> bool:
        found = self.store.manifest(self.buffer)
        return found is not None and (
            (found.run, found.generation) == (self.manifest.run, self.manifest.generation)
        )

    def wait_after_loss(self, error: errors.StoreNotFoundError, patience: Patience) -> None:
        """Wait a moment after a file of this version was removed while it was read.

        Raises:
            StoreCorruptError: the manifest names that file, and has for long enough.
        """
        logger.warning("version %d was removed while it was read: %s", self.manifest.version, error)
        if not patience.wait(self.manifest.identity):
            self.require_overtaken(error)

    def require_overtaken(self, error: errors.StoreNotFoundError) -> None:
        """Return if a file of it went because there are newer versions.

        Raises:
            StoreCorruptError: its manifest still names that file.
        """
        if self.is_still_named():
            raise errors.StoreCorruptError(f"{error}; publish again to repair the store") from error

    def read_layout(self) -> Layout:
        """The layout at the end of the file, whose bytes are read and checked each time."""
        manifest = self.manifest
        data = self._read_at(manifest.layout_offset, manifest.layout_bytes)
        data_xxh3 = digest(data)
        if data_xxh3 != manifest.layout_xxh3:
            raise errors.StoreCorruptError(
                f"{self.path}: its layout was damaged after it was published"
            )
        try:
            layout = self.store.layouts.decode(data, data_xxh3, manifest.checksums_offset)
        except UNDECODABLE as error:
            raise type(error)(f"{self.path}: {error}") from None
        if len(layout.specs) != manifest.num_tensors:
            raise errors.StoreCorruptError(f"{self.path}: its layout and its manifest disagree")
        return layout

    def read_checksums(self) -> bytes:
        """The table of checksums, not yet compared with the manifest's digest of it."""
        return self._read_at(self.manifest.checksums_offset, 8 * self.manifest.num_tensors)

    def open_delta(self, identity: str) -> tuple[Path, Descriptor]:
        """The delta that leads to the version of this identity, one of its chain.

        Raises:
            StoreNotFoundError: it was removed meanwhile.
            StoreCorruptError, StoreAccessError: it cannot be read.
        """
        path = self.store.delta_path(identity)
        with os_errors("read", path):
            filesystem.refresh(path.parent)
            file = filesystem.open_regular(path, os.O_RDONLY, owner_only=self.store.owner_only)
        return path, file

    def _read_at(self, offset: int, num_bytes: int) -> bytes:
        with os_errors("read", self.path):
            return filesystem.read_at(self.file.number, offset, num_bytes)


_State = tuple[int, ...]
"""State of a file that changes whenever the file is replaced or written."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A record as it was read."""

    record: ReceiverRecord | None
    seen: _State | None
    """State of the file when it was read. None: a later change may leave no trace in it."""
    problem: str | None = None


def _state_of(found: os.stat_result, now: float) -> _State | None:
    # Two changes within one tick of the clock give one time, and maybe one inode.
    if now - max(found.st_mtime, found.st_ctime) < _TICK_S:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class DoubleBuffer:
    """A store's directory, read-only: what is newest, and holding it still while it is read."""

    def __init__(self, root: str | os.PathLike[str], *, allow_shared_store: bool = False) -> None:
        self.root = options.directory("store", root)
        self.owner_only = not options.flag("allow_shared_store", allow_shared_store)
        self.layouts = KeptLayouts()
        """The layouts that were decoded last."""
        self._known: dict[str, _Listed] = {}

    def check(self) -> None:
        """Refuse a store that is not there, or in which others could put weights."""
        if not self.exists():
            raise errors.StoreNotFoundError(f"there is no store at {self.root}")
        if self.owner_only:
            filesystem.check_trust(self.root)
            for name in (
                *places.BUFFERS,
                places.DELTAS_DIRECTORY,
                places.SCRATCH_DIRECTORY,
                places.RECEIVERS_DIRECTORY,
            ):
                with contextlib.suppress(errors.StoreNotFoundError):  # a sender is making them
                    filesystem.check_trust(self.root / name)

    @functools.cached_property
    def medium(self) -> Medium:
        """Medium of the store's directory. Looked up once, when the store is there."""
        return medium_of(self.root)

    def exists(self) -> bool:
        """Whether there is a directory, published to or not."""
        with os_errors("look for a store", self.root):
            # Unlike is_dir(), this says so where a link leads in circles or a file is in the way.
            with contextlib.suppress(FileNotFoundError):
                return stat.S_ISDIR(self.root.stat().st_mode)
            # A host that has looked before may keep in mind for a minute that it was not there.
            for directory in reversed(self.root.parents):
                with contextlib.suppress(OSError):
                    filesystem.refresh(directory)
            return self.root.is_dir()

    def pointer(self) -> Pointer | None:
        """Read ``CURRENT``; None before the first publish."""
        return self._read(Pointer, self.root / places.POINTER_FILE)

    def newest_pointer(self, seen: Pointer | None = None) -> Pointer | None:
        """Read ``CURRENT`` for a reader that has ``seen`` an earlier pointer.

        Raises:
            VersionRegressedError: the store was replaced since, whatever its versions' numbers, or
                went back below the version that was seen.
        """
        pointer = self.pointer()
        if pointer is None and self.medium.reaches_other_hosts:
            pointer = self._pointer_by_manifests(seen)
        if seen is not None:
            self._require_successor(seen, pointer)
        elif pointer is None and (other := other_weights(self.root)) is not None:
            message = "%s holds %s, which dbuffer does not read: it needs a sender of dbuffer's own"
            log_once(logger, message, self.root, other)
        return pointer

    def state_without_version(self) -> str:
        """Clause for messages of readers that came upon no version: what is there instead."""
        if not self.exists():
            return ", which is not there"
        other = other_weights(self.root)
        return "" if other is None else f", which holds {other}"

    def _require_successor(self, seen: Pointer, found: Pointer | None) -> None:
        if found is not None and different_history(seen, found):
            raise errors.VersionRegressedError(
                f"{self.root} was emptied or replaced: it held version {seen.version}, and what it "
                f"holds now, version {found.version}, is of another run, which new receivers "
                "follow",
                found.history,
            )
        if found is None or found.version < seen.version:
            raise errors.VersionRegressedError(
                f"{self.root} went back from version {seen.version} to "
                f"{0 if found is None else found.version}: it was emptied or replaced; new "
                "receivers follow what is there now"
            )

    def _pointer_by_manifests(self, seen: Pointer | None) -> Pointer | None:
        """Find the pointer from the manifests, while ``CURRENT`` is missing.

        Over NFSv3 it is away while it is replaced, if a process on the writer's host has it open.
        Of two whole versions the earlier one was published for certain; the later one was, if it
        has been seen. While one buffer is being written the other one holds the newest.
        """
        manifests = self._manifests_of_one_moment()
        if None in manifests.values():
            return None  # the first version is on its way
        whole = [
            pointer_to(buffer, manifest)
            for buffer, manifest in manifests.items()
            if manifest is not None and manifest.state == "complete"
        ]
        # Generations, not versions: a mirror that begins anew writes lower versions over higher.
        whole.sort(key=lambda pointer: pointer.generation)
        if seen is not None:
            whole = [
                pointer
                for pointer in whole
                if pointer.generation >= seen.generation or pointer.history != seen.history
            ]
        if whole:
            message = "%s has no %s: going by its manifests"
            log_once(logger, message, self.root, places.POINTER_FILE)
        return whole[0] if whole else None

    def _manifests_of_one_moment(self) -> dict[str, Manifest | None]:
        """Read both manifests as they stood together: a writer may replace one meanwhile."""
        before = None
        while (found := {buffer: self.manifest(buffer) for buffer in places.BUFFERS}) != before:
            before = found
        return found

    def weights_path(self, buffer: str, manifest: Manifest) -> Path:
        """Path of the weights file that a buffer's manifest names."""
        return self.root / (manifest.anchor_buffer or buffer) / manifest.file

    def delta_path(self, identity: str) -> Path:
        return self.root / places.DELTAS_DIRECTORY / places.delta_file(identity)

    def record_path(self, receiver_id: str, token: str) -> Path:
        return self.root / places.RECEIVERS_DIRECTORY / places.record_file(receiver_id, token)

    def manifest(self, buffer: str) -> Manifest | None:
        """Read the manifest of a buffer; None if the buffer never held anything."""
        return self._read(Manifest, self.root / buffer / places.MANIFEST_FILE)

    def delta_bytes(self, manifest: Manifest) -> int:
        """Size of the deltas that a manifest names, as far as they are there."""
        num_bytes = 0
        for identity in manifest.chain[1:]:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += self.delta_path(identity).stat().st_size
        return num_bytes

    def writer(self) -> WriterRecord | None:
        """Read the record of the store's last writer."""
        return self._read(WriterRecord, self.root / places.WRITER_FILE)

    def require_writer(self, writer: WriterRecord) -> None:
        """Raise unless this writer still has the store.

        Raises:
            StoreNotFoundError: the store was removed.
            WriterSupersededError: another writer took the store over.
        """
        record = self.writer()
        if record is None:
            raise errors.StoreNotFoundError(
                f"the store at {self.root} was removed; make a new sender"
            )
        if record.run != writer.run:
            raise errors.WriterSupersededError(
                f"process {record.pid} on {record.host} took {self.root} over; this sender must "
                "stop (was the store or its writer.lock removed by hand, or this host cut off?)"
            )

    def undamaged_pointer(self) -> Pointer | None:
        """Read ``CURRENT`` for the writer that replaces it next; None also where it is damaged."""
        return _unless_damaged(self.pointer)

    def undamaged_manifest(self, buffer: str) -> Manifest | None:
        return _unless_damaged(lambda: self.manifest(buffer))

    def undamaged_writer(self) -> WriterRecord | None:
        return _unless_damaged(self.writer)

    def record(self, receiver_id: str, token: str) -> ReceiverRecord | None:
        """The record of one receiver; None if it never came, or has gone."""
        return self._read(ReceiverRecord, self.record_path(receiver_id, token))

    def records_of(self, receiver_id: str) -> list[ReceiverRecord]:
        """The records of all receivers of this id, the one that was written last at the end.

        Only their files are read; as in :meth:`receivers`, damaged ones are ignored.
        """
        names = [entry.name for entry in self._listed()]
        read = [
            self._look_at(name, None, self._known.get(name))
            for name in names
            if places.receiver_of(name) == receiver_id
        ]
        records = [listed.record for listed in read if listed.record is not None]
        return sorted(records, key=lambda record: record.updated_at)

    def receiver(self, receiver_id: str) -> ReceiverRecord | None:
        """The record that a receiver of this id wrote last; None if none ever came, or has gone."""
        records = self.records_of(receiver_id)
        return records[-1] if records else None

    def receivers(self) -> list[ReceiverRecord]:
        """Read the records of all receivers.

        A file is read again if it has changed since the last time. One that is damaged, or that
        someone else could have written, is passed over and logged once.
        """
        now = self.medium.now()
        found: dict[str, _Listed] = {}
        for entry in self._listed():
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:  # it was removed just now
                continue
            known, seen = self._known.get(entry.name), _state_of(state, now)
            if known is None or seen is None or known.seen != seen:
                known = self._look_at(entry.name, seen, known)
            found[entry.name] = known
        self._known = found
        return [listed.record for listed in found.values() if listed.record is not None]

    def _listed(self) -> list[os.DirEntry[str]]:
        directory = self.root / places.RECEIVERS_DIRECTORY
        try:
            with os_errors("list", directory), os.scandir(directory) as entries:
                found = [e for e in entries if e.name.endswith(".json") and e.name[0] != "."]
        except errors.StoreNotFoundError:
            return []
        return sorted(found, key=lambda entry: entry.name)

    def _look_at(self, name: str, seen: _State | None, before: _Listed | None) -> _Listed:
        try:
            record = self._read(ReceiverRecord, self.root / places.RECEIVERS_DIRECTORY / name)
        except (*UNDECODABLE, errors.StoreAccessError) as error:
            if before is None or before.problem != str(error):
                logger.warning("ignoring an unusable record, remove it: %s", error)
            return _Listed(None, seen, str(error))
        return _Listed(record, seen)

    def may_live(self, record: ReceiverRecord | WriterRecord) -> bool:
        """Whether the process that wrote a record may be alive.

        One that can be seen from here is looked at. One of another container or host lives as long
        as it locks its record, on a local mount; and on a network mount, where no lock can be
        trusted by all, until it has not touched its record for
        :data:`~dbuffer.store.liveness.PRESUMED_DEAD_AFTER_S`. Of a writer there is no such sign.

        A mirror that relays a record says in it that the receiver has ended, together with the last
        of its acknowledgements, which may still be on its way when the process is gone.
        """
        process = Process.of(record)
        if isinstance(record, WriterRecord):
            return not process.has_ended()
        if record.has_ended:
            return False
        if process.can_be_seen:
            if not process.has_ended():
                return True
            if not record.is_relayed:
                return False
        return self.medium.shows_life(self.record_path(record.receiver, record.token))

    def readers(self) -> list[ReceiverRecord]:
        held = [record for record in self.receivers() if record.held_version is not None]
        return [record for record in held if self.may_live(record)]

    def hold_newest(
        self,
        *,
        newer_than: int | None,
        seen: Pointer | None = None,
        known: Pointer | None = None,
        announce: Announce | None = None,
    ) -> Held | None:
        """Hold the newest version for reading; None if there is none above ``newer_than``.

        The caller must release what is returned. On a network mount, who does not ``announce``
        the version may lose its file while reading it. A pointer that is ``known``, because it was
        read just now, is not read again unless it is out of date.

        Raises:
            StoreNotFoundError, StoreAccessError: see :meth:`check`.
            StoreCorruptError: pointer, manifest and file do not agree.
            VersionRegressedError: see :meth:`newest_pointer`.
        """
        self.check()
        patience = Patience()
        while True:
            pointer = known or self.newest_pointer(seen)
            known = None
            if pointer is None or (newer_than is not None and pointer.version <= newer_than):
                return None
            held = self._hold(pointer, announce)
            if isinstance(held, Held):
                return held
            if not patience.wait(pointer):
                raise errors.StoreCorruptError(
                    f"{self.root}: {places.POINTER_FILE} names version {pointer.version} in buffer "
                    f"{pointer.buffer}, but {held.reason}; publish again to repair the store"
                )

    def hold_buffer(self, buffer: str, announce: Announce | None = None) -> Held | None:
        """Hold one of the buffers for reading, newest or not; None if it is being written."""
        manifest = self.manifest(buffer)
        if manifest is None or manifest.state != "complete":
            return None
        held = self._hold(pointer_to(buffer, manifest), announce)
        if isinstance(held, Held):
            return held
        # A writer locks a file before it marks its buffer: locked is as good as being written.
        if not held.is_locked and self.manifest(buffer) == manifest:
            raise errors.StoreCorruptError(f"{self.root}: {held.reason}")
        return None

    def hold_version(
        self, version: int, history: str | None, announce: Announce | None = None
    ) -> Held | None:
        """Hold this version for reading; None if neither buffer holds it (any more, or yet).

        With history None, that of a reader that has seen no version yet, any history's counts.
        """
        self.check()

        def is_it(manifest: Manifest | None) -> bool:
            return (
                manifest is not None
                and manifest.version == version
                and history in (None, manifest.history)
            )

        for buffer in places.BUFFERS:
            if is_it(self.manifest(buffer)):
                held = self.hold_buffer(buffer, announce)
                if held is not None and is_it(held.manifest):
                    return held
                if held is not None:
                    held.release()
        return None

    def _hold(self, pointer: Pointer, announce: Announce | None) -> Held | _Hindrance:
        manifest = self.manifest(pointer.buffer)
        if manifest is None or not _names(pointer, manifest):
            return _Hindrance(f"buffer {pointer.buffer} does not hold version {pointer.version}")
        self._require_readable(manifest)
        if announce is not None:
            announce(pointer.version)
        path = self.weights_path(pointer.buffer, manifest)
        try:
            with os_errors("read", path):
                filesystem.refresh(path.parent)
                file = filesystem.open_regular(path, os.O_RDONLY, owner_only=self.owner_only)
        except errors.StoreNotFoundError:
            return _Hindrance(f"{path} is not there")
        hindrance = self._reason_not_to_read(file, path, pointer.buffer, manifest)
        if hindrance is not None:
            file.close()
            return hindrance
        return Held(self, pointer.buffer, manifest, path, file)

    def _require_readable(self, manifest: Manifest) -> None:
        """Refuse bytes that could be a mix of two versions without anything to show it."""
        may_be_mixed = not manifest.is_final and manifest.checksums_xxh3 is None
        if may_be_mixed and self.medium.reaches_other_hosts:
            raise errors.StoreAccessError(
                f"version {manifest.version} in {self.root} was published for one host only: there "
                "the store is a local disk, and here a network mount "
                f"({self.medium.filesystem}); set {filesystem.MOUNT_VARIABLE}=network in the "
                "sender's environment"
            )

    def _reason_not_to_read(
        self, file: Descriptor, path: Path, buffer: str, manifest: Manifest
    ) -> _Hindrance | None:
        if not self.medium.lock_to_read(file):
            return _Hindrance(f"{path} is locked by a writer", is_locked=True)
        # Read again, now that it is locked or announced: a writer marks the manifest only after
        # it has locked the file, and removes the file only after it has marked the manifest and
        # then found nobody who announced it.
        if self.manifest(buffer) != manifest:
            return _Hindrance(f"buffer {buffer} was rewritten")
        try:
            with os_errors("read", path):
                size = os.fstat(file.number).st_size
        except errors.StoreNotFoundError:
            return _Hindrance(f"{path} is not there")
        if size == manifest.file_bytes:
            return None
        return _Hindrance(f"{path} has {size} bytes, and was published with {manifest.file_bytes}")

    def _read(self, kind: type[RecordT], path: Path) -> RecordT | None:
        try:
            with os_errors("read", path):
                data = filesystem.read_small(path, MAX_RECORD_BYTES, owner_only=self.owner_only)
        except errors.StoreNotFoundError:
            return None
        try:
            return decode(kind, data)
        except UNDECODABLE as error:
            raise type(error)(f"{path}: {error}") from None


def _unless_damaged(read: Callable[[], RecordT | None]) -> RecordT | None:
    """Read a record; None for a damaged one. One of another format is not ours to replace."""
    try:
        return read()
    except errors.StoreCorruptError as error:
        logger.warning("ignoring a damaged record, which a sender replaces: %s", error)
        return None


class _Hindrance(NamedTuple):
    """Why a buffer cannot be held just now."""

    reason: str
    is_locked: bool = False
    """A writer has its file."""


class Patience:
    """Tells what passes by itself, a race with a writer, from what stays as it is: damage."""

    def __init__(self) -> None:
        self._about: object = None
        self._since = 0.0

    def wait(self, about: object) -> bool:
        """Wait a moment; False, if it has been about the same thing for long enough."""
        now = time.monotonic()
        if about != self._about:
            self._about, self._since = about, now
        elif now - self._since > _SETTLE_S:
            return False
        time.sleep(_RETRY_S)
        return True


def _names(pointer: Pointer, manifest: Manifest) -> bool:
    return manifest.state == "complete" and (
        (manifest.version, manifest.generation, manifest.run)
        == (pointer.version, pointer.generation, pointer.run)
    )


def pointer_to(buffer: str, manifest: Manifest) -> Pointer:
    """The pointer that names what a buffer's manifest describes."""
    return Pointer(
        version=manifest.version,
        buffer=buffer,
        generation=manifest.generation,
        run=manifest.run,
        history=manifest.history,
    )


def different_history(seen: Pointer, found: Pointer) -> bool:
    """Whether a store was started over between two looks at its pointer.

    Version numbers do not show it: every history begins at version 1. A copy of the store that was
    put back and written to has the same history; but no version is published twice.
    """
    if seen.history != found.history:
        return True
    is_same = (seen.run, seen.generation) == (found.run, found.generation)
    return seen.version == found.version and not is_same


def other_buffer(buffer: str) -> str:
    """``"B"`` for ``"A"``, and ``"A"`` for ``"B"``."""
    return places.BUFFERS[1 - places.BUFFERS.index(buffer)]
