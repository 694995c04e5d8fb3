"""`WorkerReceiver`: keeps the model of one TorchRL worker on the worker's newest weights.

A worker follows two stores: a store for all workers, and a store for this worker only. Both stores
share one sequence of version numbers, so the higher number is the newer version.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbuffer import errors
from dbuffer.integrations.torchrl.base import TransportOptions
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard
from dbuffer.integrations.torchrl.loading import StagedVersion, own_memory
from dbuffer.integrations.torchrl.model_stores import IS_INITIAL, receiver_id, store_of
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.closing import join
from dbuffer.weights.targets import Matcher

logger = logging.getLogger(__name__)


class WorkerReceiver:
    """Loads the newest versions of a worker's two stores in the background.

    One store has weights for all workers, and the other has weights for this worker only.

    Versions up to number ``earlier`` are skipped, because an earlier run (start of a sender)
    published them. After each load of a new version, when forward calls can run again, the receiver
    calls ``applied(is_first)``, with True for the first version of a run.
    """

    def __init__(
        self,
        remote_addr: str | Path,
        local_addr: str | Path,
        model_id: str,
        worker: int,
        options: TransportOptions,
        earlier: int,
        *,
        get_model: Callable[[], Any],
        applied: Callable[[bool], None],
    ) -> None:
        self._get_model = get_model
        self._applied = applied
        self._guard = ForwardGuard()
        self._matcher = Matcher()
        # Lock of each load, because several threads load: the two threads of `follow`, and callers
        # of `load_newer` or `use`.
        self._lock = threading.RLock()
        self._earlier = earlier
        self._loaded = earlier
        self._announced = earlier  # `applied` was called for this version
        self._has_loaded = threading.Event()
        self._stop_event = threading.Event()
        self._threads: list[threading.Thread] = []

        self._seen: dict[WeightReceiver, int] = {}
        """Newest version that was loaded or skipped, keyed by the receiver of its store.

        The first receiver reads the store for all workers."""
        self._opened = contextlib.ExitStack()
        for only in (None, worker):
            remote = store_of(remote_addr, model_id, only)
            local = store_of(local_addr, model_id, only)
            receiver, mirror = options.open_reader(remote, local, receiver_id(worker))
            # Log a missing store only if it is the store for all workers. The sender makes this
            # worker's own store only when it sends weights to this worker, but not to all workers.
            receiver.notes_wait = only is None
            self._opened.callback(receiver.close)
            if mirror is not None:
                self._opened.callback(mirror.close)
            self._seen[receiver] = earlier

    def wait_for_first(self, timeout_s: float) -> None:
        self._register()  # first, so that the sender sees this worker while it waits
        self._load(next(iter(self._seen)), timeout_s)
        self.load_newer()

    def load_newer(self) -> None:
        self._register()
        for receiver in self._seen:
            self._load_if_newer(receiver)

    def wait_loaded(self, timeout_s: float) -> bool:
        """Whether a version was loaded since the last call. Wait up to ``timeout_s`` for one."""
        if not self._has_loaded.wait(timeout_s):
            return False
        if self._stop_event.is_set():
            raise errors.ClosedError("this receiver was shut down")
        self._has_loaded.clear()
        return True

    def follow(self) -> None:
        self._has_loaded.clear()
        for receiver in self._seen:
            name = f"dbuffer-{receiver.store.name}"
            thread = threading.Thread(target=self._follow, args=(receiver,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def use(self, model: Any) -> None:
        """Replace the model to load into, and load the newest weights into the new model."""
        with self._lock:  # excludes loads while the model's tensors are replaced
            self._guard.attach(model)
            own_memory(model, self._guard)
            if self._loaded > self._earlier:
                self._loaded = self._earlier
                self._seen = dict.fromkeys(self._seen, self._earlier)
                self.load_newer()

    def shutdown(self) -> None:
        self._stop_event.set()
        self._has_loaded.set()  # ends `wait_loaded` in other threads
        for receiver in self._seen:
            receiver.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                join(thread)
        self._opened.close()

    def _register(self) -> None:
        for receiver in self._seen:
            receiver.record.write()

    def _follow(self, receiver: WeightReceiver) -> None:
        # Keep the default of `forked`: the loop then does not follow a recreated store, which only
        # a new scheme can follow.
        final = (errors.ClosedError,)
        loop = FollowLoop(receiver, "following", logger, final=final, stop=self._stop_event)
        with contextlib.suppress(errors.ClosedError):
            while not self._stop_event.is_set():
                with loop.attempt():
                    if loop.wait(self._seen[receiver]) is not None:
                        self._load_if_newer(receiver)
                        loop.used()

    def _load_if_newer(self, receiver: WeightReceiver) -> None:
        with contextlib.suppress(errors.WaitTimeoutError):
            self._load(receiver, 0.0)

    def _load(self, receiver: WeightReceiver, timeout_s: float) -> None:
        with self._lock:
            last = self._seen[receiver]
            while True:
                try:
                    with receiver.open(last, timeout_s, acknowledge=False) as snapshot:
                        version = snapshot.version
                        is_initial = bool(snapshot.metadata.get(IS_INITIAL))
                        # Copy the version, so that the snapshot closes before the load, which waits
                        # for forward calls.
                        staged = StagedVersion.of(snapshot) if version > self._loaded else None
                    break
                except errors.SnapshotEvictedError as error:
                    logger.warning("%s; reading the newest version instead", str(error))
            if staged is not None:
                staged.load(self._get_model(), self._guard, self._matcher)
                if version > self._announced:
                    self._applied(is_initial)
                    self._announced = version
                self._loaded = version
                self._has_loaded.set()
            self._seen[receiver] = version
            receiver.acknowledge(version)
