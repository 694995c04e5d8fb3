"""A dbuffer store as SGLang's source of weights: offline and as a server, any TP size.

* :func:`follow`, for an ``sglang.Engine`` or a server's URL (:mod:`.follow_sglang`);
* :func:`versions_of`: the version of each token of an output;
* :func:`load_from_store`, the ``custom_weight_loader`` through which the engine's own processes
  receive (:mod:`.loader`).

In SGLang's schedulers, `rank` is below the loader, and `weight_calls` notices SGLang's own calls
that write weights; `sglang_engine` drives an engine.

Names are imported when they are used, and SGLang with them.
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
        OfflineSglang,
        SglangServer,
    )
    from dbuffer.integrations.sglang.follow_sglang import follow as follow
    from dbuffer.integrations.sglang.loader import load_from_store as load_from_store
    from dbuffer.integrations.version_spans import VersionSpan as VersionSpan
    from dbuffer.integrations.version_spans import versions_of as versions_of

    OfflineEngine, ServerEngine = OfflineSglang, SglangServer
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "BackgroundFollower": "dbuffer.engine.background",
            "EngineOptions": "dbuffer.engine.engine_options",
            "Follower": "dbuffer.engine.follower",
            "LOADER": ".sglang_engine",
            "OfflineEngine": ".sglang_engine:OfflineSglang",
            "ServerEngine": ".sglang_engine:SglangServer",
            "VersionSpan": "dbuffer.integrations.version_spans",
            "follow": ".follow_sglang",
            "load_from_store": ".loader",
            "versions_of": "dbuffer.integrations.version_spans",
        },
    )
