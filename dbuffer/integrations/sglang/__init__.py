"""SGLang: engines and servers that follow a store, with any tensor-parallel size.

SGLang's processes receive weights through :func:`load_from_store`, their ``custom_weight_loader``.
Importing this package does not import SGLang: a name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.engine.background import BackgroundFollower as BackgroundFollower
    from dbuffer.engine.follower import Follower as Follower
    from dbuffer.engine.engine_options import EngineOptions as EngineOptions
    from dbuffer.integrations.sglang.sglang_engine import (
        LOADER as LOADER,
        OfflineEngine as OfflineEngine,
        ServerEngine as ServerEngine,
        follow as follow,
    )
    from dbuffer.integrations.sglang.rank import load_from_store as load_from_store
    from dbuffer.integrations.version_spans import VersionSpan as VersionSpan
    from dbuffer.integrations.version_spans import versions_of as versions_of
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "BackgroundFollower": "dbuffer.engine.background",
            "EngineOptions": "dbuffer.engine.engine_options",
            "Follower": "dbuffer.engine.follower",
            "LOADER": ".sglang_engine",
            "OfflineEngine": ".sglang_engine",
            "ServerEngine": ".sglang_engine",
            "VersionSpan": "dbuffer.integrations.version_spans",
            "follow": ".sglang_engine",
            "load_from_store": ".rank",
            "versions_of": "dbuffer.integrations.version_spans",
        },
    )
