"""Stores as a mirror's ends: `StoreSource` and `StoreTarget`."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from dbuffer.errors import OptionError
from dbuffer.format.manifest import Pointer
from dbuffer.format.places import MIRROR_LOCK_FILE
from dbuffer.mirror.ends import MirrorOptions, Source, SourceReceiver
from dbuffer.mirror.local_copy import LocalCopy
from dbuffer.mirror.refusals import has_forked, require_no_senders, require_source
from dbuffer.mirror.relay import StoreRecords
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.foreign import require_own_directory
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)


class OneStoreError(OptionError):
    """Source and target are one store, seen through two mounts: fine for readers."""


class StoreSource:
    """A store that a mirror follows."""

    def __init__(self, root: Path, options: MirrorOptions) -> None:
        self.store = DoubleBuffer(root, allow_shared_store=options.allow_shared_store)
        self._options = options

    @property
    def name(self) -> str:
        return str(self.store.root)

    def exists(self) -> bool:
        return self.store.exists()

    def newest(self) -> Pointer | None:
        return self.store.newest_pointer() if self.store.exists() else None

    def is_copy(self) -> bool:
        pointer = self.store.undamaged_pointer()
        manifest = None if pointer is None else self.store.undamaged_manifest(pointer.buffer)
        return manifest is not None and manifest.is_copy

    def open_receiver(self, name: str) -> WeightReceiver:
        return WeightReceiver(
            self.store.root,
            receiver_id=name,
            poll_interval_s=self._options.poll_interval_s,
            num_threads=self._options.copier.num_threads,
            allow_shared_store=self._options.allow_shared_store,
        )

    def records(self, receiver: SourceReceiver) -> StoreRecords:  # noqa: ARG002 - it has a file
        return StoreRecords(self.store)


class StoreTarget:
    """A store, of a node mostly, in which a mirror publishes.

    Of several mirrors one is elected, by a lock that the kernel drops when its process ends.
    """

    def __init__(self, root: Path, options: MirrorOptions) -> None:
        self._store = DoubleBuffer(root, allow_shared_store=options.allow_shared_store)
        self._options = options
        self._lock: Descriptor | None = None
        """Held by the elected mirror."""

    @property
    def name(self) -> str:
        return str(self._store.root)

    @property
    def is_elected(self) -> bool:
        return self._lock is not None

    def elect(self, source: Source) -> bool:
        root = self._store.root
        if self._store.exists() and not self._is_source(source):
            require_no_senders(source, self._store)
        filesystem.make_directory(root, parents=True)
        require_own_directory(root)
        self._store.check()
        lock = filesystem.take_lock(root / MIRROR_LOCK_FILE, "mirror's", may_lack_locks=False)
        if lock is None:
            return False
        try:
            require_source(source, self._store)
            if has_forked(source, self._store):
                # Before a reader takes the last run's version for the newest.
                logger.warning("%s: withdrawing what does not lead to %s", root, source.name)
                with contextlib.closing(self._writer()) as writer:
                    writer.withdraw()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        return True

    def resign(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_removed(self) -> bool:
        path = self._store.root / MIRROR_LOCK_FILE
        return self._lock is not None and not filesystem.is_at(self._lock, path)

    def is_fit(self, source: Source) -> bool:
        return not has_forked(source, self._store)

    def newest(self) -> Pointer | None:
        return self._store.newest_pointer() if self._store.exists() else None

    def begin(self, source: Source, receiver: SourceReceiver) -> LocalCopy:
        if self._is_source(source):
            raise OneStoreError(
                f"{source.name} and {self.name} are one store under two names: "
                "there is nothing to mirror"
            )
        require_no_senders(source, self._store)
        return LocalCopy(self._writer(), source.records(receiver), self._options)

    def _writer(self) -> BufferWriter:
        return BufferWriter(
            self._store.root,
            durable=False,
            reader_timeout_s=self._options.reader_timeout_s,
            allow_shared_store=self._options.allow_shared_store,
        )

    def _is_source(self, source: Source) -> bool:
        """Whether source and target are one store under two names."""
        if not isinstance(source, StoreSource):
            return False
        remote, local = source.store.undamaged_writer(), self._store.undamaged_writer()
        return remote is not None and local is not None and local.token == remote.token
