"""Both halves of a sync: `ActorSync` in the actor, `RolloutSync` beside each rollout engine.

Their arguments come from YAML, and may be of any type. None of it needs verl.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dbuffer.errors import (
    DBufferError,
    NotReadyError,
    StoreNotFoundError,
    VersionRegressedError,
    WaitTimeoutError,
)
from dbuffer.format.delta import require_compression
from dbuffer.io.tensors import DTYPES
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot
from dbuffer.runtime import options

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.02
"""Interval between two looks at a store for a version that is being published."""

_SYNC = "sync"
"""Metadata key of a version's sync id. Global steps repeat, and may be None."""
_WHERE = "engine_kwargs.dbuffer"
"""Place of the options in ``checkpoint_engine``, for messages."""
_FLOATS = ("bfloat16", "float16", "float32")


def join_gathering(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Iterate over weights that another rank publishes: ranks gather each tensor together."""
    collections.deque(weights, maxlen=0)


class ActorSync:
    """Publishing side of the syncs, in the actor's first rank.

    The first sync opens the store. `StoreCheckpointEngine` describes the options.
    """

    def __init__(self, store: Any, *, delta: Any = False, dtype: Any = None) -> None:
        self._store = options.directory(f"{_WHERE}.store", store)
        self._delta = options.flag(f"{_WHERE}.delta", delta)
        if delta:
            require_compression()
        options.choice(f"{_WHERE}.dtype", dtype, (None, *_FLOATS))
        self._dtype = None if dtype is None else DTYPES[dtype]
        self._sender: WeightSender | None = None
        self._sync: str | None = None

    def announce(self) -> str:
        """Begin a sync; return its id, which only its version will have."""
        if self._sender is None:
            self._sender = WeightSender(self._store, delta=self._delta, dtype=self._dtype)
        self._sync = secrets.token_hex(16)
        return self._sync

    def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None
    ) -> dict[str, float]:
        """Publish the version of the sync that was announced, and return metrics of it.

        Whatever goes wrong, the iterator is exhausted: other ranks gather each tensor with this
        one, and would hang in a collective without it.
        """
        pairs = iter(weights)
        try:
            if self._sender is None or self._sync is None:
                raise NotReadyError(
                    "no sync has begun: prepare() comes before send_weights(), each time"
                )
            metadata, self._sync = {_SYNC: self._sync, "global_steps": global_steps}, None
            # In memory of their own, since the iterator may reuse its memory.
            source = (
                {n: t.detach().to("cpu", copy=True) for n, t in pairs} if self._delta else pairs
            )
            published = self._sender.send(source, metadata=metadata)
        except Exception:
            join_gathering(pairs)
            raise
        return {
            "dbuffer/version": float(published.version),
            "dbuffer/bytes": float(published.num_bytes),
            "dbuffer/publish_s": published.duration_s,
        }


class RolloutSync:
    """Receiving side of the syncs, in a rollout worker.

    It holds the version of one sync until the engine has loaded it. `StoreCheckpointEngine`
    describes the options.
    """

    def __init__(self, store: Any, *, local_store: Any = None, timeout_s: Any = 600.0) -> None:
        self._store = self._local_store = options.directory(f"{_WHERE}.store", store)
        if local_store is not None:
            self._local_store = options.directory(f"{_WHERE}.local_store", local_store)
        self._timeout_s = options.positive_seconds(f"{_WHERE}.timeout_s", timeout_s)
        self._receiver: WeightReceiver | None = None
        self._mirror: Mirror | None = None
        self._sync: str | None = None
        self._looked_at: int | None = None
        self._holding = contextlib.ExitStack()
        self._snapshot: Snapshot | None = None

    def expect(self, sync: str) -> None:
        """Begin a sync, and release the version of an unfinished one."""
        self._snapshot = self._sync = None
        try:
            self._holding.close()
        except DBufferError as error:
            # The version is not used any more; a problem of the store, the next look says too.
            logger.info("a version that was not finished: %s", str(error))
        if self._receiver is None:
            self._mirror = start_mirror(self._store, self._local_store)
            self._receiver = WeightReceiver(self._local_store)
        self._sync = sync

    def waiting(self) -> Iterator[None]:
        """Hold the sync's version, and no other one; yield each time it is not there yet."""
        sync, timeout_s = self._sync, self._timeout_s
        if sync is None:
            raise NotReadyError("no sync has begun: init_process_group() comes before, each time")
        deadline = time.monotonic() + timeout_s
        while not self._hold(sync):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"the version of this sync did not come into {self._store} "
                    f"within {timeout_s:g} s, the newest there is {self._looked_at}: see whether "
                    "the actor could publish it, and whether this host sees the same directory"
                )
            yield
            if self._sync != sync:
                raise WaitTimeoutError(
                    "another sync has begun before the version of this one came; the actor could "
                    "not publish it, and the rollout engine keeps what it has"
                )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of the held version: views, valid until it is released."""
        assert self._snapshot is not None  # noqa: S101 - waiting() has ended
        yield from self._snapshot.tensors.items()

    def finish(self) -> None:
        """Acknowledge and release the held version, which the engine has loaded."""
        snapshot, self._snapshot, self._sync = self._snapshot, None, None
        if snapshot is None or self._receiver is None:
            return
        self._holding.close()
        self._receiver.acknowledge(snapshot.version)

    def _hold(self, sync: str) -> bool:
        assert self._receiver is not None  # noqa: S101 - a sync has begun
        if self._snapshot is not None:
            return True
        if not self._is_newest_of(sync):
            return False
        opened = self._receiver.open(version=self._looked_at, acknowledge=False)
        self._snapshot = self._holding.enter_context(opened)
        self._snapshot.read_ahead()
        return True

    def _is_newest_of(self, sync: str) -> bool:
        """Look at what is newer than what was looked at; only its manifest is read.

        A store that was removed, emptied or replaced is followed: the sync's id is enough to tell
        its version.
        """
        assert self._receiver is not None  # noqa: S101 - a sync has begun
        try:
            if self._receiver.wait_for_version(self._looked_at, timeout_s=0.0) is None:
                return False
            with self._receiver.open_seen(self._looked_at) as held:
                if held is None:
                    return False
                self._looked_at = held.manifest.version
                return held.manifest.metadata.get(_SYNC) == sync
        except (StoreNotFoundError, VersionRegressedError) as error:
            logger.warning("%s (following it)", str(error))
            self._receiver.follow_fork()
            self._looked_at = None
            return False
