"""`Ranks`: the ranks of one engine, telling each other how it went."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

AnswerT = TypeVar("AnswerT")


class Ranks:
    """All ranks of an engine. A gather is a step that all of them take, or none can go on.

    Args:
        group: a ``GroupCoordinator`` of vLLM's, or of SGLang's, which was vLLM's once.
    """

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.process_group: Any = group.cpu_group
        """The same as a group of torch.distributed, for what lies in main memory."""

    def gather(self, answer: AnswerT) -> list[AnswerT]:
        """Everyone's answers, by rank, to everyone."""
        if self.size == 1:
            return [answer]
        answers: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(answers, answer, group=self.process_group)
        return answers
