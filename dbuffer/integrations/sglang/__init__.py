"""A dbuffer store as SGLang's source of weights: offline and as a server, any TP size.

* :func:`follow`, for an ``sglang.Engine`` or a server's URL (:mod:`.follower`);
* :func:`load_from_store`, the ``custom_weight_loader`` through which the engine's own processes
  receive (:mod:`.loader`).

Nothing of it, and nothing of SGLang, is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbuffer.integrations.engine.follower import BackgroundFollower, Follower
    from dbuffer.integrations.engine.options import EngineOptions
    from dbuffer.integrations.sglang.engines import LOADER, OfflineEngine, ServerEngine
    from dbuffer.integrations.sglang.follower import follow
    from dbuffer.integrations.sglang.loader import load_from_store

_HERE = "dbuffer.integrations.sglang"
_MODULES = {
    "BackgroundFollower": "dbuffer.integrations.engine.follower",
    "EngineOptions": "dbuffer.integrations.engine.options",
    "Follower": "dbuffer.integrations.engine.follower",
    "LOADER": f"{_HERE}.engines",
    "OfflineEngine": f"{_HERE}.engines",
    "ServerEngine": f"{_HERE}.engines",
    "follow": f"{_HERE}.follower",
    "load_from_store": f"{_HERE}.loader",
}

__all__ = [
    "LOADER",
    "BackgroundFollower",
    "EngineOptions",
    "Follower",
    "OfflineEngine",
    "ServerEngine",
    "follow",
    "load_from_store",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
