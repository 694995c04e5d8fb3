"""`ModelPublisher`: the trainer's side of one model's stores."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from dbuffer.errors import OptionError
from dbuffer.integrations.torchrl.directories import ModelDirectory, receiver_id
from dbuffer.integrations.torchrl.extraction import Extracted, VersionInfo
from dbuffer.integrations.torchrl.options import TransportOptions
from dbuffer.publish.sender import WeightSender


@dataclass(frozen=True, slots=True)
class ForWorkers:
    """Published version, and the workers that must apply it."""

    sender: WeightSender
    version: int
    workers: tuple[int, ...]


class ModelPublisher:
    """Publishes for all workers of a model, or for some of them.

    Args:
        directory: the model's stores.
        num_workers: workers to wait for, counted from 0.
        options: of the senders.
        last_version: the newest version for all workers that is published; 0: none.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        num_workers: int,
        options: TransportOptions,
        *,
        last_version: int,
    ) -> None:
        self._directory = directory
        self._options = options
        self._workers = tuple(range(num_workers))
        self._for_all = options.make_sender(directory.for_all)
        self._for_one: dict[int, WeightSender] = {}
        self._version = last_version

    def publish(
        self, weights: Extracted, workers: Iterable[int] | None = None, *, is_initial: bool = False
    ) -> list[ForWorkers]:
        chosen = self._workers if workers is None else tuple(dict.fromkeys(workers))
        if unknown := set(chosen) - set(self._workers):
            raise OptionError(
                f"unknown worker {min(unknown)}: there are {len(self._workers)} workers"
            )
        if workers is not None and set(chosen) != set(self._workers):
            return [self._publish_for(worker, weights, is_initial) for worker in chosen]
        info = VersionInfo(extra_state=weights.extra_state, is_initial=is_initial)
        publication = self._for_all.send(weights.tensors, metadata=info.to_metadata())
        self._version = publication.version
        return [ForWorkers(self._for_all, self._version, self._workers)]

    def wait_present(self, timeout_s: float) -> None:
        """Wait until all workers have opened the store."""
        names = [receiver_id(worker) for worker in self._workers]
        self._for_all.wait_applied(0, receivers=names, timeout_s=timeout_s)

    def wait(self, published: Iterable[ForWorkers], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for item in published:
            item.sender.wait_applied(
                item.version,
                receivers=[receiver_id(worker) for worker in item.workers],
                timeout_s=max(0.0, deadline - time.monotonic()),
            )

    def shutdown(self) -> None:
        for sender in (self._for_all, *self._for_one.values()):
            sender.close()

    def _publish_for(self, worker: int, weights: Extracted, is_initial: bool) -> ForWorkers:
        sender = self._for_one.get(worker)
        if sender is None:
            sender = self._options.make_sender(self._directory.for_worker(worker))
            self._for_one[worker] = sender
        info = VersionInfo(
            extra_state=weights.extra_state, is_initial=is_initial, after_version=self._version
        )
        version = sender.send(weights.tensors, metadata=info.to_metadata()).version
        return ForWorkers(sender, version, (worker,))
