"""`WorkerRank`: what a receiver needs to know of the vLLM worker that it is in."""

from __future__ import annotations

from typing import Any, Self

import torch

from dbuffer.integrations.engine.options import EngineOptions
from dbuffer.integrations.engine.serving import KEPT_AS, ServingModel
from dbuffer.integrations.engine.shape_check import ShapeCheck
from dbuffer.integrations.vllm.config import default_engine_id, is_launched
from dbuffer.integrations.vllm.model import VllmModel
from dbuffer.integrations.vllm.ranks import WorkerRanks
from dbuffer.integrations.vllm.shape_check import vllm_shape_check


class WorkerRank:
    """One rank of a vLLM engine; see `EngineRank` of :mod:`dbuffer.integrations.engine`."""

    not_weights = ("kv_cache", KEPT_AS)

    def __init__(self, vllm_config: Any, model: Any, device: Any) -> None:
        self._vllm_config = vllm_config
        self.module: torch.nn.Module = model
        self._device = device
        self.on_device: bool = device.type != "cpu"
        self.ranks = WorkerRanks(vllm_config)
        self.instance_id: str = vllm_config.instance_id
        if is_launched(vllm_config.parallel_config):  # each process has made up its own
            self.instance_id = self.ranks.gather(self.instance_id)[0]

    @classmethod
    def of(cls, worker: Any) -> Self:
        """That of a worker."""
        return cls(worker.vllm_config, worker.get_model(), worker.device)

    def engine_id(self, options: EngineOptions) -> str:
        """The engine's name among the store's receivers; the same on all of its ranks."""
        name = options.engine_id or default_engine_id(self._vllm_config.instance_id)
        parallel = self._vllm_config.parallel_config
        if is_launched(parallel):  # each process has made up an instance id
            return self.ranks.gather(name)[0]
        if parallel.data_parallel_size > 1:
            name += f".dp-{parallel.data_parallel_rank}"
        return name

    def make_model(self, before: ServingModel | None) -> ServingModel:
        """The model, to swap weights in: the same as before, which knows whether it may serve."""
        return before or VllmModel(self._vllm_config, self.module, self._device)

    def make_check(self, *, partial: bool) -> ShapeCheck:
        """What tells, while the model serves, whether weights fit it, all or a part of them."""
        return vllm_shape_check(self._vllm_config, partial=partial)
