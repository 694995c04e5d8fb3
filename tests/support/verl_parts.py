"""verl's actor, rollout workers and vLLM server on a CPU; imported where verl is.

They are verl's own, by its own configuration. What they lack here is supplied by the seams that
verl has for it (see ``verl_cpu``), and by the subclasses below, which say why.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from torch.distributed.tensor import distribute_tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import _custom_ops

from tests.support.engines.tiny_models import make_model, revealing_weights

NUM_ACTORS = 2

_SMALL = {
    "actor.strategy": "fsdp2",
    "actor.fsdp_config.fsdp_size": NUM_ACTORS,
    "actor.ppo_micro_batch_size_per_gpu": 1,
    "model.use_remove_padding": "false",
    "+model.override_config.attn_implementation": "eager",
    "rollout.log_prob_micro_batch_size_per_gpu": 1,
    "rollout.name": "vllm",
    "rollout.tensor_model_parallel_size": 1,
    "rollout.load_format": "auto",
    "rollout.free_cache_engine": "false",
    "+rollout.enable_sleep_mode": "false",
    "rollout.enforce_eager": "true",
    "rollout.dtype": "float32",
    "rollout.max_model_len": 256,
    "rollout.max_num_seqs": 4,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 1,
    "+rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 64 << 20,
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": 16,
}


def configured(checkpoint: Path, overrides: list[str]) -> DictConfig:
    """verl's configuration of actor and rollout, as its command line makes it."""
    given = {"model.path": checkpoint, **_SMALL}
    small = [
        f"{'+' * name.startswith('+')}actor_rollout_ref.{name.lstrip('+')}={value}"
        for name, value in given.items()
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=small + overrides).actor_rollout_ref


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """A rank of verl's actor, whose weights are set instead of trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # verl would ask for "cpu:gloo,cpu:gloo", which PyTorch refuses.
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reveal(self, version: int) -> None:
        """Weights that answer with the token of ``version``."""
        self._set(revealing_weights(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def randomize(self, seed: int) -> None:
        self._set(dict(make_model("qwen3", seed).named_parameters()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stumble(self, how: str) -> None:
        """Let the next sync fail: see :func:`troubled`."""
        engine = self.actor.engine
        whole = engine.get_per_tensor_param

        def once() -> Any:
            del engine.get_per_tensor_param
            weights, adapter = whole()
            return troubled(weights, how, self.rank), adapter

        engine.get_per_tensor_param = once

    def _set(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.actor.engine.module.named_parameters():
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(weights[name], mesh, placements))


def troubled(weights: Any, how: str, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that fail half-way: on all ranks, or as what the first rank is asked to publish."""
    for number, (name, tensor) in enumerate(weights):
        yield name, tensor
        if how == "gathering" and number == 5:
            raise ZeroDivisionError("half-way")
        if how == "publishing" and number == 5 and rank == 0:
            yield name, tensor  # a name twice


class Extension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """verl's, in a worker whose layers keep parameters to load into."""

    def __new__(cls, **kwargs: Any) -> Any:
        # On a CPU vLLM packs them for oneDNN otherwise, and has none left.
        _custom_ops._supports_onednn = False
        return super().__new__(cls, **kwargs)


class Server(vLLMHttpServer):  # type: ignore[misc]
    """verl's, with a vLLM that is newer than the one that it knows."""

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        pause = self.engine.pause_generation

        async def pause_generation(*, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
            mode = "wait" if wait_for_inflight_requests else "abort"
            await pause(mode=mode, clear_cache=clear_cache)

        self.engine.pause_generation = pause_generation

    def _get_worker_extension_cls(self) -> str:
        return f"{Extension.__module__}.{Extension.__qualname__}"


class Replica(vLLMReplica):  # type: ignore[misc]
    """verl's, of such servers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)


def start_actor(config: DictConfig) -> Any:
    """The actor's worker group, its model made."""
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([NUM_ACTORS], max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Actor), config=config, role="actor"),
        device_name="cpu",
    )
    group.init_model()
    return group


def start_replica(config: DictConfig) -> Replica:
    """A rollout replica with verl's own workers, and a server that answers."""
    rollout, model = (omega_conf_to_dataclass(part) for part in (config.rollout, config.model))
    replica = Replica(0, rollout, model, gpus_per_node=1)
    asyncio.run(replica.init_standalone())
    return replica
