"""`RetiredFiles`: weights files on a network mount that no manifest names any more.

One that is removed under a reader on another host is an error in the middle of its read. So it
stays until no receiver's record says that it is being read; and at least for a moment, for
readers that cannot write a record; and at most for as long as readers are waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from dbuffer.errors import DBufferError
from dbuffer.format.manifest import ReceiverRecord

logger = logging.getLogger(__name__)

KEEP_AT_LEAST_S = 2.0
"""Readers that write no record (a read-only mount, `dbuffer verify`) have this long to finish."""


class _Retired(NamedTuple):
    versions: range | None
    """Versions that it was needed for. None: the file of a dead writer, of which only the age is
    known."""
    since: float
    """Time from which it was no longer named."""
    superseded_at: float
    """Time from which there was a newer version, with which new readers begin."""


class RetiredFiles:
    """Files that are removed later, once no reader may need them.

    Ages are counted on this process's own clock, from when a file was no longer named. For what a
    dead writer left, :meth:`add` is told its age; clocks of hosts are not compared.

    A file is removed after ``reader_timeout_s`` even if a reader still announces its version;
    ``close_file`` is called with its path just before. A reader of a version that is in no named
    file may read any file whose version is not known.
    """

    def __init__(
        self,
        readers: Callable[[], list[ReceiverRecord]],
        reader_timeout_s: float,
        close_file: Callable[[Path], None],
        named_versions: Callable[[], Collection[int]],
    ) -> None:
        self._named_versions = named_versions
        self._close_file = close_file
        self._readers = readers
        self._reader_timeout_s = reader_timeout_s
        self._newest_since: float | None = None
        self._files: dict[Path, _Retired] = {}

    def note_newest(self) -> None:
        """Note that a version was published just now, with which readers begin from now on."""
        self._newest_since = time.monotonic()

    def knows(self, path: Path) -> bool:
        return path in self._files

    def add(self, path: Path, versions: range | None, *, age_s: float = 0.0) -> None:
        """Retire a file that no manifest has named for ``age_s``.

        Whoever reads one of ``versions`` may need it; None: whoever reads one that is not named.
        """
        since = time.monotonic() - age_s
        superseded_at = since
        if versions is not None and self._newest_since is not None:
            superseded_at = self._newest_since
        self._files.setdefault(path, _Retired(versions, since, superseded_at))

    def remove_unneeded(self) -> None:
        """Remove what nobody needs. Call it after the manifest was replaced, never before."""
        if not self._files:
            return
        try:
            readers = {
                record.held_version: record.receiver
                for record in self._readers()
                if record.held_version is not None
            }
            unnamed = readers.keys() - set(self._named_versions() if readers else ())
        except (DBufferError, OSError) as error:
            # What is published is published, and room is not worth a publish that fails.
            logger.warning("cannot see who reads old versions, keeping them: %s", error)
            return
        for path, retired in list(self._files.items()):
            versions = unnamed if retired.versions is None else retired.versions
            reader = next((readers[held] for held in sorted(readers) if held in versions), None)
            if not self._is_needed(path, retired, reader):
                self._close_file(path)
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # it takes room, and does no harm
                    logger.warning("cannot remove the old version %s: %s", path, error)
                del self._files[path]

    def _is_needed(self, path: Path, retired: _Retired, reader: str | None) -> bool:
        age_s = time.monotonic() - retired.since
        if age_s < self._reader_timeout_s:
            is_fresh = time.monotonic() - retired.superseded_at < KEEP_AT_LEAST_S
            return reader is not None or is_fresh
        if reader is not None:
            logger.warning(
                "removing %s of %s, which %s has read for more than %g s",
                path,
                _name_of(retired.versions),
                reader,
                self._reader_timeout_s,
            )
        return False


def _name_of(versions: range | None) -> str:
    if versions is None:
        return "an unknown version"
    first, last = versions[0], versions[-1]
    return f"version {last}" if first == last else f"versions {first} to {last}"
