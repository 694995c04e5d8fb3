"""`StoreCheckpointEngine`: verl's backend ``dbuffer``, known to verl once this is imported."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from dbuffer.errors import NotReadyError
from dbuffer.integrations.verl.syncing import (
    LOOK_AGAIN_S,
    ActorSync,
    RolloutSync,
    join_gathering,
)

VERL_BACKEND = "dbuffer"


@CheckpointEngineRegistry.register(VERL_BACKEND)
class StoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not typed
    """Brings weights from verl's actor to its rollout workers through a store.

    verl makes one in each actor rank and in each rollout worker, and calls it as its documentation
    says. Each sync is one version, with an id that the actor's first rank generates and verl
    hands to all workers. A rollout worker takes the version of that id and nothing else.

    Args:
        bucket_size: not used; it is verl's for the way from a rollout worker into its engine.
        is_master: whether this is the actor's first rank, which publishes.
        store: the store's directory, as actor and rollout workers see it.
        local_store: a directory in the shared memory of the rollout workers' nodes, to which one
            process of each node copies every version, for a store on a network mount.
        delta: publish only the bytes that changed since the last sync, if they are few. The weights
            are then collected first, in the memory of the first rank's host.
        dtype: dtype of published floating-point tensors, as text. Default: each tensor's own.
        timeout_s: how long a rollout worker waits for the version of a sync.

    Raises:
        OptionError: (a ``ValueError``) an option is not what it may be.
    """

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002 - verl gives it
        is_master: bool = False,
        *,
        store: str | os.PathLike[str] | None = None,
        local_store: str | os.PathLike[str] | None = None,
        delta: bool = False,
        dtype: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._is_master = is_master
        self._actor_sync = ActorSync(store, delta=delta, dtype=dtype)
        self._rollout_sync = RolloutSync(store, local_store=local_store, timeout_s=timeout_s)

    def prepare(self) -> str | None:
        """Begin a sync: in the actor's first rank, open the store and generate the sync's id."""
        return self._actor_sync.announce() if self._is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of each worker's :meth:`init_process_group`."""
        names = [name for name in metadata if name is not None]
        if len(names) != 1:
            raise NotReadyError(
                f"{len(names)} of the actor's ranks would publish, where the first one must: verl "
                "makes its engine with is_master=True"
            )
        return {"sync": [None] * actor_wg_world_size}, {"sync": names * rollout_world_size}

    def init_process_group(self, sync: str | None) -> None:
        """Let a rollout worker take the version of ``sync``; there is no group to join."""
        if sync is not None:
            self._rollout_sync.expect(sync)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish, in the actor's first rank; in the others, take part in gathering the weights."""
        with torch.no_grad():
            if self._is_master:
                return self._actor_sync.publish(weights, global_steps)
            join_gathering(weights)
            return {}

    def stage(self) -> None:
        """Wait for the sync's version, and bring it into this worker's memory.

        `CheckpointManager` calls this while the rollout engines generate.
        """
        for _ in self._rollout_sync.waiting():
            time.sleep(LOOK_AGAIN_S)

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002 - the sync's id is exact
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of the sync's version, once :meth:`stage` would return.

        The tensors are on the CPU.
        """
        for _ in self._rollout_sync.waiting():
            await asyncio.sleep(LOOK_AGAIN_S)
        for name, tensor in self._rollout_sync.tensors():
            yield name, tensor

    def finalize(self) -> None:
        """Acknowledge the version: verl calls this when every engine has loaded it."""
        self._rollout_sync.finish()
