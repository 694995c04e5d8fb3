"""`AcknowledgementRelay`: copies receivers' records from a local store to the one it mirrors.

A sender waits for receivers by the records in its own store; a mirror's readers have theirs in the
local store. Relays chain as mirrors do: one of the next store finds these records again. A relay
keeps a record alive for as long as the receiver itself may live; then it copies the record's last
state, and with it that the receiver has ended.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from dbuffer.errors import DBufferError, StoreBusyError, StoreNotFoundError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.format.places import RECEIVERS_DIRECTORY
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.liveness import HEARTBEAT_S, Process
from dbuffer.store.records import KeptFile

logger = logging.getLogger(__name__)

RELAY_INTERVAL_S = 0.05
"""Interval at which local records are read; only those that have changed go over the network."""

_NAME_CHARACTERS = 110
"""Characters that are kept of a name with a suffix."""


class AcknowledgementRelay:
    """Relays in a thread of its own, from construction to :meth:`close`."""

    def __init__(self, local: DoubleBuffer, remote: Path) -> None:
        self._local = local
        self._remote = remote
        self._token = secrets.token_hex(4)
        self._records: list[ReceiverRecord] = []
        self._relayed: dict[str, ReceiverRecord] = {}
        self._kept: dict[str, KeptFile] = {}
        self._names: dict[str, str] = {}
        self._touched_at = time.monotonic()
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay what there is, and stop."""
        self._stop.set()
        self._thread.join()
        for kept in self._kept.values():
            kept.sign.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(RELAY_INTERVAL_S)
            try:
                self._relay()
                self._problem = None
            # The last two: no memory, or no more threads, for now.
            except (DBufferError, OSError, MemoryError, RuntimeError) as error:
                if str(error) != self._problem:  # logged once; it is tried again
                    logger.warning("cannot relay acknowledgements to %s: %s", self._remote, error)
                self._problem = str(error)

    def _relay(self) -> None:
        # Before the records are read: a record that is read after its process's end is final.
        ended = {Process.of(record) for record in self._records if not self._local.may_live(record)}
        self._records = self._local.receivers()
        records = {record.receiver: _relayed(record, ended) for record in self._records}
        for name in self._relayed.keys() - records.keys():
            self._kept.pop(name).remove()
            del self._relayed[name]
        # Not Path.is_dir(), which raises what a network mount may answer.
        if not os.path.isdir(self._remote / RECEIVERS_DIRECTORY):  # noqa: PTH112
            return
        for name, record in records.items():
            known = self._relayed.get(name)
            if known is None or record != dataclasses.replace(known, updated_at=record.updated_at):
                self._write(name, record)
        if time.monotonic() - self._touched_at > HEARTBEAT_S:
            self._touched_at = time.monotonic()
            for name, record in self._relayed.items():
                if record.relay_state == "living":
                    self._kept[name].sign.touch()

    def _write(self, name: str, record: ReceiverRecord) -> None:
        try:
            self._put(name, record)
        except StoreNotFoundError:  # the store is being removed
            return
        except StoreBusyError as error:
            # Another node's receiver has the same name.
            self._names[name] = f"{name:.{_NAME_CHARACTERS}}-{self._token}"
            logger.warning("%s; relayed as %s", error, self._names[name])
            del self._kept[name]
            self._put(name, record)
        self._relayed[name] = record
        if record.relay_state == "ended":
            self._kept[name].sign.close()

    def _put(self, name: str, record: ReceiverRecord) -> None:
        there = self._names.get(name, name)
        kept = self._kept.setdefault(name, KeptFile(self._remote, there))
        part_of = record.part_of and self._names.get(record.part_of, record.part_of)
        kept.write(dataclasses.replace(record, receiver=there, part_of=part_of))


def _relayed(record: ReceiverRecord, ended: Collection[Process]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    life: Literal["living", "ended"] = "ended" if Process.of(record) in ended else "living"
    return dataclasses.replace(record, held_version=None, stats={}, relay_state=life)
