"""Stores of a collector's model below the scheme's address, and a trainer's publishing into them.

``ADDRESS/MODEL`` is the store that all workers of a model follow. ``ADDRESS/MODEL~worker-N`` is
worker N's own, written when weights are for that worker alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dbuffer.errors import OptionError
from dbuffer.format.places import POINTER_FILE
from dbuffer.integrations.torchrl.extraction import Extracted, VersionInfo
from dbuffer.integrations.torchrl.options import TransportOptions
from dbuffer.publish.sender import WeightSender
from dbuffer.store.buffer import DoubleBuffer


@dataclass(frozen=True, slots=True)
class ModelStores:
    """Directories of one model's stores."""

    address: Path
    model_id: str
    remote: Path | None = None
    """Address that this one mirrors on its node; None: it mirrors none."""

    @property
    def name(self) -> str:
        """The model's id, which may be a path of attributes, as a file's name."""
        return quote(self.model_id, safe="")

    @property
    def for_all(self) -> Path:
        return self.address / self.name

    def for_worker(self, worker_idx: int | None) -> Path:
        """Return the store of one worker, counted from 0."""
        return self.address / f"{self.name}~{receiver_id(worker_idx)}"

    def mirrored(self, store: Path) -> Path:
        """Return the store that one of these mirrors, or the same one without a mirror."""
        return store if self.remote is None else self.remote / store.name


def receiver_id(worker_idx: int | None) -> str:
    """Return a worker's name among a store's receivers."""
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


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """Published version, and the workers that must apply it."""

    sender: WeightSender
    version: int
    workers: tuple[int, ...]


class ModelPublisher:
    """Publishes for all workers of a model, or for some of them.

    Args:
        stores: the model's stores.
        num_workers: workers to wait for, counted from 0.
        options: of the senders.
        last_version: the newest version for all workers that is published; 0: none.
    """

    def __init__(
        self,
        stores: ModelStores,
        num_workers: int,
        options: TransportOptions,
        *,
        last_version: int,
    ) -> None:
        self._stores = stores
        self._options = options
        self._workers = tuple(range(num_workers))
        self._for_all = options.make_sender(stores.for_all)
        self._for_worker: dict[int, WeightSender] = {}
        self._last_version = last_version

    def publish(
        self, weights: Extracted, workers: Iterable[int] | None = None, *, is_initial: bool = False
    ) -> list[PublishedVersion]:
        chosen = self._workers if workers is None else tuple(dict.fromkeys(workers))
        if unknown := set(chosen) - set(self._workers):
            raise OptionError(
                f"unknown worker {min(unknown)}: there are {len(self._workers)} workers"
            )
        if workers is None or set(chosen) == set(self._workers):
            info = VersionInfo(extra_state=weights.extra_state, is_initial=is_initial)
            sent = self._for_all.send(weights.tensors, metadata=info.to_metadata())
            self._last_version = sent.version
            return [PublishedVersion(self._for_all, sent.version, self._workers)]
        info = VersionInfo(
            extra_state=weights.extra_state,
            is_initial=is_initial,
            after_version=self._last_version,
        )
        published = []
        for worker in chosen:
            if worker not in self._for_worker:
                store = self._stores.for_worker(worker)
                self._for_worker[worker] = self._options.make_sender(store)
            sender = self._for_worker[worker]
            sent = sender.send(weights.tensors, metadata=info.to_metadata())
            published.append(PublishedVersion(sender, sent.version, (worker,)))
        return published

    def wait_present(self, timeout_s: float) -> None:
        """Wait until all workers have opened the store."""
        self.wait([PublishedVersion(self._for_all, 0, self._workers)], timeout_s)

    def wait(self, published: Iterable[PublishedVersion], timeout_s: float) -> None:
        """Wait until the workers of each version have applied it."""
        deadline = time.monotonic() + timeout_s
        for item in published:
            item.sender.wait_applied(
                item.version,
                receivers=[receiver_id(worker) for worker in item.workers],
                timeout_s=max(0.0, deadline - time.monotonic()),
            )

    def shutdown(self) -> None:
        for sender in (self._for_all, *self._for_worker.values()):
            sender.close()
