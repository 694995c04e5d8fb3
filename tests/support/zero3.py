"""DeepSpeed over gloo, as the tests start it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from torch import distributed, nn


def start_deepspeed(rank: int) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(distributed.get_world_size()),
    }
    import deepspeed

    compile_nothing()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def compile_nothing() -> None:
    """Let DeepSpeed compile no sum over shared memory of its own, which takes minutes."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configuration(
    stage: int, *, persisted: int = 0, lr: float = 1e-2, **more: Any
) -> dict[str, Any]:
    """Return a configuration that keeps parameters whole below so many elements."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persisted},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        **more,
    }


def make_engine(persisted: int, model: nn.Module) -> Any:
    """Return an engine of ZeRO-3."""
    import deepspeed

    config = configuration(3, persisted=persisted, lr=1e-3)
    return deepspeed.initialize(model=model, config=config)[0]


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """How many parameters were whole at once, each time that one was gathered."""
    import deepspeed

    gather = deepspeed.zero.GatheredParameters
    counts, now = [], 0

    class Counting(gather):
        def __enter__(self) -> Any:
            nonlocal now
            now += len(self.params)
            counts.append(now)
            return super().__enter__()

        def __exit__(self, *exception: Any) -> Any:
            nonlocal now
            now -= len(self.params)
            return super().__exit__(*exception)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.zero, "GatheredParameters", Counting)
        yield counts
