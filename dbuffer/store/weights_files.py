"""`WeightsFiles`: the weights files that a store's writer makes or overwrites.

On a local mount that allows it, each buffer has one weights file, which each version overwrites.
The writer first locks the file, so it waits for readers. A version gets a new file if the layout
changed, if the sender keeps versions, or on any other mount. `retention` says when an old file is
removed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from pathlib import Path

from dbuffer.errors import StoreCorruptError
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor

logger = logging.getLogger(__name__)

_QUIET_WAIT_S = 1.0


class WeightsFiles:
    """Weights files that a store's writer has open because it may overwrite them.

    On a network mount the writer keeps all its files open, for the reason given at `replace_file`.
    """

    def __init__(self, store: DoubleBuffer, reader_timeout_s: float) -> None:
        self._store = store
        self._medium = store.medium
        self._reader_timeout_s = reader_timeout_s
        self._open: dict[Path, Descriptor] = {}

    def reuse(
        self, buffer: str, old: Manifest, layout_xxh3: str | None, file_bytes: int
    ) -> Descriptor | None:
        """Lock the idle buffer's file and return it, or None if it cannot be overwritten."""
        # A file that is never rewritten stays intact for its readers, even if it is removed.
        if self._medium.reaches_other_hosts or old.is_final:
            return None
        file = self._open_again(self._store.root / buffer / old.file)
        if file is None:
            return None
        is_fit = (
            not _has_second_name(file)  # a kept version's file: don't wait for its readers
            and self._lock_against_readers(file, buffer, old.version)
            and self._medium.can_rewrite_in_place
            and old.state == "complete"
            and old.layout_xxh3 == layout_xxh3
            and old.file_bytes == file_bytes
            # If another program truncated the file, mapping it would end in a SIGBUS.
            and os.fstat(file.number).st_size == file_bytes
            and not _has_second_name(file)
        )
        if is_fit:
            return file
        self.close_one(file)
        return None

    def make(self, path: Path, num_bytes: int) -> Descriptor:
        is_remote = self._medium.reaches_other_hosts
        # Write-only: an NFS client that may read the file would read each page that it changes.
        file = filesystem.make_file(path, os.O_WRONLY if is_remote else os.O_RDWR)
        try:
            if is_remote:
                # The file has no size yet: over a network, allocated blocks may be missing.
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
        self._open[path] = file
        return file

    def close_one(self, file: Descriptor) -> None:
        self._open = {path: other for path, other in self._open.items() if other is not file}
        file.close()

    def close_all_but(self, paths: Container[Path]) -> None:
        for path, file in list(self._open.items()):
            if path not in paths:
                self.close_one(file)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _lock_against_readers(self, file: Descriptor, buffer: str, version: int) -> bool:
        """Wait for a weights file's readers, and lock the file; return False if a reader stays.

        The reader that stays is evicted: it keeps the bytes that it has mapped, and learns of its
        eviction when it next compares the manifest's generation.
        """
        patience_s, store = self._reader_timeout_s, self._store.root
        quiet_s = min(patience_s, _QUIET_WAIT_S)
        if filesystem.lock_within(file.number, quiet_s):
            return True
        if quiet_s < patience_s:
            message = "waiting up to %g s for %s, which reads version %d of %s"
            logger.info(message, patience_s, self._holders(version), version, store)
            if filesystem.lock_within(file.number, patience_s - quiet_s):
                return True
        message = "evicting %s from buffer %s of %s (version %d): read for more than %g s"
        logger.warning(message, self._holders(version), buffer, store, version, patience_s)
        return False

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
        holders = ", ".join(
            f"receiver {record.receiver} (pid {record.pid}, {record.host})"
            for record in self._store.readers()
            if record.held is not None and record.held.number == version
        )
        return holders or "a reader"


def parts_of(path: Path) -> list[Path]:
    """List the paths of a weights file and of its parts, which trainer ranks have written."""
    return [path, *filesystem.list_matching(path.parent, f"{path.stem}.r*.td")]


def _has_second_name(file: Descriptor) -> bool:
    return os.fstat(file.number).st_nlink > 1
