"""`Command`: a follower's request to an engine's processes, as the name of a tensor.

SGLang hands a ``custom_weight_loader`` what is in an update's tensors, and nothing else. So an
update is one tensor without elements, whose name is the command; each rank then maps the weights
itself, and nothing large goes through SGLang's sockets.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from dbuffer.errors import OptionError
from dbuffer.weights.names import NameMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Request to all ranks, and the names that they load by."""

    request: dict[str, Any] | None
    """A :class:`~dbuffer.integrations.engine.messages.RankRequest`; None: do nothing."""
    rename: dict[str, Any] | None = None
    """Map from the store's names to the engine's; see :meth:`NameMap.as_json`."""

    @property
    def names(self) -> NameMap | None:
        return None if self.rename is None else NameMap.parse(self.rename, "rename")

    def as_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(json.dumps(asdict(self)), torch.empty(0, dtype=torch.uint8))]

    def as_payload(self) -> bytes:
        """Encode the tensors for an engine in another process.

        Not torch's pickles for other processes: those pass memory on, through a connection.
        """
        return pickle.dumps(self.as_tensors())

    @classmethod
    def parse(cls, tensors: list[tuple[str, torch.Tensor]]) -> Self:
        try:
            [(text, _)] = tensors
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"{len(tensors)} tensors that are not a command of dbuffer ({error}): this loader "
                "is for dbuffer.integrations.sglang.follow"
            ) from None
