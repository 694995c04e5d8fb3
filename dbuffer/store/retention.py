"""`Retention`: which files of a store stay, and why; all others are removed.

A file stays if the manifest of A, of B or of a kept version names it. A writer removes all others
when it starts (`recover`), and whenever it begins a version (`sweep`). A killed writer leaves:

* half a weights file, named by a manifest in the state ``writing``: removed, or written anew, by
  the next `sweep`;
* a weights file or a delta that no manifest names: by `recover`, and by each `sweep`;
* a kept version that was being dropped: the same, unless it is pinned;
* in ``tmp``, files and directories that were to be renamed: when a writer starts, if they are older
  than a minute (`remove_stale_temporaries`).

On a network mount a reader may still need a file, so it is removed later (`NetworkFiles`).

A kept version stays if it is pinned, or among as many as the writer keeps; see `kept`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from dbuffer.errors import StoreNotFoundError
from dbuffer.format import places
from dbuffer.format.lineage import Lineage
from dbuffer.format.manifest import Manifest
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.contents import Contents
from dbuffer.store.weights_files import WeightsFiles

logger = logging.getLogger(__name__)


class Retention:
    """Removes the files of a store that need not stay, for its writer.

    Args:
        store: the store.
        files: the writer's.
        num_kept: number of versions that are kept besides those in A and B.
        durable: whether a kept version is flushed.
    """

    def __init__(
        self,
        store: DoubleBuffer,
        files: WeightsFiles,
        *,
        num_kept: int,
        durable: bool,
    ) -> None:
        self._store = store
        self._files = files
        self._num_kept = num_kept
        self._durable = durable
        self.spared: str | None = None
        """Buffer of a kept version that stays, because it is being published again."""

    def keep(self, buffer: str, manifest: Manifest) -> None:
        """Keep a version that is about to leave its buffer."""
        try:
            kept.keep(self._store, buffer, manifest, durable=self._durable)
        except StoreNotFoundError as error:
            logger.warning("version %d is not kept: %s", manifest.version, str(error))

    def reasons(self, manifests: Iterable[tuple[str, Manifest | None]]) -> dict[Path, str]:
        """Return the files that manifests name, each with the reason that it stays."""
        return {
            path: f"version {manifest.version} in {buffer}"
            for buffer, manifest in manifests
            if manifest is not None
            for path in self._files.named_by(buffer, manifest)
        }

    def sweep(
        self,
        stay: dict[Path, str],
        newest: Manifest | None,
        next_one: Lineage,
        replaced: tuple[str, Manifest | None] | None,
    ) -> None:
        """Remove what does not stay, as a version begins.

        Call it after the manifest of the buffer was replaced, never before.

        Args:
            stay: files that stay for another reason than a kept version.
            newest: manifest of the newest version, whose kept copy stays.
            next_one: the version that begins. A kept version that does not lead to it was lost, and
                stays only if it is pinned.
            replaced: buffer that gets a new file, or none, and its last manifest.
        """
        let_go = [] if replaced is None else [replaced]
        let_go += self._drop_excess(newest, next_one).items()
        stay = stay | self.reasons(self._store.kept().items())
        for buffer, manifest in let_go:
            self._files.sweep(buffer, keep=stay, replaced=manifest)
        self._files.remove_unneeded()
        self._remove_dropped()
        self._files.sweep(places.DELTAS_DIRECTORY, keep=stay)
        logger.debug("%s: files that stay: %s", self._store.root, stay)

    def recover(self) -> None:
        """Remove what writers that died left behind."""
        # The new writer's record is written by now. An earlier writer that still lives may have
        # published until then; from now on it finds out that it is superseded.
        self._remove_dropped()
        manifests = [*Contents(self._store).manifests.items(), *self._store.kept().items()]
        stay = self.reasons(manifests)
        for directory in (*places.BUFFERS, places.DELTAS_DIRECTORY):
            self._files.sweep(directory, keep=stay)

    def _drop_excess(self, newest: Manifest | None, next_one: Lineage) -> dict[str, Manifest]:
        """Withdraw kept versions beyond the limit, the oldest first, and return them."""
        dropped: dict[str, Manifest] = {}
        num_kept = 0
        for buffer, manifest in reversed(self._store.kept().items()):
            if manifest == newest or kept.is_pinned(self._store, buffer):
                continue
            is_lost = not next_one.reaches(manifest.id)
            num_kept += not is_lost
            must_go = (is_lost or num_kept > self._num_kept) and buffer != self.spared
            if must_go and kept.withdraw(self._store, buffer):
                dropped[buffer] = manifest
        return dropped

    def _remove_dropped(self) -> None:
        """Remove the directories of versions that this writer, or a dead one, dropped.

        A version whose manifest is damaged is lost to all readers, and dropped unless it is pinned.
        """
        for buffer, directory in self._store.kept_directories().items():
            kept.restore_pinned(self._store, buffer)
            if (directory / places.MANIFEST_FILE).exists() and (
                self._store.undamaged_manifest(buffer) is not None
                or kept.is_pinned(self._store, buffer)
            ):
                continue
            self._files.sweep(buffer, keep=())
            if not self._files.all_in(buffer):
                shutil.rmtree(directory, ignore_errors=True)
