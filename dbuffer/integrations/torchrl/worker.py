"""`WorkerReceiver`: keeps one worker's model on the newest weights that are meant for it.

Weights for all workers and weights for this one come in two stores. They are put in order by what
the trainer had published for all when it published for one: version 5 for all, then anything for
worker 1 after it, then version 6 for all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbuffer import errors
from dbuffer.integrations.torchrl.extraction import VersionInfo
from dbuffer.integrations.torchrl.loading import ModelLoader, StagedVersion
from dbuffer.integrations.torchrl.model_stores import ModelStores, receiver_id
from dbuffer.integrations.torchrl.options import TransportOptions
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver

logger = logging.getLogger(__name__)

Order = tuple[int, int]
"""A version for all, and after that one, a version for this worker."""


@dataclass
class Feed:
    """Store that a worker follows: the one for all workers, or its own."""

    receiver: WeightReceiver
    is_for_all: bool
    seen: int | None
    """Newest version that was loaded or skipped."""

    def order_of(self, version: int, info: VersionInfo) -> Order:
        """The order of a version of this store among those of both."""
        return (version, 0) if self.is_for_all else (info.after_version, version)


class WorkerReceiver:
    """Follows both stores in the background, and loads what they bring.

    ``versions`` of an earlier run, by store, are passed over. ``get_model`` may give another model
    at another time. ``applied``, the worker's own bookkeeping, is called after each load of
    something new, when the model may run again.
    """

    def __init__(
        self,
        model_stores: ModelStores,
        worker_idx: int | None,
        options: TransportOptions,
        *,
        versions: dict[str, int],
        get_model: Callable[[], Any],
        applied: Callable[[VersionInfo], None],
    ) -> None:
        self.loader = ModelLoader()
        self._get_model = get_model
        self._applied_hook = applied
        # Loads come from two threads, from `take_now` and from a change of the model.
        self._lock = threading.RLock()
        self._order: Order | None = None
        self._announced: Order = (0, 0)
        self._has_loaded = threading.Condition(self._lock)
        self.num_loads = 0
        self._stop_event = threading.Event()
        self._threads: list[threading.Thread] = []
        name = receiver_id(worker_idx)
        stores = (model_stores.for_all, model_stores.for_worker(worker_idx))
        self._mirrors = [
            options.start_mirror(model_stores.mirrored(store), store) for store in stores
        ]
        self._feeds = [
            Feed(
                options.make_receiver(store, name),
                is_for_all=store == model_stores.for_all,
                seen=versions.get(store.name),
            )
            for store in stores
        ]

    def wait_for_first(self, *, for_all: bool, timeout_s: float) -> None:
        """Load the first weights of this run, and wait for them."""
        self._register()
        self._take(next(feed for feed in self._feeds if feed.is_for_all is for_all), timeout_s)
        self.take_now()

    def take_now(self) -> bool:
        """Load what is newer; whether there was anything."""
        self._register()
        taken = False
        for feed in self._feeds:
            with contextlib.suppress(errors.WaitTimeoutError):
                taken |= self._take(feed, 0.0)
        return taken

    def follow(self) -> None:
        """Load new versions from now on, in the background."""
        for feed in self._feeds:
            thread = threading.Thread(
                target=self._follow, args=(feed,), name=f"dbuffer-{feed.receiver.store.name}"
            )
            thread.daemon = True  # a worker that ends must not wait for its trainer
            self._threads.append(thread)
            thread.start()

    def wait_for_load(self, num_loads: int, timeout_s: float) -> bool:
        """Wait until there have been more loads than ``num_loads``; whether there have."""
        with self._has_loaded:
            return self._has_loaded.wait_for(lambda: self.num_loads > num_loads, timeout_s)

    def use(self, model: Any) -> None:
        """Replace the model by another object, and load the last weights into it."""
        with self._lock:  # nothing is loaded into tensors that are being replaced
            self.loader.take_over(model)
            if self._order is None:
                return
            order, self._order = self._order, None
            for feed in self._feeds:
                newest = order[0] if feed.is_for_all else order[1]
                feed.seen = newest - 1 if newest else feed.seen
            self.take_now()

    def shutdown(self) -> None:
        self._stop_event.set()
        for feed in self._feeds:
            feed.receiver.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for feed in self._feeds:
            feed.receiver.close()
        for mirror in self._mirrors:
            if mirror is not None:
                mirror.close()

    def _register(self) -> None:
        """Write this worker's records, by which the sender knows it."""
        for feed in self._feeds:
            feed.receiver.record.write()

    def _follow(self, feed: Feed) -> None:
        # A store that was recreated is for a new scheme to follow: until then it is a problem.
        loop = FollowLoop(
            feed.receiver,
            "following",
            logger,
            final=(errors.ClosedError,),
            stop=self._stop_event,
        )
        with contextlib.suppress(errors.ClosedError):
            while not self._stop_event.is_set():
                with loop.attempt():
                    version = loop.wait(feed.seen)
                    if version is not None:
                        loop.used()
                        self._take_or_tell(feed, version)

    def _take_or_tell(self, feed: Feed, version: int) -> None:
        try:
            self._take(feed, 0.0)
        # Whatever a model's own code raises: the record reports it, and the sender raises it.
        except Exception as error:
            if self._stop_event.is_set():
                return
            logger.exception("could not apply version %d of %s", version, feed.receiver.store)
            feed.seen = max(version, feed.seen or 0)
            feed.receiver.record.write_problem(error, version)

    def _take(self, feed: Feed, timeout_s: float) -> bool:
        """Load a store's newest version, unless something later is loaded already."""
        with self._lock:
            version, staged = self._stage(feed, timeout_s)
            if staged is not None:
                self.loader.load(staged, self._get_model())
                self._order = feed.order_of(version, staged.info)
                if self._order > self._announced:
                    self._applied_hook(staged.info)
                    self._announced = self._order
            feed.seen = version
            feed.receiver.acknowledge(version)
            if staged is None:
                return False
            self.num_loads += 1
            self._has_loaded.notify_all()
            return True

    def _stage(self, feed: Feed, timeout_s: float) -> tuple[int, StagedVersion | None]:
        """Return the newest version, with a copy if it must be loaded; the model runs meanwhile."""
        while True:
            try:
                with feed.receiver.open(feed.seen, timeout_s, acknowledge=False) as snapshot:
                    info = VersionInfo.of(snapshot)
                    order = feed.order_of(snapshot.version, info)
                    is_newer = self._order is None or order > self._order
                    staged = StagedVersion.of(snapshot, info) if is_newer else None
            except errors.SnapshotEvictedError as error:
                logger.warning("%s; reading the newest", error)
                continue
            return snapshot.version, staged
