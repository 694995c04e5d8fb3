"""`StoreTarget`: a store as a mirror's target, and the stores that it refuses."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from pathlib import Path

from dbuffer.errors import OptionError, StoreCorruptError, WaitTimeoutError
from dbuffer.format import places
from dbuffer.format.lineage import Relation, relation
from dbuffer.format.manifest import Pointer
from dbuffer.mirror.local_copy import LocalCopy
from dbuffer.mirror.options import SWAPPED, MirrorOptions
from dbuffer.mirror.sources import Source, SourceReceiver, StoreSource
from dbuffer.store import filesystem, kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.contents import Contents
from dbuffer.store.filesystem import Descriptor, is_locked
from dbuffer.store.foreign import require_own_directory
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)


class OneStoreError(OptionError):
    """Source and target are one store, seen through two mounts: fine for readers."""


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
        """Whether it is this mirror that copies."""
        return self._lock is not None

    def elect(self, source: Source) -> bool:
        """Become the mirror of the target, if no other is.

        Raises:
            OptionError: it is a sender's.
            WaitTimeoutError: it holds versions of an earlier run, and the source holds none.
        """
        root = self._store.root
        if self._store.exists() and not self._is_source(source):
            _require_no_senders(source, self._store)
        filesystem.make_directory(root, parents=True)
        require_own_directory(root)
        self._store.check()
        lock = filesystem.take_lock(
            root / places.MIRROR_LOCK_FILE, "mirror's", may_lack_locks=False
        )
        if lock is None:
            return False
        try:
            _require_source(source, self._store)
            if _has_forked(source, self._store):
                # Before a reader takes the last run's version for the newest.
                logger.warning("%s: withdrawing what does not lead to %s", root, source.name)
                with contextlib.closing(self._writer()) as writer:
                    writer.withdraw()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        with contextlib.suppress(OSError):  # no room, say
            os.ftruncate(lock.number, 0)
            filesystem.write_at(lock.number, 0, os.fsencode(source.name))
        return True

    def resign(self) -> None:
        """Let another mirror be elected."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_removed(self) -> bool:
        """Whether it was removed since this mirror was elected, which is over with it."""
        path = self._store.root / places.MIRROR_LOCK_FILE
        return self._lock is not None and not filesystem.is_at(self._lock, path)

    def is_fit(self, source: Source) -> bool:
        """Whether its version leads to the source's, as far as both can be read."""
        return not _has_forked(source, self._store)

    def is_prepared(self, source: Source) -> bool:
        """Whether another mirror is copying a version of the source into it."""
        newest = source.newest()
        manifests = Contents(self._store).manifests.values()
        return newest is not None and any(
            manifest is not None
            and manifest.state == "writing"
            and newest.lineage.reaches(manifest.id)
            for manifest in manifests
        )

    def newest(self) -> Pointer | None:
        return self._store.newest_pointer() if self._store.exists() else None

    def begin(self, source: Source, receiver: SourceReceiver) -> LocalCopy:
        """Become the writer, once there is something to write."""
        if self._is_source(source):
            raise OneStoreError(
                f"{source.name} and {self.name} are one store under two names: "
                "there is nothing to mirror"
            )
        _require_no_senders(source, self._store)
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


def _require_no_senders(source: Source, local: DoubleBuffer) -> None:
    """Refuse a local store that a sender has open, or published in last.

    Raises:
        OptionError: it is a sender's.
    """
    of_sender = state_of_senders(local)
    if of_sender is not None:
        raise OptionError(
            f"{local.root} {of_sender}, and {source.name} was to be copied into it: {SWAPPED}"
        )


def state_of_senders(local: DoubleBuffer) -> str | None:
    """Return why a store counts as a sender's, or None if it is a mirror's or new."""
    pointer = local.undamaged_pointer()
    manifest = None if pointer is None else local.undamaged_manifest(pointer.buffer)
    if manifest is not None and not manifest.is_copy:
        return f"holds version {manifest.version} of a sender, which is no mirror's copy"
    return "is open for writing by a sender" if _has_sender(local) else None


def _has_sender(local: DoubleBuffer) -> bool:
    """Whether a process other than a mirror has the writer's lock.

    A mirror takes its own lock before it takes the writer's, and gives it back after it.
    """
    writers = local.root / places.WRITER_LOCK_FILE
    mirrors = local.root / places.MIRROR_LOCK_FILE
    # Looked at once more, because a mirror may have ended between the first two looks.
    return is_locked(writers) and not is_locked(mirrors) and is_locked(writers)


def _has_forked(source: Source, local: DoubleBuffer) -> bool:
    """Whether the version that a mirror left in the local store does not lead to the source's."""
    pointer, newest = _newest(local), source.newest()
    if pointer is None or newest is None:
        return False
    return relation(pointer.lineage, newest.lineage) is Relation.FORKED


def _newest(local: DoubleBuffer) -> Pointer | None:
    """Return the version that a local store's readers find, or None if its pointer is damaged."""
    with contextlib.suppress(StoreCorruptError):
        return local.newest_pointer()
    return None


def _require_source(source: Source, local: DoubleBuffer) -> None:
    """Refuse a local store with versions while the source has none, if no process reads it.

    If one does, the network may be away.

    Raises:
        WaitTimeoutError: the source holds no version, and the local store does.
    """
    if _newest(local) is None or source.newest() is not None:
        return
    if any(local.may_live(record) for record in local.receivers()):
        return
    remedy = "name another target"
    if not any(kept.is_pinned(local, buffer) for buffer in local.kept()):
        remedy = f"remove it (rm -r {shlex.quote(str(local.root))}), or {remedy}"
    raise WaitTimeoutError(
        f"{local.root} holds versions of an earlier run, and {source.name} holds none yet (is it "
        f"the right one?): {remedy}"
    )
