"""`DoubleBuffer` reads a store's version pointer, manifests and records.

`Contents` reads the version pointer and each manifest at most once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dbuffer import errors
from dbuffer.format import places
from dbuffer.format.lineage import (
    MAX_NUMBER,
    VERSION_ID,
    Lineage,
    Relation,
    VersionId,
    describe_fork,
    relation,
)
from dbuffer.format.manifest import (
    MAX_RECORD_BYTES,
    UNDECODABLE,
    Manifest,
    Pointer,
    ReceiverRecord,
    RecordT,
    Versioned,
    WriterRecord,
    decode,
    naming,
)
from dbuffer.runtime import options
from dbuffer.runtime.lazy import cached_property
from dbuffer.runtime.messages import listed
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.liveness import Process
from dbuffer.store.medium import Medium, medium_of

logger = logging.getLogger(__name__)

_MTIME_GRANULARITY_S = 1.0
"""Longest tick of a clock for file times, in seconds: some file servers count whole seconds."""

_FileState = tuple[int, ...]


class DoubleBuffer:
    """Read access to a store: its version pointer, manifests, and records of its processes."""

    def __init__(self, root: str | os.PathLike[str], *, allow_shared_store: bool = False) -> None:
        self.root = options.directory("store", root)
        self.owner_only = not options.flag("allow_shared_store", allow_shared_store)
        self._medium: Medium | None = None
        self._device: int | None = None
        self._records: dict[Path, tuple[_FileState | None, ReceiverRecord | None]] = {}

    def check(self) -> None:
        if not self.exists():
            raise errors.StoreNotFoundError(f"there is no store at {self.root}")
        if self.owner_only:
            try:
                filesystem.check_trust(self.root)
            except errors.StoreAccessError as error:
                # For a mistyped path, "others can write to it" would be the wrong message.
                contents = other_contents(self.root)
                if contents is None:
                    raise
                raise errors.StoreAccessError(
                    f"there is no store at {self.root}, which holds {contents}: pass the store's "
                    "own directory"
                ) from error
            for name in (
                *places.BUFFERS,
                places.DELTAS_DIRECTORY,
                places.SCRATCH_DIRECTORY,
                places.RECEIVERS_DIRECTORY,
                places.REFUSED_DIRECTORY,
            ):
                with contextlib.suppress(errors.StoreNotFoundError):  # a sender is making it
                    filesystem.check_trust(self.root / name)

    @property
    def medium(self) -> Medium:
        """Kind of mount that the store is on, determined again if the path's device has changed."""
        device = None
        with contextlib.suppress(OSError):
            device = self.root.stat().st_dev
        if self._medium is None or device != self._device:
            self._medium, self._device = medium_of(self.root), device
        return self._medium

    def exists(self) -> bool:
        """Whether the store's directory exists. The store may have no version yet."""
        with os_errors("look for a store", self.root):
            # Unlike is_dir(), this raises for a loop of links, or a file in the way.
            with contextlib.suppress(FileNotFoundError):
                return stat.S_ISDIR(self.root.stat().st_mode)
            # Look again without this host's cache, which may hide a new directory for a minute.
            for directory in reversed(self.root.parents):
                with contextlib.suppress(OSError):
                    filesystem.refresh(directory)
            return self.root.is_dir()

    def pointer(self) -> Pointer | None:
        return self._read(Pointer, self.root / places.POINTER_FILE)

    def newest_pointer(self, last: Pointer | None = None) -> Pointer | None:
        """Read the version pointer ``CURRENT``.

        Raise a `VersionRegressedError` if the version of ``last`` (the pointer read before) is no
        predecessor of the newest version: the store was replaced, or went back.
        """
        pointer = self.pointer()
        if pointer is None and self.medium.reaches_other_hosts:
            pointer = self._pointer_by_manifests(last)
        if last is not None:
            require_successor(self.root, last, pointer)
        return pointer

    def state_without_version(self) -> str:
        if not self.exists():
            return ", which does not exist"
        contents = other_contents(self.root)
        return "" if contents is None else f", which holds {contents}, and no store"

    def _pointer_by_manifests(self, last: Pointer | None) -> Pointer | None:
        """Derive the version pointer from the manifests, if ``CURRENT`` is missing.

        Over NFSv3, a file can be missing for a moment while it is replaced. If both buffers are
        complete, only the earlier version was certainly published. Return it, unless the reader has
        seen the later version (``last``). If one buffer is being written, the other buffer has the
        newest version.
        """
        manifests = before = None
        while manifests is None or manifests != before:  # until two reads in a row agree
            before, manifests = manifests, {name: self.manifest(name) for name in places.BUFFERS}
        if None in manifests.values():
            return None  # the first version is being written
        complete = [
            pointer_to(buffer, manifest)
            for buffer, manifest in manifests.items()
            if manifest is not None
            and manifest.state == "complete"
            and (last is None or relation(last.lineage, manifest.lineage) != Relation.AHEAD)
        ]
        if not complete:
            return None
        message = "%s has no %s: finding the newest version by the manifests of its buffers"
        log_once(logger, message, self.root, places.POINTER_FILE)
        # The earlier version has the lower generation: generations only go up, also across runs.
        return min(complete, key=lambda pointer: pointer.generation)

    def weights_path(self, buffer: str, manifest: Manifest) -> Path:
        """Return the path of the weights file that a manifest names.

        For a kept version, this is the path of the version's own hard link to the file.
        """
        if manifest.anchor_buffer is not None and not places.is_kept(buffer):
            buffer = manifest.anchor_buffer
        return self.root / buffer / manifest.file

    def delta_path(self, version: VersionId) -> Path:
        return self.root / places.DELTAS_DIRECTORY / f"{version}.delta"

    def open_delta(self, version: VersionId) -> tuple[Path, Descriptor]:
        path = self.delta_path(version)
        with os_errors("read", path):
            filesystem.refresh(path.parent)
            return path, filesystem.open_regular(path, os.O_RDONLY, owner_only=self.owner_only)

    def record_path(self, receiver_id: str, token: str) -> Path:
        return self.root / places.RECEIVERS_DIRECTORY / f"{receiver_id}.{token}.json"

    def manifest(self, buffer: str) -> Manifest | None:
        return self._read(Manifest, self.root / buffer / places.MANIFEST_FILE)

    def manifest_of(self, version: VersionId) -> Manifest | None:
        """Read a version's manifest; return None if it is damaged, or in neither buffer."""
        for buffer in places.BUFFERS:
            manifest = None
            with contextlib.suppress(*UNDECODABLE):
                manifest = self.manifest(buffer)
            if manifest is not None and manifest.state == "complete" and manifest.id == version:
                return manifest
        return None

    def kept(self) -> dict[str, Manifest]:
        """Read the manifests of kept versions, in ascending order, keyed by ``kept/RUN-NUMBER``."""
        kept = {}
        for buffer, directory in self.kept_directories().items():
            with contextlib.suppress(errors.StoreNotFoundError):  # a sender is dropping it
                if self.owner_only:
                    filesystem.check_trust(directory.parent)
                    filesystem.check_trust(directory)
                if (manifest := self.undamaged_manifest(buffer)) is not None:
                    kept[buffer] = manifest
        return dict(sorted(kept.items(), key=lambda item: item[1].version))

    def kept_directories(self) -> dict[str, Path]:
        """Return the directory of each kept version, keyed by ``kept/RUN-NUMBER``.

        A version that a sender has dropped still has a directory while readers may need its files.
        """
        paths = filesystem.list_matching(self.root / places.KEPT_DIRECTORY, "*/")
        ours = [path for path in paths if VERSION_ID.fullmatch(path.name)]
        return {places.kept_buffer(path.name): path for path in ours}

    def delta_bytes(self, versions: Iterable[VersionId]) -> int:
        """Return the total size of the delta files that lead to these versions.

        A missing file counts as 0.
        """
        num_bytes = 0
        for version in versions:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += self.delta_path(version).stat().st_size
        return num_bytes

    def refusal(self, version: VersionId) -> str | None:
        """Return which canary engine refused a version and why, or None if none refused it."""
        data = self._read_small(self.root / places.REFUSED_DIRECTORY / str(version))
        return None if data is None else data.decode(errors="replace")

    def refuse(self, version: VersionId, refusal: str) -> None:
        """Mark a version as refused for all receivers, unless it has such a mark already."""
        if self.refusal(version) is None:
            directory = self.root / places.REFUSED_DIRECTORY
            filesystem.make_directory(directory, durable=self.medium.reaches_other_hosts)
            data = refusal.encode(errors="replace")[:_MAX_REFUSAL_BYTES]
            self.medium.publish_file(directory / str(version), data, durable=True)

    def writer(self) -> WriterRecord | None:
        return self._read(WriterRecord, self.root / places.WRITER_FILE)

    def was_closed(self, writer: WriterRecord) -> bool:
        with contextlib.suppress(errors.StoreCorruptError):
            return self._read_small(self.root / places.WRITER_LOCK_FILE) == writer.token.encode()
        return False

    def require_writer(self, writer: WriterRecord) -> None:
        record = self.writer()
        if record is None:
            raise errors.StoreNotFoundError(
                f"the store at {self.root} was removed; make a new sender"
            )
        if record.token != writer.token:
            raise errors.WriterSupersededError(
                f"process {record.pid} on {record.host} took over the store at {self.root}: stop "
                "this sender (was the store or its writer.lock removed, or this host cut off?)"
            )

    def undamaged_pointer(self) -> Pointer | None:
        return _unless_damaged(self.pointer)

    def undamaged_manifest(self, buffer: str) -> Manifest | None:
        return _unless_damaged(lambda: self.manifest(buffer))

    def undamaged_writer(self) -> WriterRecord | None:
        return _unless_damaged(self.writer)

    def record(self, receiver_id: str, token: str) -> ReceiverRecord | None:
        return self._read(ReceiverRecord, self.record_path(receiver_id, token))

    def receiver(self, receiver_id: str) -> ReceiverRecord | None:
        records = self.records_of(receiver_id)
        return records[-1] if records else None

    def records_of(self, receiver_id: str) -> list[ReceiverRecord]:
        """Read the records of all receivers with this id, in order of their files' last changes."""
        entries = self._record_entries()
        paths = [Path(e.path) for e in entries if places.receiver_of(e.name) == receiver_id]
        # Sort by the files' times, which one clock sets: each host's clock sets the times in its
        # records.
        paths.sort(key=filesystem.touched_at)
        return [record for path in paths if (record := self._read_usable(path)) is not None]

    def receivers(self) -> list[ReceiverRecord]:
        """Return the records of all receivers. An unchanged file is not read again.

        A file is ignored, and logged once, if it is damaged or another user could have written it.
        """
        records: dict[Path, tuple[_FileState | None, ReceiverRecord | None]] = {}
        now_s = self.medium.now_s()
        for entry in self._record_entries():
            try:
                state = _file_state(entry.stat(follow_symlinks=False), now_s)
            except OSError:  # it has just been removed
                continue
            path = Path(entry.path)
            last_state, record = self._records.get(path, (None, None))
            if state is None or state != last_state:
                record = self._read_usable(path)
            records[path] = state, record
        self._records = records  # in one assignment: another thread may be listing records, too
        return [record for _, record in records.values() if record is not None]

    def _record_entries(self) -> list[os.DirEntry[str]]:
        directory = self.root / places.RECEIVERS_DIRECTORY
        try:
            with os_errors("list", directory), os.scandir(directory) as entries:
                records = [e for e in entries if e.name.endswith(".json") and e.name[0] != "."]
        except errors.StoreNotFoundError:
            return []
        return sorted(records, key=lambda entry: entry.name)

    def _read_usable(self, path: Path) -> ReceiverRecord | None:
        try:
            return self._read(ReceiverRecord, path)
        except (*UNDECODABLE, errors.StoreAccessError) as error:
            log_once(logger, "ignoring an unusable record, remove it: %s", str(error))
            return None

    def may_live(self, record: ReceiverRecord | WriterRecord) -> bool:
        """Whether the process that wrote a record may still be alive.

        If the process can be seen from here, check the process. Otherwise check the record's lock
        or time. If a mirror relays the record, check the lock or time even if the process is seen
        to have ended: the mirror may not have relayed the last acknowledgement yet.
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
        records = self.receivers()
        return [record for record in records if record.held is not None and self.may_live(record)]

    def _read(self, kind: type[RecordT], path: Path) -> RecordT | None:
        data = self._read_small(path)
        with naming(path):
            return None if data is None else decode(kind, data)

    def _read_small(self, path: Path) -> bytes | None:
        try:
            with os_errors("read", path):
                return filesystem.read_small(path, MAX_RECORD_BYTES, owner_only=self.owner_only)
        except errors.StoreNotFoundError:
            return None


def _file_state(status: os.stat_result, now_s: float) -> _FileState | None:
    # Return None for a file that changed just now, so that the file is read again: another change
    # in the same tick of the clock could leave the file's time, and even its inode, unchanged.
    if now_s - max(status.st_mtime, status.st_ctime) < _MTIME_GRANULARITY_S:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _unless_damaged(read: Callable[[], RecordT | None]) -> RecordT | None:
    """Read a record; return None if it is damaged. Raise if the record has an unknown format."""
    try:
        return read()
    except errors.StoreCorruptError as error:
        logger.warning("ignoring a damaged record, which a sender replaces: %s", str(error))
        return None


def pointer_to(buffer: str, manifest: Manifest) -> Pointer:
    return Pointer(
        id=manifest.id,
        runs=manifest.runs,
        buffer=buffer,
        generation=manifest.generation,
        writer=manifest.writer,
    )


def require_successor(store: Path | str, last: Versioned, newest: Versioned | None) -> None:
    if newest is None:
        raise errors.VersionRegressedError(f"{store} was emptied: it held version {last.version}")
    match relation(last.lineage, newest.lineage):
        case Relation.AHEAD:
            raise errors.VersionRegressedError(
                f"{store} went back from version {last.version} to {newest.version}; reading "
                f"continues once version {last.version} is back, or a version that follows it"
            )
        case Relation.FORKED:
            raise errors.VersionRegressedError(
                describe_fork(store, last.id, newest.id), is_forked=True
            )


def parts_of(path: Path) -> list[Path]:
    """List the paths of a weights file and of its parts, which trainer ranks have written."""
    return [path, *filesystem.list_matching(path.parent, f"{path.stem}.r*.td")]


def other_buffer(buffer: str) -> str:
    return places.BUFFERS[1 - places.BUFFERS.index(buffer)]


_PARTS = {
    *places.BUFFERS,
    places.POINTER_FILE,
    places.WRITER_FILE,
    places.WRITER_LOCK_FILE,
    places.MIRROR_LOCK_FILE,
    places.RECEIVERS_DIRECTORY,
    places.DELTAS_DIRECTORY,
    places.KEPT_DIRECTORY,
    places.REFUSED_DIRECTORY,
    places.SCRATCH_DIRECTORY,
}

_MAX_REFUSAL_BYTES = 4096

_OF_FILESYSTEM = "lost+found"
"""Name of a directory at the root of an ext4 filesystem. The root may be used as a store."""

_MARKS = (
    places.POINTER_FILE,
    places.WRITER_FILE,
    places.WRITER_LOCK_FILE,
    *(f"{buffer}/{places.MANIFEST_FILE}" for buffer in places.BUFFERS),
)
"""Names of files whose presence makes a directory a store, whatever else it contains."""


def other_contents(root: Path) -> str | None:
    """Name the foreign contents of a directory.

    Return None if the directory is a store, is empty or does not exist. Hidden names are ignored:
    network mounts and backups put hidden files into any directory.
    """
    with os_errors("list", root):
        if any((root / mark).exists() for mark in _MARKS) or not root.is_dir():
            return None
        names = sorted(path.name for path in root.iterdir() if path.name[0] != ".")
    foreign = [name for name in names if name not in (*_PARTS, _OF_FILESYSTEM)]
    return listed(foreign, most=3) or None


def is_store(root: Path) -> bool:
    return other_contents(root) is None and any((root / name).exists() for name in _PARTS)


def require_own_directory(root: Path) -> None:
    contents = other_contents(root)
    if contents is not None:
        raise errors.OptionError(
            f"{root} holds {contents}, and no store: give the store a directory of its own, such "
            f"as {root / 'policy'}"
        )


class Contents:
    """Version pointer and manifests of a store, each read at its first use.

    A writer that opens a store finds these records as the previous writer left them. That
    writer may have been killed at any instruction, and records may be damaged. A damaged record is
    ignored, but its file shows that the store is not new.
    """

    def __init__(self, store: DoubleBuffer) -> None:
        self._store = store

    @cached_property
    def pointer(self) -> Pointer | None:
        return self._store.undamaged_pointer()

    @cached_property
    def manifests(self) -> dict[str, Manifest | None]:
        return {buffer: self._store.undamaged_manifest(buffer) for buffer in places.BUFFERS}

    @cached_property
    def newest_buffer(self) -> str | None:
        """Buffer that the version pointer names, or None if nothing was ever published.

        If the pointer is missing or damaged, this is the buffer that may hold the newest version.
        """
        if self.pointer is not None:
            return self.pointer.buffer
        root = self._store.root
        have_manifests = [
            (root / buffer / places.MANIFEST_FILE).exists() for buffer in places.BUFFERS
        ]
        if not (root / places.POINTER_FILE).exists() and not all(have_manifests):
            return None  # the first version's writer died before it flipped the pointer

        def generation(buffer: str) -> int:
            manifest = self.manifests[buffer]
            return manifest.generation if manifest and manifest.state == "complete" else 0

        return max(places.BUFFERS, key=generation)

    @cached_property
    def newest(self) -> Lineage | None:
        """Newest undamaged version that was published, or None.

        If the version pointer is missing or damaged, this may be a version whose commit failed.
        """
        if self.pointer is not None:
            return self.pointer.lineage
        newest = None if self.newest_buffer is None else self.manifests[self.newest_buffer]
        return newest.lineage if newest is not None and newest.state == "complete" else None

    @property
    def idle_buffer(self) -> str:
        # Always put the first version into B. If it went into A, and a dead writer's manifest were
        # in B, the dead writer's unfinished version could count as published.
        return places.BUFFERS[1] if self.newest_buffer is None else other_buffer(self.newest_buffer)

    def has_published(self, manifest: Manifest) -> bool:
        """Whether a manifest's version was published, and leads to the newest version."""
        # The state is no proof: a commit writes `complete` before the flip, which may have failed.
        newest = self.newest
        return manifest.state == "complete" and newest is not None and newest.reaches(manifest.id)

    def published(self, *, lost: bool = False) -> Iterator[tuple[str, Manifest]]:
        """Yield the buffer and manifest of the newest version and of versions that lead to it.

        Kept versions come last: a sender keeps a version before it reuses the version's buffer, so
        this order misses no version. With ``lost``, also yield kept versions that do not lead to
        the newest version.
        """
        for buffer, manifest in self.manifests.items():
            if manifest is not None and self.has_published(manifest):
                yield buffer, manifest
        for buffer, manifest in self._store.kept().items():
            if lost or self.newest is None or self.newest.reaches(manifest.id):
                yield buffer, manifest

    def id_of(self, version: int | VersionId) -> VersionId | None:
        """Return a version's id, or None if no version with this number leads to the newest."""
        if isinstance(version, VersionId):
            return version
        return None if self.newest is None else self.newest.at(version)

    @property
    def last_generation(self) -> int:
        records = (self.pointer, *self.manifests.values())
        return max((record.generation for record in records if record is not None), default=0)

    def next_version(self, version: int | None, *, above: int = 0) -> int:
        """Return the next version's number: ``version``, or by default the last number plus one.

        Raises:
            VersionError: ``version`` is not a valid version number, or is not above the store's
                newest version. Or it is not above the sender's last version (``above``), which the
                store may have lost.
        """
        require_version(version)
        root, in_store = self._store.root, 0 if self.newest is None else self.newest.id.number
        last = max(in_store, above)
        if version is None:
            version = last + 1
        if version > MAX_NUMBER:
            raise errors.VersionError(
                f"{root} is at version {last}, the highest possible number: publish into a new "
                "store"
            )
        if in_store < version <= last:
            raise errors.VersionError(
                f"the number {version} was already used in {root}: the version was lost, or its "
                f"publish failed after readers may have seen it; use a number from {last + 1}"
            )
        if version <= last:
            raise errors.VersionError(
                f"version {version} is not above version {last}, the last one in {root}; versions "
                "only go up (put a trainer's step in the metadata)"
            )
        return version


def require_version(version: object) -> None:
    if version is None or (type(version) is int and version <= MAX_NUMBER):
        return
    raise errors.VersionError(f"a version is an integer below 2**63, not {version!r:.80}")
