"""Stores of a collector's model, and `ModelPublisher`, which publishes into them.

All workers follow the store ``ADDRESS/MODEL``, where ``ADDRESS`` is the scheme's directory. Worker
N also follows the store ``ADDRESS/MODEL~worker-N``, for weights that are sent only to worker N. All
stores of a model share one sequence of version numbers: the higher number is the newer version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from dbuffer.errors import OptionError
from dbuffer.format.places import POINTER_FILE
from dbuffer.integrations.torchrl.base import TransportOptions
from dbuffer.integrations.torchrl.extraction import Extracted
from dbuffer.publish.sender import WeightSender
from dbuffer.store.buffer import DoubleBuffer

PublishedVersion: TypeAlias = tuple[WeightSender, int, tuple[int, ...]]
"""Sender of a version, number of the version, and the workers that must apply the version."""

IS_INITIAL = "torchrl_is_initial"
"""Metadata key: whether the version is the first of a run (all versions of one sender process).

The first version does not count as a policy update."""


def store_of(address: str | Path, model_id: str, worker: int | None = None) -> Path:
    """Return the path of a model's store: for one worker, or by default for all workers."""
    name = quote(model_id, safe="")  # the id can be an attribute path
    if worker is not None:
        name += f"~{receiver_id(worker)}"
    return Path(address) / name


def receiver_id(worker: int) -> str:
    """Return the receiver id of a worker. A sender that waits for the worker names this id."""
    return f"worker-{worker}"


def last_version_below(address: str | Path, options: TransportOptions) -> int:
    """Return the highest version number in the stores directly below ``address``, or 0 if none."""
    last = 0
    for pointer_file in Path(address).glob(f"*/{POINTER_FILE}"):
        store = DoubleBuffer(pointer_file.parent, allow_shared_store=options.allow_shared_store)
        store.check()
        if (pointer := store.pointer()) is not None:
            last = max(last, pointer.version)
    return last


class ModelPublisher:
    """Publishes a model's weights, for all workers or for some. Workers are numbered from 0."""

    def __init__(
        self,
        address: str | Path,
        model_id: str,
        num_workers: int,
        options: TransportOptions,
    ) -> None:
        self._address = address
        self._model_id = model_id
        self._options = options
        self._workers = tuple(range(num_workers))
        self._lock = threading.Lock()
        self._senders: dict[int | None, WeightSender] = {}
        self._sender(None)  # raises an error now if another trainer has the store open
        self.last_version = last_version_below(address, options)

    def publish(
        self, weights: Extracted, workers: Iterable[int] | None, is_initial: bool
    ) -> list[PublishedVersion]:
        chosen = self._workers if workers is None else tuple(dict.fromkeys(workers))
        if unknown := set(chosen) - set(self._workers):
            raise OptionError(
                f"unknown worker {min(unknown)}: there are {len(self._workers)} workers"
            )
        if set(chosen) == set(self._workers):
            return [self._publish(weights, None, self._workers, is_initial)]
        return [self._publish(weights, worker, (worker,), is_initial) for worker in chosen]

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

    def _publish(
        self, weights: Extracted, worker: int | None, workers: tuple[int, ...], is_initial: bool
    ) -> PublishedVersion:
        with self._lock:  # several threads can send
            sender = self._sender(worker)
            # A send that fails while it flips the version pointer has used up its number.
            version = self.last_version = self.last_version + 1
            sender.send(weights, version=version, metadata={IS_INITIAL: is_initial})
        return sender, version, workers

    def shutdown(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _sender(self, worker: int | None) -> WeightSender:
        if worker not in self._senders:
            store = store_of(self._address, self._model_id, worker)
            self._senders[worker] = self._options.make_sender(store)
        return self._senders[worker]
