"""`WeightsFiles`: the files that a store's writer makes, writes again and removes; `LocalFiles`."""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

from dbuffer.errors import StoreCorruptError
from dbuffer.format import places
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor

logger = logging.getLogger(__name__)

_QUIET_WAIT_S = 1.0
"""Time that a sender waits for readers before it logs for whom."""


class WeightsFiles(ABC):
    """The weights files of a store's writer, which holds each open that it may write again."""

    access: ClassVar[int]
    """Flag of `os.open` for a new file."""

    def __init__(self, store: DoubleBuffer, reader_timeout_s: float) -> None:
        self.store = store
        self.reader_timeout_s = reader_timeout_s
        self.open: dict[Path, Descriptor] = {}

    def reuse(
        self,
        buffer: str,  # noqa: ARG002
        old: Manifest,  # noqa: ARG002
        layout_xxh3: str | None,  # noqa: ARG002
        file_bytes: int,  # noqa: ARG002
    ) -> Descriptor | None:
        """Lock the idle buffer's own file and return it, or None if it cannot be written again.

        It waits for readers of the file, for `reader_timeout_s` at most.
        """
        return None

    def make(self, path: Path, num_bytes: int) -> Descriptor:
        """Make a weights file, with room for ``num_bytes`` where that can be reserved.

        Raises:
            StoreFullError: there is no room.
            StoreAccessError: it cannot be made.
        """
        file = filesystem.make_file(path, self.access)
        try:
            self._make_room(file, path, num_bytes)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self.open[path] = file
        return file

    @abstractmethod
    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:
        """Reserve room for a file, or refuse it for lack of room."""

    @abstractmethod
    def sweep(
        self, directory: str, *, keep: Collection[Path], replaced: Manifest | None = None
    ) -> None:
        """Remove, now or later, files of a buffer or deltas that no manifest names.

        Args:
            directory: a buffer, or the deltas'.
            keep: files that stay.
            replaced: manifest that named files until now, in this directory or another.
        """

    def note_flip(self) -> None:  # noqa: B027 - readers of a local mount see a write at once
        """Note that a version was published just now."""

    def remove_unneeded(self) -> None:  # noqa: B027 - on a local mount no file is left
        """Remove files that were left for their readers and that no reader needs any more.

        Call it after a manifest was replaced, never before.
        """

    def forget(self, file: Descriptor) -> None:
        self.open = {path: known for path, known in self.open.items() if known is not file}
        file.close()

    def close_at(self, path: Path) -> None:
        """Close the file at ``path``, just before it is removed; see `replace_file`."""
        if (file := self.open.get(path)) is not None:
            self.forget(file)

    def close(self) -> None:
        for file in self.open.values():
            file.close()
        self.open.clear()

    def all_in(self, directory: str) -> list[Path]:
        """Return the files that a writer may have made there, and no others."""
        is_ours = (
            places.is_delta_file if directory == places.DELTAS_DIRECTORY else places.is_weights_file
        )
        return [
            path
            for path in filesystem.list_matching(self.store.root / directory, "*")
            if is_ours(path.name) and (path.is_symlink() or not path.is_dir())
        ]

    def named_by(self, buffer: str, manifest: Manifest) -> list[Path]:
        """All files that a buffer's manifest names: weights, parts of them, deltas."""
        deltas = self.store.root / places.DELTAS_DIRECTORY
        return [
            *parts_of(self.store.weights_path(buffer, manifest)),
            *(deltas / places.delta_file(version) for version in manifest.chain[1:]),
        ]


def parts_of(path: Path) -> list[Path]:
    """The weights file at ``path``, and its parts."""
    files = filesystem.list_matching(path.parent, "weights-*.td")
    return [path, *(file for file in files if places.is_part_of(file.name, path.name))]


def _has_second_name(file: Descriptor) -> bool:
    """Whether a weights file has a second name, as a kept version's does."""
    return os.fstat(file.number).st_nlink > 1


class LocalFiles(WeightsFiles):
    """Each buffer has one file, which is written again unless its layout changes.

    A writer takes an exclusive lock first, and so waits for readers.
    """

    access = os.O_RDWR

    def reuse(
        self, buffer: str, old: Manifest, layout_xxh3: str | None, file_bytes: int
    ) -> Descriptor | None:
        file = self._lock_existing(buffer, old)
        if file is None or self._is_fit(file, old, layout_xxh3, file_bytes):
            return file
        self.forget(file)
        return None

    def _is_fit(
        self, file: Descriptor, old: Manifest, layout_xxh3: str | None, file_bytes: int
    ) -> bool:
        return (
            self.store.medium.can_rewrite_in_place
            # Readers of a network mount take no lock, and rely on it that it stays as it is.
            and not old.is_final
            and old.state == "complete"
            and old.layout_xxh3 == layout_xxh3
            and old.file_bytes == file_bytes
            # A file that someone cut short would be a SIGBUS.
            and os.fstat(file.number).st_size == file_bytes
            and not _has_second_name(file)
        )

    def _lock_existing(self, buffer: str, manifest: Manifest) -> Descriptor | None:
        """Return the buffer's file, locked, or None if there is none or readers hold on to it.

        A reader that outlasts the time-out keeps the bytes it maps: the buffer moves to a new
        file. It learns that it was evicted when it compares generations.
        """
        file = self._open_again(self.store.root / buffer / manifest.file)
        if file is None:
            return None
        if _has_second_name(file):  # its readers need not be waited for
            self.forget(file)
            return None
        if not self._lock_against_readers(file, manifest.version):
            logger.warning(
                "evicting %s from buffer %s of %s (version %d): held for more than %g s",
                self._holders(manifest.version) or "a reader",
                buffer,
                self.store.root,
                manifest.version,
                self.reader_timeout_s,
            )
            self.forget(file)
            return None
        return file

    def _lock_against_readers(self, file: Descriptor, version: int) -> bool:
        """Lock a weights file when its readers are done; a wait above a second is logged."""
        patience_s = self.reader_timeout_s
        quiet_s = min(patience_s, _QUIET_WAIT_S)
        if filesystem.lock_within(file.number, quiet_s):
            return True
        if quiet_s == patience_s:
            return False
        readers = self._holders(version) or "a reader"
        message = "waiting up to %g s for %s, which reads version %d of %s"
        logger.info(message, patience_s, readers, version, self.store.root)
        return filesystem.lock_within(file.number, patience_s - quiet_s)

    def _open_again(self, path: Path) -> Descriptor | None:
        known = self.open.get(path)
        try:
            if known is not None and os.path.samestat(os.fstat(known.number), path.stat()):
                return known
            if known is not None:
                self.forget(known)
            owner_only = self.store.owner_only
            file = filesystem.open_regular(path, os.O_RDWR, owner_only=owner_only)
        except FileNotFoundError:
            return None
        except StoreCorruptError as error:
            logger.warning("making a new weights file: %s", str(error))
            return None
        self.open[path] = file
        return file

    def _holders(self, version: int) -> str:
        return ", ".join(
            f"receiver {record.receiver} (pid {record.pid}, {record.host})"
            for record in self.store.readers()
            if record.held is not None and record.held.number == version
        )

    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:
        # Locked before another process knows its name.
        filesystem.try_lock(file.number, exclusive=True)
        if num_bytes:
            filesystem.allocate(file.number, num_bytes, path)

    def sweep(
        self,
        directory: str,
        *,
        keep: Collection[Path],
        replaced: Manifest | None = None,  # noqa: ARG002
    ) -> None:
        """Unlink the files at once: no reader looks for them, and mappings keep the bytes."""
        # A file that another process has removed takes room for as long as it is open here.
        opened = [path for path in self.open if path.parent == self.store.root / directory]
        for path in {*self.all_in(directory), *opened}:
            if path not in keep:
                self.close_at(path)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
