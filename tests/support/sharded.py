"""Models that are sharded over ranks.

Functions import DTensors and FSDP2, as these take as long as torch, and each process of a run
imports this file.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import LazyTensor
from dbuffer.weights.lazy_tensor import HeldRows
from tests.support.ways import NEEDS_CONVERSIONS

Case = tuple[Any, dict[str, torch.Tensor]]
"""What is sent, sharded, and the same whole, as state dict."""


@functools.cache
def grid() -> DeviceMesh:
    """All ranks, in two rows.

    One for all tests of a rank: a mesh has process groups of its own, and a thread of gloo looks at
    each of these a hundred times a second until the process ends.
    """
    shape = (2, distributed.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


@functools.cache
def mesh_of(*ranks: int) -> DeviceMesh:
    """Return the mesh of these ranks in a row, likewise made once, by all ranks together."""
    return DeviceMesh("cpu", ranks)


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different in every element, the same on all ranks."""
    return torch.randn(shape).to(dtype)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fsdp(size: int) -> Case:
    """Rows that do not divide by the number of ranks, ranks that hold none, plain buffers."""

    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(
        *(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)),
        *(nn.BatchNorm1d(6), nn.Linear(64, 64), nn.Embedding(1001, 16)),
    )
    full = state_of(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, full


def partly_fsdp(size: int) -> Case:
    """Some layers sharded, others whole on each rank."""

    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)), nn.Linear(700, 700))
    full = state_of(model)
    for layer in model[:2]:
        fully_shard(layer)
    return model, full


def state_dict(size: int) -> Case:
    model, full = fsdp(size)
    return model.state_dict(), full


def replicated(size: int) -> Case:
    """As a DDP trainer has it, with all that plain tensors can be."""
    full = {
        "large": whole(600, 600),
        "larger": whole(700, 700),
        "transposed": whole(30, 50).t(),
        "scalar": torch.tensor(2.5),
        "integers": torch.arange(10),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "half": whole(3, 3, dtype=torch.bfloat16),
        "eight": whole(3, 3, dtype=torch.float8_e4m3fn),
        "complex": torch.randn(4, dtype=torch.complex64).conj(),
    }
    return {f"module.{name}": tensor for name, tensor in full.items()}, full


def tied(size: int) -> Case:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Embedding(120, 80), nn.Linear(80, 120, bias=False), nn.Linear(80, 80))
    model[1].weight = model[0].weight
    model.append(nn.Linear(80, 80))
    model[3].bias = model[2].bias
    full = model.state_dict(keep_vars=True)
    fully_shard(model)
    ties = {"1.weight": "0.weight", "3.bias": "2.bias"}
    full = {name: tensor.detach().clone() for name, tensor in full.items()}
    full |= {alias: full[name] for alias, name in ties.items()}
    return model, full


def hsdp(size: int) -> Case:
    """Two replicas, each sharded."""

    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(640, 641))
    full = state_of(model)
    fully_shard(model, mesh=grid())
    return model, full


def two_dimensions(size: int) -> Case:
    """FSDP of what tensor parallelism has cut by rows and by columns."""

    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.Linear(100, 140), nn.Linear(140, 100), nn.Linear(100, 30))
    full = state_of(model)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(model, grid()["inner"], plan)
    fully_shard(model, mesh=grid()["outer"])
    return model, full


def placements(size: int) -> Case:
    """All ways to cut rows and columns on a mesh of two dimensions."""

    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ways = (Replicate(), Shard(0), Shard(1), Shard(2))
    full = {f"{one} {two}": whole(5, 7, 3, 64) for one in ways for two in ways}
    pairs = zip(full.values(), ((one, two) for one in ways for two in ways), strict=True)
    return dict(zip(full, (distribute_tensor(t, grid(), p) for t, p in pairs), strict=True)), full


def made_when_sent(size: int) -> Case:
    """As a merged model comes: tensors that are made when their turn comes, the same everywhere."""
    full = {"plain": whole(600, 600), "made": whole(700, 700), "tied": torch.empty(0)}
    full["tied"] = full["made"]
    lazy = LazyTensor(torch.float32, (700, 700), lambda: full["made"].clone(), identity=-1)
    return full | {"made": lazy, "tied": lazy}, full


def uneven_rows(size: int) -> Case:
    """Rows that are not cut as torch cuts them, of all ranks and of all but the first."""
    full = {"large": whole(size * (size + 1) // 2, 900), "small": whole(size * (size + 1) // 2 - 1)}
    rank, held = distributed.get_rank(), {}
    for name, ranks in (("large", range(size)), ("small", range(1, size))):
        if rank in ranks:
            first = sum(number + 1 for number in ranks if number < rank)
            rows = HeldRows(full[name][first : first + rank + 1], first, tuple(ranks))
            held[name] = LazyTensor(torch.float32, full[name].shape, torch.Tensor, sharded=rows)
    return held, full


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 30}
    config = MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=1)
    return MixtralForCausalLM(config)


def experts(size: int, *, columns: bool = False) -> Case:
    """A transformers model, whose checkpoint has each of its experts by itself."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from transformers.core_model_loading import revert_weight_conversion

    model = mixtral()
    full = revert_weight_conversion(model, state_of(model))
    for part in (*model.model.layers, model):
        fully_shard(part, shard_placement_fn=lambda p: Shard(int(columns and p.ndim == 3)))
    return model, full


def experts_by_columns(size: int) -> Case:
    """Each rank holds a part of each expert."""
    return experts(size, columns=True)


def strided_experts(size: int) -> Case:
    """Model whose experts on a rank are no neighbors."""

    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    model, full = experts(size)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        for name, parameter in list(layer.mlp.experts.named_parameters(recurse=False)):
            whole = parameter.full_tensor().detach()
            cut = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)])
            setattr(layer.mlp.experts, name, nn.Parameter(cut))
    return model, full


def strided(size: int) -> Case:
    """Tensors of which a rank holds rows that are no neighbors."""

    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (size,))
    full = {"a": whole(8, 300), "b": whole(1600), "rows": whole(8, 300)}
    ways = [_StridedShard(0, split_factor=2)]
    sharded = {name: distribute_tensor(full[name], mesh, ways) for name in ("a", "b")}
    return {**sharded, "rows": distribute_tensor(full["rows"], mesh, [Shard(0)])}, full


def sums(size: int) -> Case:
    """What is yet to be added up."""

    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    full = {"none": torch.empty(0, 2), "rows": whole(5, 2, 500)}
    part = torch.arange(6000.0).view(6, 2, 500)
    full["sum"] = size * part
    return {
        "sum": DTensor.from_local(part, mesh, [Partial()]),
        "none": DTensor.from_local(full["none"], mesh, [Partial()]),
        "rows": distribute_tensor(full["rows"], mesh, [Shard(0)]),
    }, full


NEEDS_STRIDED_GATHER = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="PyTorch 2.10 cannot make such a tensor whole itself"
)
STRIDED = pytest.param(strided, marks=NEEDS_STRIDED_GATHER)
EXPERTS = [
    pytest.param(experts_by_columns, marks=NEEDS_CONVERSIONS),
    pytest.param(experts, marks=NEEDS_CONVERSIONS),
]
STRIDED_EXPERTS = pytest.param(strided_experts, marks=[NEEDS_CONVERSIONS, NEEDS_STRIDED_GATHER])


# In turn on a local and on a network mount, where columns would be gathered.
CASES = [
    *(made_when_sent, uneven_rows, replicated, fsdp, two_dimensions, partly_fsdp, placements),
    *(state_dict, *EXPERTS, STRIDED, tied, sums, hsdp, STRIDED_EXPERTS),
]
