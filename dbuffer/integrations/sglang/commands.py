"""Requests of a follower to SGLang's ranks, each as the name of a tensor.

SGLang hands a ``custom_weight_loader`` what is in an update's tensors, and nothing else. So an
update is one tensor without elements, whose name is a command: the request, and the names that the
ranks load by. Each rank then maps the weights itself, and nothing large goes through SGLang's
sockets.
"""

from __future__ import annotations

import json

import torch

from dbuffer.engine.messages import RankRequest
from dbuffer.errors import OptionError
from dbuffer.weights.names import NameMap


def to_tensors(
    request: RankRequest | None, names: NameMap | None
) -> list[tuple[str, torch.Tensor]]:
    """Encode a request, or None to do nothing, and the map from the store's names."""
    command = {
        "request": None if request is None else request.as_json(),
        "rename": None if names is None else names.as_json(),
    }
    return [(json.dumps(command), torch.empty(0, dtype=torch.uint8))]


def from_tensors(
    tensors: list[tuple[str, torch.Tensor]],
) -> tuple[RankRequest | None, NameMap | None]:
    """Decode what :func:`to_tensors` encoded.

    Raises:
        OptionError: these are other tensors, or the request is none of this version of dbuffer.
    """
    try:
        [(text, _)] = tensors
        command = json.loads(text)
        request, rename = command["request"], command["rename"]
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"{len(tensors)} tensors that are not a command of dbuffer ({error}): this loader is "
            "for dbuffer.integrations.sglang.follow"
        ) from None
    return (
        None if request is None else RankRequest.parse(request),
        None if rename is None else NameMap.parse(rename, "rename"),
    )
