"""A dbuffer store as vLLM's source of weights: offline, asynchronous, as a server, any TP size.

* ``backend="dbuffer"`` in vLLM's own weight transfer configuration (:mod:`.backend`), and the
  trainer's half of it (:mod:`.trainer`);
* :class:`WorkerExtension`, through which workers are reached (:mod:`.rank`);
* :func:`follow`, for an ``LLM``, an ``AsyncLLM`` or a server's URL (:mod:`.follow_vllm`);
* :class:`FollowStore`, a middleware that makes a server follow by itself (:mod:`.middleware`);
* :func:`versions_of`: which tokens of an output came from which version;
* :func:`adapter_request`, for a store that holds an adapter (:mod:`.adapters`).

In vLLM's workers `plugin`, `backend` and `rank` reach one `RankEndpoint`, with `meta_layers` below
it; `weight_calls` notices vLLM's own calls that write weights. `core_labels`
lets the engine core tell with each token which weights it came from; `requests` and `responses`
pass that on to a server's clients. `vllm_engine`, `ray_follower` and `launched` (where torchrun
started the ranks) drive an engine; `config` reads its configuration.

vLLM imports this package in every one of its processes, before it is ready itself; so nothing of
it, and nothing of vLLM, is imported before it is asked for.
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
