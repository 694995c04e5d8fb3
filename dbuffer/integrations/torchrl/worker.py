"""`WorkerReceiver`: keeps the model of one TorchRL worker on the worker's newest weights.

A worker follows two stores: a store for all workers, and a store for this worker only. Each version
for a single worker records the newest version for all workers at that time, which orders the
versions of both stores: for example version 5 for all workers, then versions for this worker, then
version 6 for all workers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbuffer import errors
from dbuffer.integrations.torchrl.base import TransportOptions
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard
from dbuffer.integrations.torchrl.loading import StagedVersion, own_memory
from dbuffer.integrations.torchrl.model_stores import read_metadata, receiver_id, store_of
from dbuffer.mirror.mirror import Mirror
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.closing import join
from dbuffer.weights.targets import Matcher

logger = logging.getLogger(__name__)

Order = tuple[int, int]  # a version for all workers, and a later version for this worker, or 0

_NOTHING: Order = (0, 0)


@dataclass
class Feed:
    """One of the two stores that a worker follows."""

    receiver: WeightReceiver
    mirror: Mirror | None
    is_for_all: bool
    earlier: int | None  # newest version of earlier sender processes; skipped
    version: int | None  # newest version that was loaded or skipped


class WorkerReceiver:
    """Follows both stores of a worker in the background, and loads their newest versions.

    Versions of earlier runs (earlier sender processes) are skipped: ``earlier_versions`` has the
    newest earlier version of each store, by the store's name. ``applied`` is called after each load
    of a new version, when forward calls can run again. Its argument is whether the version is the
    first of a run.
    """

    def __init__(
        self,
        remote_addr: str | Path,
        local_addr: str | Path,
        model_id: str,
        worker: int,
        options: TransportOptions,
        earlier_versions: Mapping[str, int],
        *,
        get_model: Callable[[], Any],
        applied: Callable[[bool], None],
    ) -> None:
        self._get_model = get_model
        self._applied = applied
        self._guard = ForwardGuard()
        self._matcher = Matcher()
        # Both following threads, `load_newer` and `use` can load, but only one of them at a time.
        self._lock = threading.RLock()
        self._loaded = _NOTHING
        self._announced = _NOTHING  # `applied` was called for this version
        self._has_loaded = threading.Event()
        self._stop_event = threading.Event()
        self._threads: list[threading.Thread] = []

        def feed_of(worker_or_all: int | None) -> Feed:
            store = store_of(local_addr, model_id, worker_or_all)
            remote = store_of(remote_addr, model_id, worker_or_all)
            receiver, mirror = options.open_reader(remote, store, receiver_id(worker))
            # The store for this worker alone exists only after weights were sent to it alone.
            receiver.notes_wait = worker_or_all is None
            earlier = earlier_versions.get(store.name)
            return Feed(receiver, mirror, worker_or_all is None, earlier, version=earlier)

        self._feeds = feed_of(None), feed_of(worker)

    def wait_for_first(self, timeout_s: float) -> None:
        self._register()  # first, so that the sender sees this worker while it waits
        self._load(self._feeds[0], timeout_s)
        self.load_newer()

    def load_newer(self) -> None:
        self._register()
        for feed in self._feeds:
            self._load_if_newer(feed)

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until a version was loaded since the last call. Return False after ``timeout_s``."""
        if not self._has_loaded.wait(timeout_s):
            return False
        if self._stop_event.is_set():
            raise errors.ClosedError("this receiver was shut down")
        self._has_loaded.clear()
        return True

    def follow(self) -> None:
        self._has_loaded.clear()
        for feed in self._feeds:
            name = f"dbuffer-{feed.receiver.store.name}"
            thread = threading.Thread(target=self._follow, args=(feed,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def use(self, model: Any) -> None:
        """Load the last weights into another model, and use this model from now on."""
        with self._lock:  # excludes loads while the model's tensors are replaced
            self._guard.attach(model)
            own_memory(model, self._guard)
            if self._loaded == _NOTHING:
                return
            self._loaded = _NOTHING
            for feed in self._feeds:
                feed.version = feed.earlier
            self.load_newer()

    def shutdown(self) -> None:
        self._stop_event.set()
        self._has_loaded.set()  # ends `wait_loaded` in other threads
        for feed in self._feeds:
            feed.receiver.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                join(thread)
        for feed in self._feeds:
            feed.receiver.close()
            if feed.mirror is not None:
                feed.mirror.close()

    def _register(self) -> None:
        for feed in self._feeds:
            feed.receiver.record.write()

    def _follow(self, feed: Feed) -> None:
        # A recreated store is a permanent error here, because only a new scheme can follow it.
        final = (errors.ClosedError,)
        loop = FollowLoop(feed.receiver, "following", logger, final=final, stop=self._stop_event)
        with contextlib.suppress(errors.ClosedError):
            while not self._stop_event.is_set():
                with loop.attempt():
                    if loop.wait(feed.version) is not None:
                        self._load_if_newer(feed)
                        loop.used()

    def _load_if_newer(self, feed: Feed) -> None:
        with contextlib.suppress(errors.WaitTimeoutError):
            self._load(feed, 0.0)

    def _load(self, feed: Feed, timeout_s: float) -> None:
        with self._lock:
            while True:
                try:
                    with feed.receiver.open(feed.version, timeout_s, acknowledge=False) as snapshot:
                        version = snapshot.version
                        is_initial, after_version = read_metadata(snapshot)
                        order = (version, 0) if feed.is_for_all else (after_version, version)
                        # Copied, so that waiting for forward calls does not hold the store.
                        staged = StagedVersion.of(snapshot) if order > self._loaded else None
                    break
                except errors.SnapshotEvictedError as error:
                    logger.warning("%s; reading the newest version instead", str(error))
            if staged is not None:
                staged.load(self._get_model(), self._guard, self._matcher)
                if order > self._announced:
                    self._applied(is_initial)
                    self._announced = order
                self._loaded = order
                self._has_loaded.set()
            feed.version = version
            feed.receiver.acknowledge(version)
