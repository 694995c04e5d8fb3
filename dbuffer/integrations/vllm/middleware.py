"""`FollowStore`: ASGI middleware that makes a vLLM server follow a store.

The server answers no requests until it serves the newest version in the store. With ``--load-format
dummy``, it waits for the first version. A server that cannot follow does not start.

If an engine has several API servers, the first API server follows the store. The other API servers
wait until the engine is ready. If an API server dies, vLLM ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.endpoint import watch
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import DBufferError, OptionError, UnsupportedError, WaitTimeoutError
from dbuffer.integrations.vllm.config import adapters_of, engine_settings, options_of
from dbuffer.integrations.vllm.core import READY
from dbuffer.integrations.vllm.follow_vllm import follow
from dbuffer.integrations.vllm.plugin import log_as_vllm
from dbuffer.integrations.vllm.requests import Outlook
from dbuffer.integrations.vllm.responses import observe, serve
from dbuffer.integrations.vllm.vllm_engine import ask_core
from dbuffer.runtime.trouble import message_of

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.adapters import FollowedAdapter

logger = logging.getLogger(__name__)

LOOK_S = 0.2


class FollowStore:
    """Follows a store while the server runs, and adds weight versions to responses.

    :mod:`.requests` and :mod:`.responses` describe the added headers, fields and routes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._outlook: Outlook | None = None
        self._follower: BackgroundFollower | None = None
        self._adapters: list[FollowedAdapter] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and self._outlook is not None:
            await serve(self._app, self._outlook, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        log_as_vllm()

        async def receive_after_us() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._end()  # a running switch needs the engine until it ends
            return message

        try:
            try:
                state = getattr(scope.get("app"), "state", None)
                engine = getattr(state, "engine_client", None)
                await self._start(engine, getattr(state, "openai_serving_models", None))
            # Do not raise the error: the server would assume that the application has no lifespan,
            # and would start to serve. The message below makes the server exit.
            except Exception as error:  # noqa: BLE001
                try:
                    await self._end()
                finally:
                    await receive()
                    reason = " ".join(message_of(error).split())
                    message = f"this server does not start, because it cannot follow: {reason}"
                    await send({"type": "lifespan.startup.failed", "message": message})
                return
            self._outlook = Outlook(engine, self._follower)
            for adapter in self._adapters:
                self._outlook.adapters[adapter.name] = Outlook(engine, adapter=adapter)
            observe(engine)
            # At its planned end, a server first shuts the engine down, and then its application.
            watch(engine, "shutdown", self._stop)
            await self._app(scope, receive_after_us, send)
        finally:
            await self._end()

    async def _start(self, engine: Any, models: Any) -> None:
        if engine is None:
            raise UnsupportedError("FollowStore is for vLLM's API server, not for other servers")
        config = engine.vllm_config
        parallel = config.parallel_config
        is_shared = parallel._api_process_count > 1  # noqa: SLF001 - vLLM has no public name
        if stores := adapters_of(config.additional_config):
            if is_shared:
                raise UnsupportedError(
                    "adapters need one API server (--api-server-count 1): several servers would "
                    "change to a version at different times"
                )
            await self._start_adapters(stores, engine, models)
            return
        options = options_of(config.additional_config)
        if options is None:
            raise OptionError(
                "FollowStore needs a store: --additional-config "
                '\'{"dbuffer": {"store": directory}}\', or {"adapters": {name: directory}}'
            )
        if is_shared and options.until_done:
            raise UnsupportedError(
                "until_done needs one API server (--api-server-count 1): clients can reach any "
                "of several servers, but only the first could answer /weights/done"
            )
        if is_shared and parallel._api_process_rank != 0:  # noqa: SLF001 - vLLM has no public name
            while not await ask_core(engine, None, READY):
                await asyncio.sleep(LOOK_S)
            return
        pause = engine_settings(config.additional_config).get("pause", "keep")
        follower = follow(engine, pause=pause)
        assert isinstance(follower, BackgroundFollower)  # noqa: S101 - follow() returns this for an AsyncLLM
        self._follower = follower
        await follower.wait_started_async()
        if config.load_config.load_format == "dummy" and follower.applied is None:
            await _wait_for_weights(follower, options)
        if is_shared:
            await ask_core(engine, None, READY, True)

    async def _start_adapters(
        self, stores: Mapping[str, EngineOptions], engine: Any, models: Any
    ) -> None:
        # Imported here, so that servers without adapters do not import vLLM's LoRA modules.
        from dbuffer.integrations.vllm import adapters

        adapters.require_slots(
            engine.vllm_config.lora_config, len(stores) + len(models.lora_requests)
        )
        for name, options in stores.items():
            adapter = adapters.FollowedAdapter(name, options, engine, models)
            self._adapters.append(adapter)
            await asyncio.to_thread(adapter.start)
        adapters.show_adapters_by_name(models)

    def _stop(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        for part in (*self._adapters, self._follower):
            if part is not None:
                part.stop()
        return contextlib.nullcontext()

    async def _end(self) -> None:
        parts = [asyncio.to_thread(adapter.close) for adapter in self._adapters]
        if self._follower is not None:
            parts.append(self._follower.aclose())
        self._follower, self._adapters = None, []
        for error in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(error, DBufferError | OSError):
                logger.warning("an error occurred when following was stopped: %s", str(error))
            elif error is not None:
                raise error


async def _wait_for_weights(follower: BackgroundFollower, options: EngineOptions) -> None:
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
            f"with --load-format dummy the server needs a version to serve, and {options.store} "
            f"has none: {error}"
        ) from error
