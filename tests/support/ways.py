"""Ways of ranks to publish versions, which need no FSDP."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import ShardedWeightSender
from dbuffer.store import filesystem
from tests.support.patterns import SMALL, SPARSE, Pattern

_spec = importlib.util.find_spec("transformers")
_folders = [] if _spec is None else _spec.submodule_search_locations or []

NEEDS_CONVERSIONS = pytest.mark.skipif(
    # The file, because importing transformers takes seconds.
    not any(Path(folder, "core_model_loading.py").exists() for folder in _folders),
    reason="needs a transformers that saves modules under other names than they have",
)


@contextlib.contextmanager
def mounted(kind: str) -> Iterator[None]:
    """Let this process take every mount for one of this kind."""
    os.environ[filesystem.MOUNT_VARIABLE] = kind
    try:
        yield
    finally:
        del os.environ[filesystem.MOUNT_VARIABLE]


def pattern_of(version: int, size: int, pattern: Pattern = SMALL) -> dict[str, torch.Tensor]:
    """What support's checks know, every second tensor sharded."""
    from torch.distributed.tensor import Shard, distribute_tensor  # imports as much as torch

    mesh = init_device_mesh("cpu", (size,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if index % 2 else tensor
        for index, (name, tensor) in enumerate(pattern.weights(version).items())
    }


class Way(NamedTuple):
    """How versions are published."""

    mount: str = "auto"
    delta: bool = False
    is_restarted: bool = False
    """Whether the fourth version is the first one of a sender, which takes up the third."""

    @property
    def has_checksums(self) -> bool:
        """Whether versions have checksums: then a local store writes each version whole."""
        return self.mount == "network" or not self.delta

    def open(self, store: Path, **options: Any) -> ShardedWeightSender:
        checksum = self.has_checksums
        more = {"reader_timeout_s": 0.0, "num_threads": 1, "delta": self.delta}
        return ShardedWeightSender(store, checksum=checksum, **more, **options)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        size = distributed.get_world_size()
        return pattern_of(version, size, SPARSE if self.delta else SMALL)
