"""`WeightsFiles`: the weights files that a store's writer makes, and writes again.

On a local mount that can rewrite in place, and unless versions are kept, each buffer has one file,
which is written again if the layout stays. The writer takes an exclusive lock first, and so waits
for readers.

Elsewhere each version has a new file, which is never written again: on a network mount readers on
other hosts would see torn data. There a file is flushed and read back, too. `retention` says when
an old one is removed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from pathlib import Path

from dbuffer.errors import StoreCorruptError
from dbuffer.format import places
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor

logger = logging.getLogger(__name__)

_QUIET_WAIT_S = 1.0
"""Time that a sender waits for readers before it logs for whom."""


class WeightsFiles:
    """The weights files of a store's writer, open if it may write them again.

    On a network mount all of them are open; see `replace_file`.
    """

    def __init__(self, store: DoubleBuffer, reader_timeout_s: float) -> None:
        self._store = store
        self._medium = store.medium
        self._reader_timeout_s = reader_timeout_s
        self._open: dict[Path, Descriptor] = {}

    def reuse(
        self, buffer: str, old: Manifest, layout_xxh3: str | None, file_bytes: int
    ) -> Descriptor | None:
        """Lock the idle buffer's own file and return it, or None if it cannot be written again.

        On a local mount it waits for readers of the file, for ``reader_timeout_s`` at most.
        """
        # A file that is never rewritten stays whole for its readers, removed or not.
        if self._medium.reaches_other_hosts or old.is_final:
            return None
        file = self._lock_existing(buffer, old)
        if file is None:
            return None
        is_fit = (
            self._medium.can_rewrite_in_place
            and old.state == "complete"
            and old.layout_xxh3 == layout_xxh3
            and old.file_bytes == file_bytes
            # A file that someone cut short would be a SIGBUS.
            and os.fstat(file.number).st_size == file_bytes
            and not _has_second_name(file)
        )
        if is_fit:
            return file
        self.close_one(file)
        return None

    def make(self, path: Path, num_bytes: int) -> Descriptor:
        """Make a weights file, with room for ``num_bytes`` where that can be reserved."""
        is_remote = self._medium.reaches_other_hosts
        # Over NFS, a page that is written in part is read first if it may be read at all.
        file = filesystem.make_file(path, os.O_WRONLY if is_remote else os.O_RDWR)
        try:
            if is_remote:
                # It has no size yet: blocks that were allocated over a network may be missing.
                filesystem.check_room(path, num_bytes)
            else:
                # Locked before another process knows its name.
                filesystem.try_lock(file.number, exclusive=True)
                if num_bytes:
                    filesystem.allocate(file.number, num_bytes, path)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._open[path] = file
        return file

    def close_one(self, file: Descriptor) -> None:
        self._open = {path: other for path, other in self._open.items() if other is not file}
        file.close()

    def close_all_but(self, paths: Container[Path]) -> None:
        """Close the files that are removed: a file takes room for as long as it is open."""
        for path, file in list(self._open.items()):
            if path not in paths:
                self.close_one(file)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _lock_existing(self, buffer: str, manifest: Manifest) -> Descriptor | None:
        """Return the buffer's file, locked, or None if there is none or readers hold on to it.

        A reader that outlasts the time-out keeps the bytes it maps: the buffer moves to a new
        file. It learns that it was evicted when it compares generations.
        """
        file = self._open_again(self._store.root / buffer / manifest.file)
        if file is None:
            return None
        if _has_second_name(file):  # its readers need not be waited for
            self.close_one(file)
            return None
        if not self._lock_against_readers(file, manifest.version):
            logger.warning(
                "evicting %s from buffer %s of %s (version %d): read for more than %g s",
                self._holders(manifest.version) or "a reader",
                buffer,
                self._store.root,
                manifest.version,
                self._reader_timeout_s,
            )
            self.close_one(file)
            return None
        return file

    def _lock_against_readers(self, file: Descriptor, version: int) -> bool:
        """Lock a weights file when its readers are done; a wait above a second is logged."""
        patience_s = self._reader_timeout_s
        quiet_s = min(patience_s, _QUIET_WAIT_S)
        if filesystem.lock_within(file.number, quiet_s):
            return True
        if quiet_s == patience_s:
            return False
        readers = self._holders(version) or "a reader"
        message = "waiting up to %g s for %s, which reads version %d of %s"
        logger.info(message, patience_s, readers, version, self._store.root)
        return filesystem.lock_within(file.number, patience_s - quiet_s)

    def _open_again(self, path: Path) -> Descriptor | None:
        before = self._open.get(path)
        try:
            if before is not None and os.path.samestat(os.fstat(before.number), path.stat()):
                return before
            if before is not None:
                self.close_one(before)
            owner_only = self._store.owner_only
            file = filesystem.open_regular(path, os.O_RDWR, owner_only=owner_only)
        except FileNotFoundError:
            return None
        except StoreCorruptError as error:
            logger.warning("making a new weights file: %s", str(error))
            return None
        self._open[path] = file
        return file

    def _holders(self, version: int) -> str:
        return ", ".join(
            f"receiver {record.receiver} (pid {record.pid}, {record.host})"
            for record in self._store.readers()
            if record.held is not None and record.held.number == version
        )


def parts_of(path: Path) -> list[Path]:
    """Return the weights file at ``path``, and its parts."""
    files = filesystem.list_matching(path.parent, "weights-*.td")
    return [path, *(file for file in files if places.is_part_of(file.name, path.name))]


def _has_second_name(file: Descriptor) -> bool:
    """Whether a weights file has a second name, as a kept version's does."""
    return os.fstat(file.number).st_nlink > 1
