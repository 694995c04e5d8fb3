"""`Incoming`: one rollout worker's half of a sync. It takes that sync's version, or none."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

from dbuffer.errors import DBufferError, NotReadyError, VersionTimeoutError
from dbuffer.integrations.verl.configuration import Configuration
from dbuffer.integrations.verl.sending import SYNC
from dbuffer.mirror.mirror import Mirror
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.02
"""How often a store is looked at for a version that is being published."""


class Incoming:
    """Holds the version of one sync after the other, each until its engine has loaded it."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._receiver: WeightReceiver | None = None
        self._mirror: Mirror | None = None
        self._sync: str | None = None
        self._looked_at: int | None = None
        self._holding = contextlib.ExitStack()
        self._snapshot: Snapshot | None = None

    def expect(self, sync: str) -> None:
        """Begin a sync. What an earlier one holds, which nobody finished, is not acknowledged.

        Raises:
            StoreMismatchError: ``local_store`` holds another store's versions, and is in use.
        """
        self._drop()
        if self._receiver is None:
            self._receiver = self._open()
        self._sync = sync

    def waiting(self) -> Iterator[None]:
        """Hold the sync's version. Yields whenever there is time to do something else.

        Nothing but that version is taken: neither an older one, nor that of a sync that failed.

        Raises:
            NotReadyError: no sync has begun.
            VersionTimeoutError: it did not come in time, or another sync has begun meanwhile.
            StoreReplacedError, StoreCorruptError, ChecksumError: as for `WeightReceiver.open`.
        """
        sync, timeout_s = self._sync, self._configuration.timeout_s
        if sync is None:
            raise NotReadyError("no sync has begun: init_process_group() comes before, each time")
        deadline = time.monotonic() + timeout_s
        while not self._hold(sync):
            if time.monotonic() > deadline:
                raise VersionTimeoutError(
                    f"the version of this sync did not come into {self._configuration.store} "
                    f"within {timeout_s:g} s, the newest there is {self._looked_at}: see whether "
                    "the actor could publish it, and whether this host sees the same directory"
                )
            yield
            if self._sync != sync:
                raise VersionTimeoutError(
                    "another sync has begun before the version of this one came; the actor could "
                    "not publish it, and the rollout engine keeps what it has"
                )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the version that is held: views, valid until it is let go."""
        assert self._snapshot is not None  # noqa: S101 - waiting() has ended
        yield from self._snapshot.tensors.items()

    def finish(self) -> None:
        """The engine has loaded what is held: acknowledge it, and let it go.

        Raises:
            SnapshotEvictedError: loading took longer than the sender waits, and what was loaded
                may be of two versions.
        """
        snapshot, self._snapshot, self._sync = self._snapshot, None, None
        if snapshot is None or self._receiver is None:
            return
        self._holding.close()
        self._receiver.acknowledge(snapshot.version)

    def _open(self) -> WeightReceiver:
        store, local_store = self._configuration.store, self._configuration.local_store
        if local_store is None:
            return WeightReceiver(store)
        self._mirror = Mirror(store, local_store).start()
        return WeightReceiver(local_store)

    def _hold(self, sync: str) -> bool:
        assert self._receiver is not None  # noqa: S101 - a sync has begun
        if self._snapshot is not None:
            return True
        if not self._is_newest_of(sync):
            return False
        opened = self._receiver.open(version=self._looked_at, acknowledge=False)
        self._snapshot = self._holding.enter_context(opened)
        self._snapshot.read_ahead()
        return True

    def _is_newest_of(self, sync: str) -> bool:
        """Look at what is newer than what was looked at; only its manifest is read."""
        assert self._receiver is not None  # noqa: S101 - a sync has begun
        if self._receiver.wait_for_version(self._looked_at, timeout_s=0.0) is None:
            return False
        with self._receiver.hold_seen(self._looked_at) as held:
            if held is None:
                return False
            self._looked_at = held.manifest.version
            return held.manifest.metadata.get(SYNC) == sync

    def _drop(self) -> None:
        self._snapshot = self._sync = None
        try:
            self._holding.close()
        except DBufferError as error:
            # It is not used any more; what is wrong with the store, the next look says too.
            logger.info("a version that nobody finished loading: %s", error)
