"""`NetworkFiles`: a writer's files on a network mount, each made for a version and never rewritten.

If a writer rewrote a file in place, readers on other hosts would see torn data; if it removed the
file during a read, the read would fail. So each version is a new file, flushed and read back. A
reader announces a version in its record. A file that no manifest names any more is retired: it
stays until no record names a version that needs it. It stays at least for a moment, for readers
that cannot write a record, and at most for ``reader_timeout_s``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from dbuffer.errors import DBufferError
from dbuffer.format import places
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Manifest
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.weights_files import WeightsFiles

logger = logging.getLogger(__name__)


class _Retired(NamedTuple):
    versions: range | None
    """Versions that it was needed for, or None if they are unknown, as of a dead writer's file."""
    since: float
    """Time at which the last manifest that named it was replaced."""
    superseded_at: float
    """Time at which a newer version was published; new readers begin with that."""


class NetworkFiles(WeightsFiles):
    """New files, and retired ones, which are removed once no reader may need them.

    Ages are counted on this process's own clock, from when a file was no longer named; clocks of
    hosts are not compared. A reader of a version that is in no named file may read any file whose
    version is not known.
    """

    access = os.O_WRONLY
    """Over NFS, a page that is written in part is read first if it may be read at all."""

    def __init__(self, store: DoubleBuffer, reader_timeout_s: float) -> None:
        super().__init__(store, reader_timeout_s)
        self._retired: dict[Path, _Retired] = {}
        self._newest_since: float | None = None
        self._is_store_shown = False

    def sweep(
        self, directory: str, *, keep: Collection[Path], replaced: Manifest | None = None
    ) -> None:
        if replaced is not None:
            for path in self.named_by(directory, replaced):
                if path in keep:
                    continue
                if _was_never_published(replaced):
                    self.close_at(path)
                    path.unlink(missing_ok=True)
                else:
                    self._retire(path, _versions_of(path, replaced))
        # Remove the files of a publish that failed between its mark and this, too.
        files = self.all_in(directory)
        unnamed = [path for path in files if path not in keep and path not in self._retired]
        if unnamed:
            # With deltas a file may have been named from the other buffer, until just now.
            has_deltas = bool(self.all_in(places.DELTAS_DIRECTORY))
            ages_s = {} if has_deltas else self._ages_s(directory, files)
            for path in unnamed:
                self._retire(path, None, age_s=ages_s.get(places.version_file(path.name), 0.0))

    def note_flip(self) -> None:
        self._newest_since = time.monotonic()
        if not self._is_store_shown:  # it may be new; from now on no name is that others look for
            filesystem.show_new_names(self.store.root, self.store.root.parent)
            self._is_store_shown = True

    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:  # noqa: ARG002
        # It has no size yet: blocks that were allocated over a network may be missing.
        filesystem.check_room(path, num_bytes)

    def _retire(self, path: Path, versions: range | None, *, age_s: float = 0.0) -> None:
        """Retire a file that no manifest has named for ``age_s``, for :meth:`remove_unneeded`.

        Readers of ``versions`` may need it, or of any version that is not named if this is None.
        """
        since = time.monotonic() - age_s
        superseded_at = since
        if versions is not None and self._newest_since is not None:
            superseded_at = self._newest_since
        # Of versions that are dropped together and share a delta, the newest comes first.
        self._retired.setdefault(path, _Retired(versions, since, superseded_at))

    def remove_unneeded(self) -> None:
        if not self._retired:
            return
        try:
            readers = {
                record.held.number: record.receiver
                for record in self.store.readers()
                if record.held is not None
            }
            unnamed = readers.keys() - (self._named_versions() if readers else set())
        except (DBufferError, OSError) as error:
            # The version is published, and a publish must not fail for the sake of room.
            logger.warning("cannot see who reads old versions, keeping them: %s", str(error))
            return
        for path, retired in list(self._retired.items()):
            versions = unnamed if retired.versions is None else retired.versions
            reader = next((readers[held] for held in sorted(readers) if held in versions), None)
            if not self._is_needed(path, retired, reader):
                self.close_at(path)
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # it takes room, and does no harm
                    logger.warning("cannot remove the old version %s: %s", path, str(error))
                del self._retired[path]

    def _is_needed(self, path: Path, retired: _Retired, reader: str | None) -> bool:
        age_s = time.monotonic() - retired.since
        if age_s < self.reader_timeout_s:
            is_fresh = time.monotonic() - retired.superseded_at < TIMING.keep_superseded_s
            return reader is not None or is_fresh
        if reader is not None:
            logger.warning(
                "removing %s of %s, which %s has read for more than %g s",
                path,
                _name_of(retired.versions),
                reader,
                self.reader_timeout_s,
            )
        return False

    def _ages_s(self, buffer: str, files: list[Path]) -> dict[str, float]:
        """Return, by file name, the least time in seconds since a manifest named the file.

        A buffer's manifest lets go of one file before the next is made. So a file has been unnamed
        since the next one was written, by the filesystem's clock. Counted from a writer's start,
        files of writers that live for a moment, as `dbuffer publish` does, would never grow old.
        """
        root = self.store.root
        directory = root / buffer
        with os_errors("look at old versions", directory):
            filesystem.refresh(directory)
            marked_at = filesystem.touched_at(directory / places.MANIFEST_FILE)
            # Whichever this writer has just written.
            now = max(marked_at, filesystem.touched_at(root / places.WRITER_FILE))
            written: dict[str, float] = {}
            for path in files:
                name = places.version_file(path.name)
                written[name] = max(written.get(name, 0.0), filesystem.touched_at(path))
        ages = {}
        for name, written_at in written.items():
            later = [at for at in (*written.values(), marked_at) if at > written_at]
            ages[name] = now - min(later, default=now)
        return ages

    def _named_versions(self) -> set[int]:
        manifests = map(self.store.undamaged_manifest, places.BUFFERS)
        return {manifest.version for manifest in manifests if manifest is not None}


def _versions_of(path: Path, old: Manifest) -> range:
    """Versions that a file was needed for, up to the one of a manifest that named it."""
    made_for = old.file_version
    if places.is_delta_file(path.name):
        made_for = VersionId.parse(path.stem)
    return range(made_for.number, old.version + 1)


def _was_never_published(manifest: Manifest) -> bool:
    """Whether the file that a manifest names was made for a version that did not come about."""
    own = f"weights-{manifest.writer}-{manifest.generation}.td"
    return manifest.state == "writing" and manifest.file == own


def _name_of(versions: range | None) -> str:
    if versions is None:
        return "an unknown version"
    first, last = versions[0], versions[-1]
    return f"version {last}" if first == last else f"versions {first} to {last}"
