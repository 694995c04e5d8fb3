"""The engines that can follow a store, each behind the same few calls.

All calls block, whatever the engine: an ``AsyncLLM`` is called in its own event loop from another
thread, a server over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import wait
from typing import Any, ClassVar, TypeVar

from dbuffer.errors import (
    ClosedError,
    EngineBusyError,
    EngineUnreachableError,
    EngineUnsupportedError,
    EngineUpdateError,
)
from dbuffer.integrations.engine.protocol import Engine, EngineFacts, PauseMode
from dbuffer.integrations.engine.server import EngineServer
from dbuffer.integrations.vllm.config import (
    BACKEND,
    default_engine_id,
    is_launched,
    options_of,
)
from dbuffer.integrations.vllm.plugin import serves_every_worker

ResultT = TypeVar("ResultT")

EXTENSION = "dbuffer.integrations.vllm.WorkerExtension"

_EXTENSION_CLASS = "dbuffer.integrations.vllm.extension.WorkerExtension"
_RESUME_TRIES = 5
_ALIVE_CHECK_S = 1.0


def facts_of(config: Any) -> EngineFacts:
    """From a ``VllmConfig``, or from what one looks like in JSON.

    Raises:
        EngineUnsupportedError: it cannot take weights from a store.
        OptionError: (a ``ValueError``) its ``additional_config`` says something wrong of dbuffer.
    """
    parallel = _get(config, "parallel_config")
    transfer = _get(config, "weight_transfer_config")
    has_backend = transfer is not None and _get(transfer, "backend") == BACKEND
    if not (has_backend or has_extension(config)):
        raise EngineUnsupportedError(
            "this engine takes no weights from a store: start it with weight_transfer_config="
            f"WeightTransferConfig(backend={BACKEND!r}), or with worker_extension_cls="
            f'{EXTENSION!r}; a server: --weight-transfer-config \'{{"backend": '
            f'"{BACKEND}"}}\', or --worker-extension-cls {EXTENSION}'
        )
    if _get(parallel, "data_parallel_size") > 1:
        raise EngineUnsupportedError(
            "an engine with data_parallel_size above 1 cannot be followed as one: start one "
            "engine for each replica, and let each follow the store"
        )
    return EngineFacts(
        instance_id=_get(config, "instance_id"),
        num_ranks=_get(parallel, "world_size"),
        configured=options_of(_get(config, "additional_config")),
        has_backend=has_backend,
    )


def has_extension(config: Any) -> bool:
    """Whether its workers have the methods of `WorkerExtension`, by an option or by our plugin."""
    # An engine in this process, or started from it, has loaded the plugins that this one has.
    is_here = not isinstance(config, Mapping)
    name = _get(_get(config, "parallel_config"), "worker_extension_cls")
    # What a server says must not decide what is imported here.
    return (is_here and serves_every_worker()) or _is_extension(name, may_import=is_here)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name)


def _is_extension(qualified_name: str | None, *, may_import: bool) -> bool:
    """Whether it is ours, or has ours among its bases."""
    if not qualified_name or qualified_name == EXTENSION:
        return qualified_name == EXTENSION
    module, _, name = qualified_name.rpartition(".")
    if may_import and module:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and any(
        f"{base.__module__}.{base.__qualname__}" == _EXTENSION_CLASS for base in found.__mro__
    )


def _facts_here(config: Any) -> EngineFacts:
    from vllm.plugins import load_general_plugins

    # A front end whose configuration was made in another process has loaded none; its workers have.
    load_general_plugins()
    return facts_of(config)


class _EngineHere:
    """An engine that ends with this process."""

    is_server: ClassVar = False

    def close(self) -> None:
        """There is nothing to let go of."""


class OfflineEngine(_EngineHere):
    """An ``LLM``: nothing runs between two calls of it, so there is nothing to pause."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine

    def facts(self) -> EngineFacts:
        """How it was started."""
        return _facts_here(self._engine.vllm_config)

    def default_id(self, facts: EngineFacts) -> str:
        """From vLLM's name for it."""
        return default_engine_id(facts.instance_id)

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all its workers; what each returned."""
        return list(self._llm.collective_rpc(method, kwargs=arguments))

    def is_paused(self) -> bool:
        """Nobody else can have."""
        return False

    def pause(self, mode: PauseMode) -> None:  # noqa: ARG002
        """Forget its caches.

        Raises:
            EngineBusyError: it has unfinished requests, or its weights are asleep.
        """
        if "weights" in self._sleeping_tags():
            raise EngineBusyError(
                "the engine's weights are asleep, and their memory may be gone: wake it up first "
                "(wake_up(tags=['weights']) is enough), then sync"
            )
        if self._engine.has_unfinished_requests() or not self._llm.reset_prefix_cache():
            raise EngineBusyError("the engine is generating: wait for its requests, then sync")
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()

    def resume(self) -> None:
        """There is nothing to resume."""

    def weight_version(self) -> str:
        """What it reports."""
        return str(self._engine.get_weight_version())

    def set_weight_version(self, version: str) -> None:
        """Let it report this."""
        self._engine.set_weight_version(version)

    def _sleeping_tags(self) -> set[str]:
        """What of it is asleep; nothing, for all that is said of an engine in another process."""
        executor = getattr(self._engine, "model_executor", None)
        return set(getattr(executor, "sleeping_tags", ()))


class AsyncEngine(_EngineHere):
    """An ``AsyncLLM``, called from any thread but that of its event loop."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    @staticmethod
    def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
        """The event loop that an ``AsyncLLM`` runs in, asked from any thread.

        Raises:
            EngineUnsupportedError: it runs in none yet.
        """
        # Made in its loop, by the first of its coroutines that needs it.
        handler = engine.output_handler
        if handler is not None:
            loop: asyncio.AbstractEventLoop = handler.get_loop()
            return loop
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            raise EngineUnsupportedError(
                "this AsyncLLM runs in no event loop yet: make it, or this, in a coroutine"
            ) from None

    def facts(self) -> EngineFacts:
        """How it was started."""
        return _facts_here(self._engine.vllm_config)

    def default_id(self, facts: EngineFacts) -> str:
        """From vLLM's name for it."""
        return default_engine_id(facts.instance_id)

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all its workers; what each returned."""
        return list(self._call(self._engine.collective_rpc(method, kwargs=arguments)))

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        return bool(self._call(self._engine.is_paused()))

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and forget whatever was computed with the weights it has."""
        self._call(self._pause(mode))

    async def _pause(self, mode: PauseMode) -> None:
        # Not pause_generation(): that sleeps for 20 ms after the engine has paused.
        await self._engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
        # Requests that are kept lose what was computed with the old weights too: it is computed
        # anew, so that no token comes from two versions.
        is_reset, *_ = await asyncio.gather(
            self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
            self._engine.reset_mm_cache(),
            self._engine.reset_encoder_cache(),
        )
        if not is_reset:
            raise EngineUpdateError("the engine could not reset its prefix cache")

    def resume(self) -> None:
        """Let it go on."""
        self._call(self._engine.resume_generation())

    def weight_version(self) -> str:
        """What it reports with its responses."""
        return str(self._call(self._engine.get_weight_version()))

    def set_weight_version(self, version: str) -> None:
        """Let it report this with its responses."""
        self._call(self._engine.update_weight_version(version))

    def _call(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        if _is_in_loop(self._loop):
            call.close()
            raise EngineBusyError(
                "called in the engine's event loop, which this would wait for: call it in another "
                "thread, as with await asyncio.to_thread(...)"
            )
        if self._loop.is_closed():
            call.close()
            raise ClosedError("the engine's event loop has ended, so nobody follows any more")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        # vLLM never answers a call that was under way when its engine died.
        while not wait([future], _ALIVE_CHECK_S).done:
            if self._engine.errored or not self._loop.is_running():
                future.cancel()
                raise ClosedError("the engine, or its event loop, has ended in mid-call")
        try:
            return future.result()
        except Exception as error:
            if self._engine.errored:
                raise ClosedError(f"the engine is dead: {error}") from error
            raise


def _is_in_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class ServerEngine(EngineServer):
    """A vLLM server in development mode (``VLLM_SERVER_DEV_MODE=1``); see :class:`EngineServer`."""

    IS_WHAT = "vLLM"
    WITHOUT_ROUTE = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1, or let it follow by itself with --middleware "
        "dbuffer.integrations.vllm.FollowStore"
    )

    def facts(self) -> EngineFacts:
        """How it was started."""
        return facts_of(self._get("/server_info", "vllm_config", config_format="json"))

    def default_id(self, facts: EngineFacts) -> str:
        """From its address, so that it is the same after a restart; unless it has told its own."""
        if facts.configured is not None:
            return default_engine_id(facts.instance_id)
        return f"vllm-{self._name()}"

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all its workers; what each returned."""
        body = {"method": method, "kwargs": arguments}
        response = self._request("POST", "/collective_rpc", json=body, timeout=self._long)
        return list(self._body(response).get("results", [])) if response.content else []

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        return bool(self._get("/is_paused", "is_paused"))

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and forget whatever was computed with the weights it has."""
        params = {"mode": mode, "clear_cache": "false"}
        self._request("POST", "/pause", params=params, timeout=self._long)
        caches = {"reset_running_requests": "true", "reset_external": "true"}
        response = self._request("POST", "/reset_prefix_cache", params=caches)
        # Versions of vLLM that say whether it worked say so in a body.
        if response.content and self._body(response).get("success") is False:
            raise EngineUpdateError(f"{self.url} could not reset its prefix cache")
        self._request("POST", "/reset_mm_cache")
        self._request("POST", "/reset_encoder_cache")

    def resume(self) -> None:
        """Let it go on; a network that loses one answer must not leave it paused."""
        for left in reversed(range(_RESUME_TRIES)):
            try:
                self._request("POST", "/resume")
            except (EngineUnreachableError, EngineUpdateError):
                if not left:
                    raise
                time.sleep(0.2)
            else:
                return

    def weight_version(self) -> str:
        """What it reports with its responses."""
        return str(self._get("/weight_info", "weight_version"))

    def set_weight_version(self, version: str) -> None:
        """Let it report this with its responses."""
        self._request("POST", "/update_weight_version", json={"new_version": version})


def is_one_of_several(target: Any) -> bool:
    """Whether it is an ``LLM`` that is only one rank of its engine."""
    if not hasattr(target, "llm_engine"):
        return False
    parallel = target.llm_engine.vllm_config.parallel_config
    return is_launched(parallel) and parallel.world_size > 1


def engine_of(target: Any, *, api_key: str | None = None) -> Engine:
    """The engine behind a ``vllm.LLM``, an ``AsyncLLM``, or a server's URL.

    Raises:
        EngineUnsupportedError: it is none of them, or only a part of one.
    """
    if isinstance(target, str):
        return ServerEngine(target, api_key=api_key)
    if is_one_of_several(target):
        raise EngineUnsupportedError(
            "this LLM is one rank of an engine that torchrun started: let every rank call "
            "dbuffer.integrations.vllm.follow with its own"
        )
    if hasattr(target, "llm_engine"):
        return OfflineEngine(target)
    if hasattr(target, "output_handler") and hasattr(target, "engine_core"):
        return AsyncEngine(target, AsyncEngine.loop_of(target))
    raise EngineUnsupportedError(f"a {type(target).__name__} is no engine of vLLM's")
