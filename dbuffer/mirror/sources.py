"""Sources that a mirror follows: `StoreSource`, and a bucket's `BucketSource`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeAlias

from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Pointer
from dbuffer.format.places import MIRROR_LOCK_FILE
from dbuffer.mirror.download import BucketReceiver, BucketSource, OpenBucketVersion
from dbuffer.mirror.relay import StoreRecords
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.open_version import OpenStoreVersion
from dbuffer.store.records import OwnRecord

logger = logging.getLogger(__name__)

SWAPPED = "did you swap source and target? If not, name another target"


class StoreSource:
    """A store that a mirror follows."""

    def __init__(
        self, root: Path, poll_interval_s: float, num_threads: int, *, allow_shared_store: bool
    ) -> None:
        self.store = DoubleBuffer(root, allow_shared_store=allow_shared_store)
        self._poll_interval_s = poll_interval_s
        self._num_threads = num_threads
        self._allow_shared_store = allow_shared_store

    @property
    def name(self) -> str:
        return str(self.store.root)

    def newest(self) -> Pointer | None:
        return self.store.newest_pointer() if self.store.exists() else None

    def copied_from(self) -> str | None:
        """Return the source of the mirror that published its newest version, or None."""
        pointer = self.store.undamaged_pointer()
        manifest = None if pointer is None else self.store.undamaged_manifest(pointer.buffer)
        if manifest is None or not manifest.is_copy:
            return None
        try:
            return os.fsdecode((self.store.root / MIRROR_LOCK_FILE).read_bytes())
        except OSError:
            return None

    def open_receiver(self, name: str) -> WeightReceiver:
        return WeightReceiver(
            self.store.root,
            receiver_id=name,
            poll_interval_s=self._poll_interval_s,
            num_threads=self._num_threads,
            allow_shared_store=self._allow_shared_store,
        )

    def records(self, own: OwnRecord) -> StoreRecords:  # noqa: ARG002 - it has its own file
        return StoreRecords(self.store)


Upstream: TypeAlias = StoreSource | BucketSource
"""Source of a mirror."""
UpstreamReceiver: TypeAlias = WeightReceiver | BucketReceiver
"""Receiver that a mirror follows its source with."""
OpenUpstream: TypeAlias = OpenStoreVersion | OpenBucketVersion
"""Version of a source that is held for reading."""


def deltas_since(
    last: VersionId | None, held: OpenUpstream, layout: Layout, target: str
) -> list[VersionId]:
    """Return the versions whose deltas lead from a target's last version to a held one.

    If none do, although there are deltas, the log says why.

    Args:
        last: version that was copied last, or None.
        held: version to be copied.
        layout: layout of its copy.
        target: name of the target.
    """
    manifest = held.manifest
    if not manifest.chain:
        return []
    if last is None:
        reason = "this mirror has copied no version before it"
    elif last not in manifest.chain[:-1]:
        reason = f"none leads from version {last.number}, which was copied last"
    elif manifest.layout_xxh3 != layout.xxh3:
        reason = "its tensors are in parts, and are joined in the copy"
    else:
        return manifest.deltas_after(last)
    logger.info("%s: version %d has no delta: %s", target, manifest.version, reason)
    return []
