"""`RecordFile`: what one receiver says of itself in the store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from dbuffer import filesystem
from dbuffer.buffer import RECEIVERS_DIRECTORY, SCRATCH_DIRECTORY
from dbuffer.errors import StoreAccessError, StoreNotFoundError
from dbuffer.filesystem import OpenFiles
from dbuffer.manifest import ReceiverRecord, encode

logger = logging.getLogger(__name__)


class RecordFile:
    """``receivers/ID.json``, for the sender, for ``dbuffer status`` and for who drives an engine.

    A store that cannot be written to takes no record: that is logged once, and weights flow on.
    """

    def __init__(self, store: Path, receiver_id: str) -> None:
        self._directory = store / RECEIVERS_DIRECTORY
        self._scratch = store / SCRATCH_DIRECTORY
        self._file = self._directory / f"{receiver_id}.json"
        self._lock = threading.Lock()
        self._can_write = True
        self._record = ReceiverRecord(
            receiver=receiver_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            applied_version=None,
            held_version=None,
            updated_at=time.time(),
        )

    @property
    def current(self) -> ReceiverRecord:
        """What was last set."""
        return self._record

    def set(self, **changes: Any) -> None:
        """Change fields of the record; :meth:`write` makes them seen."""
        with self._lock:
            self._record = dataclasses.replace(self._record, **changes)

    def write(self, **changes: Any) -> None:
        """Change fields and replace the file; where there is no store yet, a later write does."""
        self.set(**changes)
        # Not Path.is_dir(), which raises what a network mount may answer.
        if not os.path.isdir(self._directory):  # noqa: PTH112
            return
        try:
            with self._lock:
                self._record = dataclasses.replace(self._record, updated_at=time.time())
                self._replace()
        except (StoreAccessError, StoreNotFoundError) as error:
            if self._can_write:
                receiver = self._record.receiver
                logger.warning("receiver %s cannot acknowledge: %s", receiver, error)
            self._can_write = False
        else:
            self._can_write = True

    @functools.cached_property
    def _open_files(self) -> OpenFiles | None:
        return filesystem.open_files_for(self._directory)

    def _replace(self) -> None:
        filesystem.replace_file(
            self._file, encode(self._record), scratch=self._scratch, open_files=self._open_files
        )

    def close(self) -> None:
        """Let go of the file; it stays, and may be written again."""
        if self._open_files is not None:
            self._open_files.close()

    def remove(self) -> None:
        """Take the file away, where there is one: this receiver is gone, and meant to be."""
        if self._record.pid != os.getpid():  # a fork's parent is still there
            return
        self.close()
        with contextlib.suppress(OSError):
            self._file.unlink()
