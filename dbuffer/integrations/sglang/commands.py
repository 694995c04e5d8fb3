"""Requests of a follower to SGLang's ranks, each as the name of a tensor.

SGLang hands a ``custom_weight_loader`` what is in an update's tensors, and nothing else. So an
update is one tensor without elements, whose name is a command: the request. Each rank then maps the
weights itself, and nothing large goes through SGLang's sockets.
"""

from __future__ import annotations

import json

import torch

from dbuffer.engine.messages import RankRequest
from dbuffer.errors import OptionError


def to_tensors(request: RankRequest | None) -> list[tuple[str, torch.Tensor]]:
    """Encode a request, or None to do nothing."""
    command = {"request": None if request is None else request.as_json()}
    return [(json.dumps(command), torch.empty(0, dtype=torch.uint8))]


def from_tensors(tensors: list[tuple[str, torch.Tensor]]) -> RankRequest | None:
    """Decode what :func:`to_tensors` encoded.

    Raises:
        OptionError: these are other tensors, or the request is none of this version of dbuffer.
    """
    try:
        [(text, _)] = tensors
        request = json.loads(text)["request"]
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"{len(tensors)} tensors that are not a command of dbuffer ({error}): this loader is "
            "for dbuffer.integrations.sglang.follow"
        ) from None
    return None if request is None else RankRequest.parse(request)
