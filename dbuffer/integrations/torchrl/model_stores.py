"""Stores of a collector's model, and `ModelPublisher`, which publishes into them.

All workers follow the store ``ADDRESS/MODEL``, where ``ADDRESS`` is the scheme's directory. Worker
N also follows the store ``ADDRESS/MODEL~worker-N``, for weights that are sent only to worker N.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from dbuffer.errors import OptionError, StoreCorruptError
from dbuffer.format.places import POINTER_FILE
from dbuffer.integrations.torchrl.base import TransportOptions
from dbuffer.integrations.torchrl.extraction import Extracted
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.reader import Snapshot
from dbuffer.store.buffer import DoubleBuffer

PublishedVersion: TypeAlias = tuple[WeightSender, int, tuple[int, ...]]
"""Sender of a version, number of the version, and the workers that must apply the version."""

_KEY = "torchrl"
"""Metadata key with two values. ``is_initial``: whether the version is the first of a run (all
versions of one sender process), which does not count as a policy update. ``after_version``: newest
earlier version for all workers."""


def store_of(address: str | Path, model_id: str, worker: int | None = None) -> Path:
    """Return the path of the store of a model's weights for one worker, or by default for all."""
    name = quote(model_id, safe="")  # the id can be an attribute path
    if worker is not None:
        name += f"~{receiver_id(worker)}"
    return Path(address) / name


def receiver_id(worker: int) -> str:
    """Return the id of a worker as a receiver of stores."""
    return f"worker-{worker}"


def versions_below(address: str, options: TransportOptions) -> dict[str, int]:
    """Return the newest version of every store directly below ``address``, by the store's name."""
    versions = {}
    for pointer_file in Path(address).glob(f"*/{POINTER_FILE}"):
        store = DoubleBuffer(pointer_file.parent, allow_shared_store=options.allow_shared_store)
        store.check()
        if (pointer := store.pointer()) is not None:
            versions[store.root.name] = pointer.version
    return versions


def read_metadata(snapshot: Snapshot) -> tuple[bool, int]:
    """Return ``is_initial`` and ``after_version`` from a version's metadata, or their defaults."""
    match snapshot.metadata.get(_KEY):
        case None:
            return False, 0
        case {"is_initial": bool(is_initial), "after_version": int(after_version)}:
            return is_initial, after_version
        case values:
            raise StoreCorruptError(
                f"{snapshot.path}: invalid {_KEY!r} in the version's metadata: {values!r:.200}"
            )


class ModelPublisher:
    """Publishes a model's weights for all workers or for some workers. Workers count from 0.

    ``earlier_versions`` has the newest version of earlier runs (sender processes) in each store, by
    the store's name.
    """

    def __init__(
        self,
        address: str | Path,
        model_id: str,
        num_workers: int,
        options: TransportOptions,
        earlier_versions: Mapping[str, int],
    ) -> None:
        self._address = address
        self._model_id = model_id
        self._options = options
        self._workers = tuple(range(num_workers))
        self._last_version = earlier_versions.get(store_of(address, model_id).name, 0)
        self._senders: dict[int | None, WeightSender] = {}
        self._sender(None)  # raises an error now if another trainer has the store open

    def publish(
        self, weights: Extracted, workers: Iterable[int] | None, is_initial: bool
    ) -> list[PublishedVersion]:
        chosen = self._workers if workers is None else tuple(dict.fromkeys(workers))
        if unknown := set(chosen) - set(self._workers):
            raise OptionError(
                f"unknown worker {min(unknown)}: there are {len(self._workers)} workers"
            )
        metadata = {_KEY: {"is_initial": is_initial, "after_version": self._last_version}}
        if set(chosen) == set(self._workers):
            sender = self._sender(None)
            self._last_version = sender.send(weights, metadata=metadata).version
            return [(sender, self._last_version, self._workers)]
        published: list[PublishedVersion] = []
        for worker in chosen:
            sender = self._sender(worker)
            version = sender.send(weights, metadata=metadata).version
            published.append((sender, version, (worker,)))
        return published

    def wait_present(self, timeout_s: float) -> None:
        self.wait([(self._sender(None), 0, self._workers)], timeout_s)

    def wait(self, published: Iterable[PublishedVersion], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for sender, version, workers in published:
            sender.wait_applied(
                version,
                receivers=[receiver_id(worker) for worker in workers],
                timeout_s=max(0.0, deadline - time.monotonic()),
            )

    def shutdown(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _sender(self, worker: int | None) -> WeightSender:
        if worker not in self._senders:
            store = store_of(self._address, self._model_id, worker)
            self._senders[worker] = self._options.make_sender(store)
        return self._senders[worker]
