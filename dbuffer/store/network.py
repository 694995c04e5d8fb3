"""`NetworkMedium`: a mount that other hosts may write to and read from.

No lock there can be trusted by all, caches are late, and a file that is rewritten in place is read
torn. So each version is a new file, flushed and read back, and never written again; a reader says
in its record what it is about to read, and a file that is no longer named goes when nobody says
so; records are touched now and then; who looks for a version opens the directory first, and polls.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from dbuffer.format import places
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.liveness import PRESUMED_DEAD_AFTER_S
from dbuffer.store.medium import Medium, Records, WeightsFiles
from dbuffer.store.retirement import RetiredFiles

_CLOCK_S = 60.0
"""Interval at which a server's clock is compared with this host's."""


class NetworkMedium(Medium):
    """New files, announcements and heartbeats; see the module."""

    name = "network"
    maps_files = False
    reaches_other_hosts = True

    def __init__(self, root: Path, filesystem_name: str) -> None:
        super().__init__(root, filesystem_name)
        self._ahead_s = 0.0
        self._measured_at: float | None = None

    @property
    def can_rewrite_in_place(self) -> bool:
        """Another host would read half of the old bytes and half of the new."""
        return False

    def now(self) -> float:
        now = time.monotonic()
        if self._measured_at is None or now - self._measured_at > _CLOCK_S:
            self._measured_at = now
            # Who may not write there takes the clocks for the same.
            with contextlib.suppress(OSError):
                self._ahead_s = filesystem.clock_ahead_s(self.root / places.SCRATCH_DIRECTORY)
        return time.time() + self._ahead_s

    def shows_life(self, record: Path) -> bool:
        return filesystem.was_touched_within(record, PRESUMED_DEAD_AFTER_S, self.now())

    def lock_to_read(self, file: Descriptor) -> bool:  # noqa: ARG002
        """Locks may hold nobody back, and no file is written a second time."""
        return True

    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,  # noqa: ARG002
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        """Flush the file, which others see no sooner, and keep it open; its time shows life."""
        scratch = self.root / places.SCRATCH_DIRECTORY
        return filesystem.replace_file(
            path, data, scratch=scratch, flush=True, durable=durable, before=before
        )

    def weights_files(self, records: Records, reader_timeout_s: float) -> WeightsFiles:
        return _NewFiles(records, reader_timeout_s)


class _NewFiles(WeightsFiles):
    """A version's file is made for it, and goes when nobody needs it any more."""

    access = os.O_WRONLY
    """Over NFS, a page that is written in part is read first if it may be read at all."""

    def __init__(self, records: Records, reader_timeout_s: float) -> None:
        super().__init__(records, reader_timeout_s)
        self._is_store_shown = False
        self._retired = RetiredFiles(
            records.readers, reader_timeout_s, self.close_at, self._named_versions
        )

    def retire(self, buffer: str, old: Manifest | None, *, keep: Collection[Path]) -> None:
        if old is not None:
            for path in self.named_by(buffer, old):
                if path in keep:
                    continue
                if _was_never_published(old):
                    self.close_at(path)
                    path.unlink(missing_ok=True)
                else:
                    self._retired.add(path, self._versions_of(path, old))
        # And what a publish left that failed between its mark and this.
        self.sweep(buffer, keep=keep)
        self._retired.remove_unneeded()

    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:  # noqa: ARG002
        # It has no size yet: what is allocated over a network may not be there.
        filesystem.check_room(path, num_bytes)

    def _versions_of(self, path: Path, old: Manifest) -> range | None:
        """Versions that a file was needed for, up to the one of a manifest that named it."""
        is_its_own = not old.chain
        first = self.made_for.get(path, old.version if is_its_own else None)
        return None if first is None else range(first, old.version + 1)

    def sweep(self, directory: str, *, keep: Collection[Path]) -> None:
        found = self.all_in(directory)
        left = [path for path in found if path not in keep and not self._retired.knows(path)]
        if left:
            # With deltas a file may have been named from the other buffer, until just now.
            has_deltas = bool(self.all_in(places.DELTAS_DIRECTORY))
            ages_s = {} if has_deltas else self._ages_s(directory, found)
            for path in left:
                self._retired.add(path, None, age_s=ages_s.get(places.version_file(path.name), 0.0))

    def note_published(self, read_back: Callable[[], None]) -> None:
        self._retired.note_newest()
        read_back()
        if not self._is_store_shown:  # it may be new; from now on no name is that others look for
            filesystem.show_new_names(self.records.root, self.records.root.parent)
            self._is_store_shown = True
        self._retired.remove_unneeded()

    def _ages_s(self, buffer: str, files: list[Path]) -> dict[str, float]:
        """Minimum time for which each file of a buffer has not been named, by its name.

        It is its own, however often writers die: on the filesystem's clock, and no host's. A
        buffer's manifest lets go of one file before the next is made.
        """
        root = self.records.root
        directory = root / buffer
        with os_errors("look at old versions", directory):
            filesystem.refresh(directory)
            marked_at = _changed_at(directory / places.MANIFEST_FILE)
            # Whichever this writer has just written.
            now = max(marked_at, _changed_at(root / places.WRITER_FILE))
            written: dict[str, float] = {}
            for path in files:
                name = places.version_file(path.name)
                written[name] = max(written.get(name, 0.0), _changed_at(path))
        ages = {}
        for name, written_at in written.items():
            later = [at for at in (*written.values(), marked_at) if at > written_at]
            ages[name] = now - min(later, default=now)
        return ages

    def _named_versions(self) -> set[int]:
        manifests = map(self.records.undamaged_manifest, places.BUFFERS)
        return {found.version for found in manifests if found is not None}


def _changed_at(path: Path) -> float:
    """Time of a file's last write on the filesystem's clock; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _was_never_published(manifest: Manifest) -> bool:
    """Whether the file that a manifest names was made for a version that did not come about."""
    own = f"weights-{manifest.run}-{manifest.generation}.td"
    return manifest.state == "writing" and manifest.file == own
