"""What vLLM's CPU build lacks to run experts in data-parallel replicas, which step together.

Its communicator on CPUs has neither `all_gatherv` nor `reduce_scatterv`; with these, over gloo,
everything else is vLLM's own. Given as
``worker_extension_cls="tests.support.engines.cpu_experts.WithExperts"``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from dbuffer.integrations.vllm import WorkerExtension


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    counts = sizes or [input_.shape[0]] * self.world_size
    # gloo gathers equal parts only.
    padded = input_.new_zeros((max(counts), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=self.cpu_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    assert dim == 0
    counts = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone()
    distributed.all_reduce(total, group=self.cpu_group)
    return total.split(counts)[self.rank_in_group].contiguous()


class WithExperts(WorkerExtension):
    """dbuffer's own extension; importing it is what matters."""


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
