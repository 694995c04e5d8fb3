"""`CheckpointManager`: verl's, with engines that are paused when their weights are ready."""

from __future__ import annotations

from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from dbuffer.integrations.verl.checkpoint_engine import VERL_BACKEND
from dbuffer.runtime import options

_WORKER_CLASS = ray.remote(CheckpointEngineWorker)


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
        rollout = self._rollout_workers()
        self.build_process_group(rollout)
        metrics = self._publish(global_steps)
        _call(rollout, "stage")
        await self.abort_replicas()
        await self.release_kv_cache_replicas()
        ray.get(rollout.update_weights(global_steps=global_steps))
        # Only theirs: the actor has nothing to finish, and engines that are paused do not need it.
        _call(rollout, "finalize")
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        return metrics

    def _rollout_workers(self) -> Any:
        workers = [worker for replica in self.replicas for worker in replica.workers]
        described = RayClassWithInitArgs(cls=_WORKER_CLASS)
        return RayWorkerGroup(worker_handles=workers, ray_cls_with_init=described)

    def _publish(self, global_steps: int | None) -> dict[str, Any]:
        """Let the actor publish; all its ranks take part, and the first one has metrics."""
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        return next((metrics for metrics in ray.get(sending) if metrics), {})


def _call(group: Any, method: str) -> None:
    """Call a method of the engine in each worker of a group; return when all have."""
    ray.get(group.execute_checkpoint_engine([method] * group.world_size))
