"""The ranks of one engine: telling each other how it went, and who reports it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_world_group

AnswerT = TypeVar("AnswerT")


class Ranks:
    """All workers of an engine. A gather is a step that all of them take, or none can go on."""

    def __init__(self, vllm_config: Any) -> None:
        self._group = get_world_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size
        parallel = vllm_config.parallel_config
        # vLLM's executor of several processes reads replies in the order of ranks, and stops at
        # the first failed one; the rest stay in their queues, and every later call reads answers
        # that are one call old. So only the rank that is read last may raise.
        self.may_raise: bool = self.rank % parallel.world_size == parallel.world_size - 1

    def gather(self, answer: AnswerT) -> list[AnswerT]:
        """Everyone's answers, by rank, to everyone."""
        if self.size == 1:
            return [answer]
        answers: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(answers, answer, group=self._group.cpu_group)
        return answers
