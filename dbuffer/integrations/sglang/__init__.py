"""A dbuffer store as SGLang's source of weights: offline and as a server, any TP size.

* :func:`follow`, for an ``sglang.Engine`` or a server's URL (:mod:`.following`);
* :func:`load_from_store`, the ``custom_weight_loader`` through which the engine's own processes
  receive (:mod:`.loader`).

In SGLang's schedulers, `rank`, `model` and `shape_check` are below the loader; `engines` is where
an engine is driven, and `commands` what SGLang carries between them.

Nothing of it, and nothing of SGLang, is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.integrations.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.engine.background import BackgroundFollower
    from dbuffer.integrations.engine.follower import Follower
    from dbuffer.integrations.engine.options import EngineOptions
    from dbuffer.integrations.sglang.engines import LOADER
    from dbuffer.integrations.sglang.engines import OfflineSglang as OfflineEngine
    from dbuffer.integrations.sglang.engines import SglangServer as ServerEngine
    from dbuffer.integrations.sglang.following import follow
    from dbuffer.integrations.sglang.loader import load_from_store

_HERE = "dbuffer.integrations.sglang"
_MODULES = {
    "BackgroundFollower": "dbuffer.integrations.engine.background",
    "EngineOptions": "dbuffer.integrations.engine.options",
    "Follower": "dbuffer.integrations.engine.follower",
    "LOADER": f"{_HERE}.engines",
    "OfflineEngine": f"{_HERE}.engines:OfflineSglang",
    "ServerEngine": f"{_HERE}.engines:SglangServer",
    "follow": f"{_HERE}.following",
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


__getattr__ = lazily(__name__, _MODULES)
