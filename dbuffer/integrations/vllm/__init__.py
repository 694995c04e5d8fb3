"""A dbuffer store as vLLM's source of weights: offline, asynchronous, as a server, any TP size.

* ``backend="dbuffer"`` in vLLM's own weight transfer configuration (:mod:`.backend`), and the
  trainer's half of it (:mod:`.trainer`);
* :class:`WorkerExtension` for engines that were started without one (:mod:`.extension`);
* :func:`follow`, for an ``LLM``, an ``AsyncLLM`` or a server's URL (:mod:`.follower`);
* :class:`FollowStore`, a middleware that makes a server follow by itself (:mod:`.middleware`);
* :func:`adapter_request`, for a store that holds an adapter (:mod:`.adapters`).

vLLM imports this package in every one of its processes, before it is ready itself; so nothing of
it, and nothing of vLLM, is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbuffer.integrations.engine.follower import BackgroundFollower, Follower
    from dbuffer.integrations.engine.options import EngineOptions
    from dbuffer.integrations.vllm.adapters import adapter_request
    from dbuffer.integrations.vllm.backend import DBufferWeightTransferEngine
    from dbuffer.integrations.vllm.extension import WorkerExtension
    from dbuffer.integrations.vllm.follower import follow
    from dbuffer.integrations.vllm.middleware import FollowStore
    from dbuffer.integrations.vllm.trainer import (
        DBufferTrainerInitInfo,
        DBufferTrainerWeightTransferEngine,
    )

_ENGINE = "dbuffer.integrations.engine"
_HERE = "dbuffer.integrations.vllm"
_MODULES = {
    "BackgroundFollower": f"{_ENGINE}.follower",
    "DBufferTrainerInitInfo": f"{_HERE}.trainer",
    "DBufferTrainerWeightTransferEngine": f"{_HERE}.trainer",
    "DBufferWeightTransferEngine": f"{_HERE}.backend",
    "EngineOptions": f"{_ENGINE}.options",
    "FollowStore": f"{_HERE}.middleware",
    "Follower": f"{_ENGINE}.follower",
    "WorkerExtension": f"{_HERE}.extension",
    "adapter_request": f"{_HERE}.adapters",
    "follow": f"{_HERE}.follower",
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
