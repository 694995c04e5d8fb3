"""vLLM engines that follow a store: an ``LLM``, an ``AsyncLLM`` or a server.

`plugin` adds dbuffer's code to each process of vLLM, and detects vLLM's own writes of weights. In
the workers, `backend` answers calls of vLLM's weight transfer, and `rank` loads versions into the
model. In the engine core, `core` labels each token with a version, and pauses the
engine. In the front end, `vllm_engine` sends a follower's calls to the engine; `requests` and
`responses` report versions to a server's clients.

vLLM loads dbuffer's plugin, and so this package, while vLLM itself is being imported. So importing
this package does not import vLLM: each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.engine.background import BackgroundFollower as BackgroundFollower
    from dbuffer.engine.follower import Follower as Follower
    from dbuffer.engine.engine_options import EngineOptions as EngineOptions
    from dbuffer.integrations.vllm.adapters import adapter_request as adapter_request
    from dbuffer.integrations.vllm.rank import WorkerExtension as WorkerExtension
    from dbuffer.integrations.vllm.follow_vllm import follow as follow
    from dbuffer.integrations.vllm.middleware import FollowStore as FollowStore
    from dbuffer.integrations.vllm.trainer import DBufferTrainerInitInfo as DBufferTrainerInitInfo
    from dbuffer.integrations.version_spans import VersionSpan as VersionSpan
    from dbuffer.integrations.version_spans import versions_of as versions_of
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "BackgroundFollower": "dbuffer.engine.background",
            "DBufferTrainerInitInfo": ".trainer",
            "EngineOptions": "dbuffer.engine.engine_options",
            "FollowStore": ".middleware",
            "Follower": "dbuffer.engine.follower",
            "VersionSpan": "dbuffer.integrations.version_spans",
            "WorkerExtension": ".rank",
            "adapter_request": ".adapters",
            "follow": ".follow_vllm",
            "versions_of": "dbuffer.integrations.version_spans",
        },
    )
