"""A dbuffer store as vLLM's source of weights: offline, asynchronous, as a server, any TP size.

* ``backend="dbuffer"`` in vLLM's own weight transfer configuration (:mod:`.backend`), and the
  trainer's half of it (:mod:`.trainer`);
* :class:`WorkerExtension`, through which workers are reached (:mod:`.extension`);
* :func:`follow`, for an ``LLM``, an ``AsyncLLM`` or a server's URL (:mod:`.following`);
* :class:`FollowStore`, a middleware that makes a server follow by itself (:mod:`.middleware`);
* :func:`adapter_request`, for a store that holds an adapter (:mod:`.adapters`).

In vLLM's workers `plugin`, `backend` and `extension` are three names for one `RankEndpoint`, with
`rank`, `model`, `shape_check` and `ranks` below it. `engines`, `facts`, `ray_follower` and
`launched` (where torchrun started the ranks) are where an engine is driven; `config` is what vLLM's
configuration says of dbuffer.

vLLM imports this package in every one of its processes, before it is ready itself; so nothing of
it, and nothing of vLLM, is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.integrations.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.engine.background import BackgroundFollower
    from dbuffer.integrations.engine.follower import Follower
    from dbuffer.integrations.engine.options import EngineOptions
    from dbuffer.integrations.vllm.adapters import adapter_request
    from dbuffer.integrations.vllm.backend import DBufferWeightTransferEngine
    from dbuffer.integrations.vllm.extension import WorkerExtension
    from dbuffer.integrations.vllm.following import follow
    from dbuffer.integrations.vllm.middleware import FollowStore
    from dbuffer.integrations.vllm.trainer import (
        DBufferTrainerInitInfo,
        DBufferTrainerWeightTransferEngine,
    )

_ENGINE = "dbuffer.integrations.engine"
_HERE = "dbuffer.integrations.vllm"
_MODULES = {
    "BackgroundFollower": f"{_ENGINE}.background",
    "DBufferTrainerInitInfo": f"{_HERE}.trainer",
    "DBufferTrainerWeightTransferEngine": f"{_HERE}.trainer",
    "DBufferWeightTransferEngine": f"{_HERE}.backend",
    "EngineOptions": f"{_ENGINE}.options",
    "FollowStore": f"{_HERE}.middleware",
    "Follower": f"{_ENGINE}.follower",
    "WorkerExtension": f"{_HERE}.extension",
    "adapter_request": f"{_HERE}.adapters",
    "follow": f"{_HERE}.following",
}

__all__ = [
    "BackgroundFollower",
    "DBufferTrainerInitInfo",
    "DBufferTrainerWeightTransferEngine",
    "DBufferWeightTransferEngine",
    "EngineOptions",
    "FollowStore",
    "Follower",
    "WorkerExtension",
    "adapter_request",
    "follow",
]


__getattr__ = lazily(__name__, _MODULES)
