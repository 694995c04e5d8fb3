"""verl's checkpoint-engine backend ``dbuffer``. Importing this module registers the backend."""

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
    """Engine that brings weights from verl's actor to its rollout workers through a store.

    verl makes a checkpoint engine in each actor rank and in each rollout worker, and calls its
    methods. For each sync, the actor's first rank (``is_master``) generates a sync id, and puts it
    into the metadata of the version that it publishes. verl passes the id to all rollout workers,
    which load only the version with this id. verl reads the options of the engine from
    ``engine_kwargs.dbuffer`` in its configuration.
    """


class CheckpointManager(CheckpointEngineManager):  # type: ignore[misc]  # verl is not typed
    """Manager of verl's backend ``dbuffer``, for ``rollout.checkpoint_manager_class``.

    verl's own manager pauses the rollout engines while the actor sends. With this manager, the
    engines go on generating while the actor publishes the version, and while the rollout workers
    read it into their memory.

    Raises:
        OptionError: (a ``ValueError``) ``config.backend`` is neither ``dbuffer`` nor ``naive``
            (verl's own sync). This manager cannot use verl's other backends, because they send
            only to receivers that are already waiting.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        options.choice("checkpoint_engine.backend", config.backend, (VERL_BACKEND, "naive"))
        super().__init__(config, actor_wg, replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publish the actor's weights, and return when every rollout engine generates with them.

        The returned metrics for verl's log are the version, its bytes, and the publish's duration.

        Raises:
            DBufferError: the error of a worker, raised again by Ray. If a worker cannot read the
                version into its memory, the engines keep generating with the previous version. If
                an engine cannot load the version, all engines stay paused, because some can have
                the new version and some the previous version.
        """
        if self.backend != VERL_BACKEND:
            metrics: dict[str, Any] = await super().update_weights(global_steps)
            return metrics
        workers = [worker for replica in self.replicas for worker in replica.workers]
        described = RayClassWithInitArgs(cls=_WORKER_CLASS)
        rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=described)
        self.build_process_group(rollout)
        # All ranks of the actor take part in publishing. Only the first rank returns metrics.
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        metrics = next((metrics for metrics in ray.get(sending) if metrics), {})
        _call(rollout, "stage")
        await self.abort_replicas()
        await self.release_kv_cache_replicas()
        ray.get(rollout.update_weights(global_steps=global_steps))
        # Call only the rollout workers: the actor has nothing to finalize.
        _call(rollout, "finalize")
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        return metrics


def _call(group: Any, method: str) -> None:
    """Call a method of the checkpoint engine in each worker of a group, and wait for all calls."""
    ray.get(group.execute_checkpoint_engine([method] * group.world_size))
