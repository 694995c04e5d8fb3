"""Directories of a collector's models below the scheme's address.

``ADDRESS/MODEL`` is the store that all workers of a model follow. ``ADDRESS/MODEL~worker-N`` is
worker N's own, written when weights are for that worker alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dbuffer.format.places import POINTER_FILE
from dbuffer.store.buffer import DoubleBuffer


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """The stores of one model."""

    address: Path
    model_id: str
    remote: Path | None = None
    """The address that this one mirrors on its node, if it is a mirror's."""

    @property
    def name(self) -> str:
        """The model's id, which may be a path of attributes, as a file's name."""
        return quote(self.model_id, safe="")

    @property
    def for_all(self) -> Path:
        return self.address / self.name

    def for_worker(self, worker_idx: int | None) -> Path:
        """The store of one worker, counted from 0."""
        return self.address / f"{self.name}~{receiver_id(worker_idx)}"

    def mirrored(self, store: Path) -> Path:
        """Return the store that a mirror's store copies; other stores as they are."""
        return store if self.remote is None else self.remote / store.name


def receiver_id(worker_idx: int | None) -> str:
    """A worker's name among a store's receivers."""
    return f"worker-{0 if worker_idx is None else worker_idx}"


def versions_below(address: Path, *, allow_shared_store: bool) -> dict[str, int]:
    """Return the newest version of every store directly below ``address``, by the store's name."""
    versions = {}
    for pointer_file in address.glob(f"*/{POINTER_FILE}"):
        store = DoubleBuffer(pointer_file.parent, allow_shared_store=allow_shared_store)
        store.check()
        if (pointer := store.pointer()) is not None:
            versions[store.root.name] = pointer.version
    return versions
