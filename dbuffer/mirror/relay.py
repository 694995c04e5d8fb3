"""`AcknowledgementRelay`: copies receivers' records from a local store to the one it mirrors.

A sender waits for receivers by the records in its own store; a mirror's readers have theirs in the
local store. Relays chain as mirrors do: one of the next store finds these records again. A relay
keeps a record alive for as long as the receiver itself may live; then it copies the record's last
state, and with it that the receiver has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dbuffer.errors import DBufferError, StoreNotFoundError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.runtime.timing import TIMING
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import PublishedRecord

logger = logging.getLogger(__name__)


_Key = tuple[str, str]
"""Id and token of a receiver."""


class AcknowledgementRelay:
    """Relays in a thread of its own, from construction to :meth:`close`."""

    def __init__(self, local: DoubleBuffer, remote: Path) -> None:
        self._local = local
        self._remote = DoubleBuffer(remote, allow_shared_store=True)
        self._records: list[ReceiverRecord] = []
        self._files: dict[_Key, PublishedRecord] = {}
        self._touched_at = time.monotonic()
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay what there is, and stop."""
        self._stop.set()
        self._thread.join()
        for file in self._files.values():
            file.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(TIMING.relay_s)
            try:
                self._relay()
                self._problem = None
            # The last two: no memory, or no more threads, for now.
            except (DBufferError, OSError, MemoryError, RuntimeError) as error:
                if str(error) != self._problem:  # logged once; it is tried again
                    remote = self._remote.root
                    logger.warning("cannot relay acknowledgements to %s: %s", remote, error)
                self._problem = str(error)

    def _relay(self) -> None:
        # Before records are read: a record that is read after its receiver's end is the last one.
        ended = {_key(record) for record in self._records if not self._local.may_live(record)}
        self._records = self._local.receivers()
        records = {_key(record): _relayed(record, ended) for record in self._records}
        for key in self._files.keys() - records.keys():
            self._files.pop(key).remove()
        # Not Path.is_dir(), which raises what a network mount may answer.
        if not os.path.isdir(self._remote.root / RECEIVERS_DIRECTORY):  # noqa: PTH112
            return
        for key, record in records.items():
            self._update(self._files.setdefault(key, PublishedRecord(self._remote, *key)), record)
        if time.monotonic() - self._touched_at > TIMING.heartbeat_s:
            self._touched_at = time.monotonic()
            for file in self._files.values():
                if file.record is not None and not file.record.has_ended:
                    file.show_life()

    def _update(self, file: PublishedRecord, record: ReceiverRecord) -> None:
        """Write a record, if more has changed in it than its time."""
        before = file.record
        if before is not None and record == replace(before, updated_at=record.updated_at):
            return
        with contextlib.suppress(StoreNotFoundError):  # the store is being removed
            file.put(record)
            if record.has_ended:
                file.close()


def _key(record: ReceiverRecord) -> _Key:
    return record.receiver, record.token


def _relayed(record: ReceiverRecord, ended: Collection[_Key]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    has_ended = record.has_ended or _key(record) in ended
    return replace(record, held_version=None, stats={}, is_relayed=True, has_ended=has_ended)
