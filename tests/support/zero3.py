"""DeepSpeed's ZeRO-3 over gloo, as the tests start it."""

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

    # It would compile a way of its own to add up over shared memory, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def make_engine(persisted: int, model: nn.Module) -> Any:
    """An engine of it, that keeps parameters whole below so many elements."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persisted},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
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
