"""vLLM follows a store: an ``LLM``, an ``AsyncLLM``, a server, of any tensor-parallel size.

In vLLM's workers, `plugin`, `backend` and `rank` reach one `RankEndpoint`; `weight_calls` notices
calls of vLLM that write weights. In its core, `core_labels` and `core_pauses` label each token and
pause. `vllm_engine` drives an engine; `requests` and `responses` tell a server's clients.

vLLM imports this package in each of its processes before it is ready itself, so its modules, and
vLLM, are imported when they are used.
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
    __getattr__, __all__ = lazily(__name__)
