"""`AcknowledgementRelay`: carries receivers' records from a mirrored store to the one it mirrors.

A sender waits for receivers in its own store's records; those of a mirror's readers are in the
mirror's. Relays chain as mirrors do: one of the next store finds these records again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from pathlib import Path

from dbuffer import filesystem
from dbuffer.buffer import RECEIVERS_DIRECTORY, SCRATCH_DIRECTORY, DoubleBuffer
from dbuffer.errors import DBufferError, StoreNotFoundError
from dbuffer.filesystem import OpenFiles
from dbuffer.manifest import ReceiverRecord, encode

logger = logging.getLogger(__name__)

RELAY_INTERVAL_S = 0.05
"""How often local records are looked at; a network sees only those that have changed."""


class AcknowledgementRelay:
    """Relays in a thread of its own, from construction to :meth:`close`."""

    def __init__(self, local: DoubleBuffer, remote: Path) -> None:
        self._local = local
        self._remote = remote / RECEIVERS_DIRECTORY
        self._scratch = remote / SCRATCH_DIRECTORY
        self._relayed: dict[str, ReceiverRecord] = {}
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay what there is, and stop."""
        self._stop.set()
        self._thread.join()
        if self._open_files is not None:
            self._open_files.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(RELAY_INTERVAL_S)
            try:
                self._relay()
                self._problem = None
            except (DBufferError, OSError) as error:
                if str(error) != self._problem:  # told once; it is tried again
                    logger.warning("cannot relay acknowledgements to %s: %s", self._remote, error)
                self._problem = str(error)

    def _relay(self) -> None:
        records = {record.receiver: _without_details(record) for record in self._local.receivers()}
        for name in self._relayed.keys() - records.keys():
            self._remove(self._path_of(name))
            del self._relayed[name]
        # Not Path.is_dir(), which raises what a network mount may answer.
        if not os.path.isdir(self._remote):  # noqa: PTH112
            return
        for name, record in records.items():
            known = self._relayed.get(name)
            if known is None or record != dataclasses.replace(known, updated_at=record.updated_at):
                self._write(name, record)

    def _write(self, name: str, record: ReceiverRecord) -> None:
        path = self._path_of(name)
        try:
            filesystem.replace_file(
                path, encode(record), scratch=self._scratch, open_files=self._open_files
            )
        except StoreNotFoundError:  # the store is being removed
            return
        self._relayed[name] = record

    @functools.cached_property
    def _open_files(self) -> OpenFiles | None:
        return filesystem.open_files_for(self._remote)

    def _remove(self, path: Path) -> None:
        if self._open_files is not None:
            self._open_files.let_go(path)
        path.unlink(missing_ok=True)

    def _path_of(self, name: str) -> Path:
        return self._remote / f"{name}.json"


def _without_details(record: ReceiverRecord) -> ReceiverRecord:
    """What concerns the sender. A version that is held is held in the mirror, and nowhere else."""
    return dataclasses.replace(record, held_version=None, stats={})
