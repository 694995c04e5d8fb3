r"""`FollowStore`: a vLLM server that follows a store by itself, with no route open for it.

An ASGI middleware, which vLLM puts into its server when it is told so::

    vllm serve MODEL --weight-transfer-config '{"backend": "dbuffer"}' \
        --additional-config '{"dbuffer": {"store": "/dev/shm/policy"}}' \
        --middleware dbuffer.integrations.vllm.FollowStore

The server is not reported ready before it serves the newest version that is there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dbuffer.errors import EngineUnsupportedError, OptionError
from dbuffer.integrations.engine.follower import BackgroundFollower
from dbuffer.integrations.vllm.config import engine_settings
from dbuffer.integrations.vllm.follower import follow

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class FollowStore:
    """Follows from the server's start to its end; requests pass through untouched."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; or the lifespan, which is where following begins and ends."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        follower = await _start(scope["app"].state)
        try:
            await self._app(scope, receive, send)
        finally:
            await follower.aclose()


async def _start(state: Any) -> BackgroundFollower:
    """Begin to follow, and wait until the engine serves what is there.

    Raises:
        EngineUnsupportedError: several processes serve this engine, or it was not started with
            what following needs. The server does not start.
    """
    engine = state.engine_client
    if getattr(engine.vllm_config.parallel_config, "_api_process_count", 1) > 1:
        raise EngineUnsupportedError(
            "several API servers share this engine, and each would follow: --api-server-count 1"
        )
    settings = engine_settings(engine.vllm_config.additional_config)
    if "store" not in settings:
        raise OptionError(
            'FollowStore needs a store: --additional-config \'{"dbuffer": {"store": directory}}\''
        )
    follower = follow(engine, pause=settings.get("pause", "keep"))
    assert isinstance(follower, BackgroundFollower)  # noqa: S101 - an AsyncLLM is followed so
    try:
        await follower.wait_started_async()
    except BaseException:
        await follower.aclose()
        raise
    return follower
