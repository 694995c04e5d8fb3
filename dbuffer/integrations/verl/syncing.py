"""`StoreSync`: verl's syncs through a store, in the actor's ranks and in the rollout workers.

The constructor's arguments come from YAML and can have any type, so they are checked. This module
does not import verl.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator
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
from dbuffer.receive.reader import Snapshot
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02
"""Interval at which a rollout worker checks the store for the version of a sync."""
_SYNC = "sync"
"""Metadata key of a version's sync id. Global steps are no ids: they can repeat or be None."""
_WHERE = "engine_kwargs.dbuffer"
_FLOATS = ("bfloat16", "float16", "float32")


class StoreSync:
    """Methods of verl's ``CheckpointEngine``, for syncs through a store."""

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002 - verl passes it to every engine
        is_master: bool = False,
        *,
        store: Any = None,
        local_store: Any = None,
        delta: Any = False,
        dtype: Any = None,
        timeout_s: Any = 600.0,
    ) -> None:
        self._is_master = is_master
        self._store = self._local_store = options.directory(f"{_WHERE}.store", store)
        if local_store is not None:
            self._local_store = options.directory(f"{_WHERE}.local_store", local_store)
        self._delta = options.flag(f"{_WHERE}.delta", delta)
        if delta:
            require_compression()
        options.choice(f"{_WHERE}.dtype", dtype, (None, *_FLOATS))
        self._dtype = None if dtype is None else DTYPES[dtype]
        self._timeout_s = options.positive_seconds(f"{_WHERE}.timeout_s", timeout_s)
        self._sync: str | None = None
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._mirror: Mirror | None = None
        self._newest: int | None = None
        self._holding = contextlib.ExitStack()
        self._snapshot: Snapshot | None = None

    def prepare(self) -> str | None:
        """Begin a sync. On the actor's first rank, return the sync's id; on other workers, None."""
        if not self._is_master:
            return None
        if self._sender is None:
            self._sender = WeightSender(self._store, delta=self._delta, dtype=self._dtype)
        self._sync = secrets.token_hex(16)
        return self._sync

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        syncs = [sync for sync in metadata if sync is not None]
        if len(syncs) != 1:
            raise NotReadyError(
                f"{len(syncs)} of the actor's ranks would publish, instead of one: verl must make "
                "the engine of the first rank, and only this engine, with is_master=True"
            )
        return {"sync": [None] * actor_wg_world_size}, {"sync": syncs * rollout_world_size}

    def init_process_group(self, sync: str | None) -> None:
        """Set the id of the sync whose version this rollout worker must load.

        Despite verl's name, the method joins no process group.
        """
        if sync is None:
            return
        self._snapshot = self._sync = None
        try:
            self._holding.close()
        except DBufferError as error:
            # Only log the error: no sync needs this version any more. If the store has a problem,
            # the next read raises an error.
            logger.info("the version of an unfinished sync could not be closed: %s", str(error))
        if self._receiver is None:
            self._mirror = start_mirror(self._store, self._local_store)
            self._receiver = WeightReceiver(self._local_store)
        self._sync = sync

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights on the actor's first rank. On other ranks, only exhaust the iterator.

        All ranks exhaust the iterator, even after an error, because it gathers each tensor on all
        ranks together. If one rank stopped, the others would hang.
        """
        pairs = iter(weights)
        with torch.no_grad():
            try:
                return self._publish(pairs, global_steps) if self._is_master else {}
            finally:
                collections.deque(pairs, maxlen=0)

    def _publish(
        self, pairs: Iterator[tuple[str, torch.Tensor]], global_steps: int | None
    ) -> dict[str, float]:
        if self._sender is None or self._sync is None:
            raise NotReadyError("no sync has begun: call prepare() before each send_weights()")
        metadata, self._sync = {_SYNC: self._sync, "global_steps": global_steps}, None
        # A delta needs all tensors at once. Copy them, because the iterator may reuse their memory.
        source = {n: t.detach().to("cpu", copy=True) for n, t in pairs} if self._delta else pairs
        published = self._sender.send(source, metadata=metadata)
        return {
            "dbuffer/version": float(published.version),
            "dbuffer/bytes": float(published.num_bytes),
            "dbuffer/publish_s": published.duration_s,
        }

    def stage(self) -> None:
        """Wait for the current sync's version, and read it into this worker's memory.

        `CheckpointManager` calls this while the rollout engines generate.
        """
        for _ in self.waiting():
            time.sleep(_LOOK_AGAIN_S)

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002 - the sync's id identifies the version
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the current sync's version, and yield its tensors with their names.

        The tensors are on the CPU, and are valid until :meth:`finalize`.
        """
        for _ in self.waiting():
            await asyncio.sleep(_LOOK_AGAIN_S)
        assert self._snapshot is not None  # noqa: S101 - `waiting` has opened it
        layout = self._snapshot.layout.target
        for name, tensor in self._snapshot.tensors.part(layout).items():
            yield name, tensor

    def finalize(self) -> None:
        """Acknowledge the sync's version. verl calls this once every engine has loaded it."""
        snapshot, self._snapshot, self._sync = self._snapshot, None, None
        if snapshot is None or self._receiver is None:
            return
        self._holding.close()
        self._receiver.acknowledge(snapshot.version)

    def waiting(self) -> Iterator[None]:
        """Wait for the current sync's version, and open it. Yield when the caller should sleep."""
        sync, timeout_s = self._sync, self._timeout_s
        if sync is None:
            raise NotReadyError("no sync has begun: call init_process_group() before each sync")
        deadline = time.monotonic() + timeout_s
        while self._snapshot is None and not self._is_newest_of(sync):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"the version of this sync was not published in {self._store} "
                    f"within {timeout_s:g} s; the newest version there is {self._newest}: check "
                    "that the actor published, and that this host sees the same directory"
                )
            yield
            if self._sync != sync:
                raise WaitTimeoutError(
                    "verl began another sync before the version of this sync was published; the "
                    "rollout engine keeps its weights"
                )
        if self._snapshot is None:
            assert self._receiver is not None  # noqa: S101 - a sync has begun
            opened = self._receiver.open(version=self._newest, acknowledge=False)
            self._snapshot = self._holding.enter_context(opened)
            self._snapshot.read_ahead()

    def _is_newest_of(self, sync: str) -> bool:
        assert self._receiver is not None  # noqa: S101 - a sync has begun
        try:
            if self._receiver.wait_for_version(self._newest, timeout_s=0.0) is None:
                return False
            with self._receiver.open_seen(self._newest) as version:
                if version is None:
                    return False
                self._newest = version.manifest.version
                return version.manifest.metadata.get(_SYNC) == sync
        except (StoreNotFoundError, VersionRegressedError) as error:
            logger.warning("%s; still waiting for the version of this sync", str(error))
            self._receiver.follow_fork()
            self._newest = None
            return False
