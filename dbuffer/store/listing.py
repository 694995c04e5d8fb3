"""Reading the records of a store: one, or a listing of all receivers'."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dbuffer.errors import StoreAccessError, StoreNotFoundError
from dbuffer.format import places
from dbuffer.format.manifest import (
    MAX_RECORD_BYTES,
    UNDECODABLE,
    ReceiverRecord,
    RecordT,
    decode,
)
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.filesystem import os_errors

logger = logging.getLogger(__name__)

_MTIME_GRANULARITY_S = 1.0
"""Longer than the clock of any filesystem takes from one file time to the next; some servers count
whole seconds."""

_FileState = tuple[int, ...]
"""State of a file that changes whenever the file is replaced or written."""


def read_record(kind: type[RecordT], path: Path, *, owner_only: bool) -> RecordT | None:
    """Read a record of a store, if there is one."""
    try:
        with os_errors("read", path):
            data = filesystem.read_small(path, MAX_RECORD_BYTES, owner_only=owner_only)
    except StoreNotFoundError:
        return None
    try:
        return decode(kind, data)
    except UNDECODABLE as error:
        raise type(error)(f"{path}: {error}") from None


class RecordListing:
    """Records of a store's receivers. Only changed files are read again."""

    def __init__(self, directory: Path, *, owner_only: bool) -> None:
        self._directory = directory
        self._owner_only = owner_only
        self._known: dict[str, tuple[_FileState | None, ReceiverRecord | None]] = {}
        """Records that were read last by the names of their files, with the files' states."""

    def records(self, now: float) -> list[ReceiverRecord]:
        """Return all usable records; ``now`` is by the clock that files' times are of."""
        known: dict[str, tuple[_FileState | None, ReceiverRecord | None]] = {}
        for entry in self._entries():
            try:
                state = _file_state(entry.stat(follow_symlinks=False), now)
            except OSError:  # it was removed just now
                continue
            known_state, record = self._known.get(entry.name, (None, None))
            if state is None or state != known_state:
                record = self._read_usable(entry.name)
            known[entry.name] = state, record
        self._known = known  # at once: another thread may list the records, too
        return [record for _, record in known.values() if record is not None]

    def records_of(self, receiver_id: str) -> list[ReceiverRecord]:
        """Return the usable records of one receiver id, in the order of their last writes.

        Only their files are read.
        """
        names = [e.name for e in self._entries() if places.receiver_of(e.name) == receiver_id]
        # By the files' times, which come from one clock; times in records come from many.
        names.sort(key=lambda name: filesystem.touched_at(self._directory / name))
        return [record for name in names if (record := self._read_usable(name)) is not None]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os_errors("list", self._directory), os.scandir(self._directory) as entries:
                records = [e for e in entries if e.name.endswith(".json") and e.name[0] != "."]
        except StoreNotFoundError:
            return []
        return sorted(records, key=lambda entry: entry.name)

    def _read_usable(self, name: str) -> ReceiverRecord | None:
        try:
            path = self._directory / name
            return read_record(ReceiverRecord, path, owner_only=self._owner_only)
        except (*UNDECODABLE, StoreAccessError) as error:
            log_once(logger, "ignoring an unusable record, remove it: %s", str(error))
            return None


def _file_state(status: os.stat_result, now: float) -> _FileState | None:
    """Return a file's state, or None if a later change may leave no trace in it."""
    # Two changes within one tick of the clock give one time, and maybe one inode.
    if now - max(status.st_mtime, status.st_ctime) < _MTIME_GRANULARITY_S:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
