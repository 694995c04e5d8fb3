"""`WorkerRanks`: which ranks a vLLM engine has, and which of them reports what went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.distributed.parallel_state import get_tp_group, get_world_group

from dbuffer.errors import DBufferError, EngineUnsupportedError
from dbuffer.integrations.engine.ranks import Ranks
from dbuffer.integrations.vllm.config import is_launched


class WorkerRanks(Ranks):
    """All workers of a vLLM engine.

    Raises:
        EngineUnsupportedError: they cannot be told from those of other engines.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        super().__init__(_group_of(parallel))
        # vLLM's executor of several processes reads replies in the order of ranks, and stops at
        # the first failed one; the rest stay in their queues, and every later call reads answers
        # that are one call old. So only the rank that is read last may raise. Where each process
        # has a front end of its own, each must hear of it.
        is_last = self.rank % parallel.world_size == parallel.world_size - 1
        self._may_raise: bool = is_last or is_launched(parallel)

    @contextlib.contextmanager
    def raising_once(self) -> Iterator[None]:
        """Let an error out on one rank only: vLLM reads no further. All ranks have logged it."""
        try:
            yield
        except DBufferError:
            if self._may_raise:
                raise


def _group_of(parallel: Any) -> Any:
    """All workers of an engine, as a group of vLLM's.

    Its world is torch.distributed's, which several engines share where torchrun started them.
    """
    world, tensor_parallel = get_world_group(), get_tp_group()
    if not is_launched(parallel) or world.world_size == parallel.world_size:
        return world
    if tensor_parallel.world_size == parallel.world_size:
        return tensor_parallel
    raise EngineUnsupportedError(
        f"a job of {world.world_size} ranks has several engines of {parallel.world_size} ranks, "
        "which are more than those of one tensor-parallel group: use pipeline_parallel_size=1, "
        "or one engine"
    )
