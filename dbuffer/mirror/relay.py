"""`AcknowledgementRelay`: carries receivers' records from a mirrored store to the one it mirrors.

A sender waits for receivers in its own store's records; those of a mirror's readers are in the
mirror's. Relays chain as mirrors do: one of the next store finds these records again. A relay
stands behind what it carries for as long as the receiver itself may live.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from dbuffer.errors import DBufferError, ReceiverActiveError, StoreNotFoundError
from dbuffer.format.manifest import RECEIVERS_DIRECTORY, ReceiverRecord
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.liveness import HEARTBEAT_S
from dbuffer.store.records import KeptFile

logger = logging.getLogger(__name__)

RELAY_INTERVAL_S = 0.05
"""How often local records are looked at; a network sees only those that have changed."""

_NAME_CHARACTERS = 110
"""Of a name that something is added to."""


class AcknowledgementRelay:
    """Relays in a thread of its own, from construction to :meth:`close`."""

    def __init__(self, local: DoubleBuffer, remote: Path) -> None:
        self._local = local
        self._remote = remote
        self._token = secrets.token_hex(4)
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
            except (DBufferError, OSError) as error:
                if str(error) != self._problem:  # logged once; it is tried again
                    logger.warning("cannot relay acknowledgements to %s: %s", self._remote, error)
                self._problem = str(error)

    def _relay(self) -> None:
        records = {record.receiver: _without_details(record) for record in self._local.receivers()}
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
            self._stand_behind_the_living()

    def _write(self, name: str, record: ReceiverRecord) -> None:
        try:
            self._put(name, record)
        except StoreNotFoundError:  # the store is being removed
            return
        except ReceiverActiveError as error:
            # That of another node, whose receivers have the same names.
            self._names[name] = f"{name:.{_NAME_CHARACTERS}}-{self._token}"
            logger.warning("%s; carried as %s", error, self._names[name])
            del self._kept[name]
            self._put(name, record)
        self._relayed[name] = record

    def _put(self, name: str, record: ReceiverRecord) -> None:
        there = self._names.get(name, name)
        kept = self._kept.setdefault(name, KeptFile(self._remote, there))
        part_of = record.part_of and self._names.get(record.part_of, record.part_of)
        kept.write(dataclasses.replace(record, receiver=there, part_of=part_of))

    def _stand_behind_the_living(self) -> None:
        for name, record in self._relayed.items():
            sign = self._kept[name].sign
            if self._local.may_live(record):
                sign.touch()
            else:
                sign.close()


def _without_details(record: ReceiverRecord) -> ReceiverRecord:
    """What concerns the sender. A version that is held is held in the mirror, and nowhere else."""
    return dataclasses.replace(record, held_version=None, stats={})
