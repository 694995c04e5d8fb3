r"""`FollowStore`: a vLLM server that follows a store by itself, with no route open for it.

An ASGI middleware, which vLLM puts into its server with::

    vllm serve MODEL --weight-transfer-config '{"backend": "dbuffer"}' \
        --additional-config '{"dbuffer": {"store": "/dev/shm/policy"}}' \
        --middleware dbuffer.integrations.vllm.FollowStore

The server is not reported ready before it serves the newest version that is there. With
``--load-format dummy`` there must be one, or come in time. A server that cannot follow does not
start. Of several API servers with one engine, one follows, and all are ready when the engine is.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import (
    DBufferError,
    OptionError,
    UnsupportedError,
    WaitTimeoutError,
)
from dbuffer.integrations.vllm.api_servers import SharedFollower
from dbuffer.integrations.vllm.config import (
    engine_settings,
    instance_of_api_servers,
    options_of,
    shares_engine,
)
from dbuffer.integrations.vllm.exchanges import Outlook, observe
from dbuffer.integrations.vllm.follow_vllm import follow
from dbuffer.integrations.vllm.plugin import log_as_vllm
from dbuffer.integrations.vllm.responses import serve
from dbuffer.runtime.trouble import message_of

logger = logging.getLogger(__name__)


class FollowStore:
    """Follows from the server's start to its end, and tells requests which weights they get.

    See :mod:`.responses` for what it adds to requests and responses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._outlook: Outlook | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; or the lifespan, which is where following begins and ends."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and self._outlook is not None:
            await serve(self._app, self._outlook, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        log_as_vllm()
        try:
            engine = _engine_of(scope)
            follower = await _start(engine)
        # Servers take an exception here for an application without a lifespan, and serve. This
        # message of the protocol ends the server.
        except Exception as error:  # noqa: BLE001
            await receive()
            await send({"type": "lifespan.startup.failed", "message": _refusal(error)})
            return
        self._outlook = Outlook(engine)
        observe(engine, self._outlook)
        is_following = True

        async def receive_after_us() -> Message:
            nonlocal is_following
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await _end(follower)  # while the engine is still there for a switch under way
                is_following = False
            return message

        try:
            await self._app(scope, receive_after_us, send)
        finally:
            # Not again: servers cancel what still waits after the shutdown, and log that they take
            # it for an application without a lifespan.
            if is_following:
                await _end(follower)


def _refusal(error: Exception) -> str:
    """Describe an error in one line, however long it is."""
    reason = " ".join(message_of(error).split())
    return f"this server does not start, because it cannot follow: {reason}"


async def _end(follower: BackgroundFollower | SharedFollower) -> None:
    """Stop following. An error must not keep the server from ending."""
    try:
        await follower.aclose()
    except (DBufferError, OSError) as error:
        logger.warning("this server did not stop following properly: %s", str(error))


def _engine_of(scope: Scope) -> Any:
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    if engine is None:
        raise UnsupportedError("FollowStore is for vLLM's API server, and this is another")
    return engine


async def _start(engine: Any) -> BackgroundFollower | SharedFollower:
    """Begin to follow, and wait until the engine serves the newest version."""
    config = engine.vllm_config
    options = options_of(config.additional_config)
    if options is None:
        raise OptionError(
            'FollowStore needs a store: --additional-config \'{"dbuffer": {"store": directory}}\''
        )

    def begin() -> BackgroundFollower:
        pause = engine_settings(config.additional_config).get("pause", "keep")
        follower = follow(engine, pause=pause)
        assert isinstance(follower, BackgroundFollower)  # noqa: S101 - an AsyncLLM is followed so
        return follower

    async def begin_until_ready() -> BackgroundFollower:
        follower = begin()
        try:
            await follower.wait_started_async()
            if config.load_config.load_format == "dummy" and follower.applied is None:
                await _wait_for_weights(follower, options)
        except BaseException:
            await follower.aclose()
            raise
        return follower

    if shares_engine(config):
        return await SharedFollower.begin(instance_of_api_servers(), begin, begin_until_ready)
    return await begin_until_ready()


async def _wait_for_weights(follower: BackgroundFollower, options: EngineOptions) -> None:
    """Wait for the first version: weights of ``--load-format dummy`` must not be served."""
    logger.info(
        "%s has dummy weights: waiting %g s (timeout_s) for a version in %s",
        follower.engine_id,
        options.timeout_s,
        options.store,
    )
    try:
        await follower.wait_applied_async(1, options.timeout_s)
    except WaitTimeoutError as error:
        raise WaitTimeoutError(
            f"with --load-format dummy there is nothing to serve before there is a version in "
            f"{options.store}: {error}"
        ) from error
