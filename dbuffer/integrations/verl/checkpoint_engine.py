"""`StoreCheckpointEngine` and `CheckpointManager`, of verl's backend ``dbuffer``.

verl knows the backend once this is imported.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from dbuffer.integrations.verl.syncing import StoreSync
from dbuffer.runtime import options

VERL_BACKEND = "dbuffer"

_WORKER_CLASS = ray.remote(CheckpointEngineWorker)


@CheckpointEngineRegistry.register(VERL_BACKEND)
class StoreCheckpointEngine(StoreSync, CheckpointEngine):  # type: ignore[misc]  # verl is not typed
    """Brings weights from verl's actor to its rollout workers through a store.

    verl makes one in each actor rank and in each rollout worker, and calls it as its documentation
    says. Each sync is one version, with an id that the actor's first rank generates and verl
    hands to all workers. A rollout worker takes the version of that id and nothing else.

    Args:
        bucket_size: unused; verl's, for the way from a rollout worker into its engine.
        is_master: whether this is the actor's first rank, which publishes.
        store: the store's directory, as actor and rollout workers see it.
        local_store: a directory in the shared memory of the rollout workers' nodes, for a store on
            a network mount; one process of each node copies every version there.
        delta: publish only the bytes that changed since the last sync, if they are few. The weights
            are then collected first, in the memory of the first rank's host.
        dtype: dtype of published floating-point tensors, as text. Default: each tensor's own.
        timeout_s: how long a rollout worker waits for the version of a sync.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid.
    """


class CheckpointManager(CheckpointEngineManager):  # type: ignore[misc]  # verl is not typed
    """Manager of verl's backend ``dbuffer``, for ``rollout.checkpoint_manager_class``.

    verl's own pauses the rollout engines, and then lets the actor send. Here the actor publishes,
    and every rollout worker has the version in memory, while the engines generate on; they are
    paused for loading it. If anything goes wrong before, they were never touched.

    Args:
        config: verl's, of the checkpoint engine; its backend is ``dbuffer``, or ``naive`` for an
            actor that shares its process with the rollout, which is left to verl.
        actor_wg: verl's group of the actor's workers.
        replicas: verl's rollout replicas.

    Raises:
        OptionError: (a ``ValueError``) it is another backend, which cannot send before a receiver
            is waiting.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        options.choice("checkpoint_engine.backend", config.backend, (VERL_BACKEND, "naive"))
        super().__init__(config, actor_wg, replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publish the actor's weights, and return when every rollout engine generates with them.

        Returns:
            For verl's log: the version, its bytes, and the seconds that publishing took.

        Raises:
            DBufferError: as Ray brings it here from the worker that it happened in. Until every
                worker has the version in memory, the engines generate on with the one before.
                If loading fails, they stay paused: some may have other weights than others. Whether
                that is raised is verl's: its adapter for vLLM waits on for an engine that failed.
        """
        if self.backend != VERL_BACKEND:
            metrics: dict[str, Any] = await super().update_weights(global_steps)
            return metrics
        workers = [worker for replica in self.replicas for worker in replica.workers]
        described = RayClassWithInitArgs(cls=_WORKER_CLASS)
        rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=described)
        self.build_process_group(rollout)
        # All ranks of the actor take part in publishing, and the first one has metrics.
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        metrics = next((metrics for metrics in ray.get(sending) if metrics), {})
        _call(rollout, "stage")
        await self.abort_replicas()
        await self.release_kv_cache_replicas()
        ray.get(rollout.update_weights(global_steps=global_steps))
        # Only theirs: the actor has nothing to finish, and engines that are paused do not need it.
        _call(rollout, "finalize")
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        return metrics


def _call(group: Any, method: str) -> None:
    """Call a method of the engine in each worker of a group; return when all have."""
    ray.get(group.execute_checkpoint_engine([method] * group.world_size))
