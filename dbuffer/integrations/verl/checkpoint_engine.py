"""verl's backend ``dbuffer``, which importing this module registers with verl."""

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

    verl makes an engine in each actor rank and in each rollout worker, and makes all calls. The
    actor's first rank (``is_master``) publishes a version for each sync and generates the sync's
    id, which verl passes to all workers. A rollout worker loads only the version with this id.
    verl reads the options from ``engine_kwargs.dbuffer`` in its configuration.
    """


class CheckpointManager(CheckpointEngineManager):  # type: ignore[misc]  # verl is not typed
    """Manager of verl's backend ``dbuffer``, for ``rollout.checkpoint_manager_class``.

    verl's own manager pauses the rollout engines while the actor sends. With this manager, the
    engines generate until the actor has published and every rollout worker has staged the version.

    Raises:
        OptionError: (a ``ValueError``) ``config.backend`` is not ``dbuffer`` or ``naive`` (verl
            does the sync itself). Other backends cannot send before a receiver is waiting.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        options.choice("checkpoint_engine.backend", config.backend, (VERL_BACKEND, "naive"))
        super().__init__(config, actor_wg, replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publish the actor's weights, and return when every rollout engine generates with them.

        The returned metrics for verl's log are the version, its bytes, and the publish's duration.

        Raises:
            DBufferError: a worker failed; Ray raises its error here. Until every worker has staged
                the version, the engines keep generating with the previous version. If loading
                fails, the engines stay paused, because their weights can differ.
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
        # Only for the rollout workers: the actor has nothing to finalize.
        _call(rollout, "finalize")
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        return metrics


def _call(group: Any, method: str) -> None:
    """Call a method of the checkpoint engine in each worker of a group, and wait for all calls."""
    ray.get(group.execute_checkpoint_engine([method] * group.world_size))
