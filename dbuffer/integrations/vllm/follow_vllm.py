"""`follow`: keep a vLLM engine on a store's newest version."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, overload

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import PauseMode
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import OptionError, UnsupportedError
from dbuffer.integrations.vllm.config import replicas_of
from dbuffer.integrations.vllm.vllm_engine import (
    AsyncVllm,
    OfflineVllm,
    is_async,
    is_one_of_several,
    vllm_engine_of,
)
from dbuffer.runtime import options as checks

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.launched import LaunchedFollower


class _Offline(Protocol):
    """``vllm.LLM``, for type checkers."""

    llm_engine: Any


class _Asynchronous(Protocol):
    """``AsyncLLM``, for type checkers."""

    engine_core: Any


@overload
def follow(
    engine: str | _Asynchronous,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    canary: Callable[[Any], str | None] | None = None,
    **options: Any,
) -> BackgroundFollower: ...


@overload
def follow(
    engine: _Offline,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    canary: Callable[[Any], str | None] | None = None,
    **options: Any,
) -> Follower | LaunchedFollower: ...


def follow(
    engine: Any,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    canary: Callable[[Any], str | None] | None = None,
    **options: Any,
) -> Follower | BackgroundFollower | LaunchedFollower:
    """Keep a vLLM engine on a store's newest version.

    Args:
        engine: one of

            * a ``vllm.LLM``. Call the follower's ``sync()`` between generations. If torchrun
              started the engine's ranks, every rank must make these calls.
            * an ``AsyncLLM``. Call ``follow`` in its event loop. The engine follows in the
              background until ``aclose()``. Data-parallel replicas of a dense model follow
              independently.
            * the URL of a server in development mode. The server follows in the background until
              ``close()``.
        store: directory of the store, as the engine's workers and this process see it. Default:
            the store in the engine's ``additional_config``.
        pause: treatment of requests in flight during a switch; see :data:`.PauseMode`.
        api_key: API key of the server.
        canary: function that tests the engine after each switch, called with ``engine`` in the
            thread of the switch. If the function returns a reason or raises an error, this engine
            returns to the previous version, and other engines skip the refused version.
        **options: more fields of :class:`EngineOptions`.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid, or no store is given.
        VersionError: the ``version`` to serve is no longer in the store.
        UnsupportedError: the engine, as it was started, cannot follow a store, or does not support
            this ``pause``.
    """
    chosen = None
    if store is not None:
        chosen = EngineOptions.parse({"store": store, **options})
    elif options:
        raise OptionError(f"{', '.join(options)}: these options need a store as an argument")
    if canary is not None and not callable(canary):
        checks.refuse("canary", canary, "a function that judges an engine")
    if canary is not None and (chosen is None or chosen.version is not None):
        raise OptionError("canary needs a store as an argument, and no version to stay on")
    probe = None if canary is None else functools.partial(canary, engine)
    if is_one_of_several(engine):
        _require_no(canary, "ranks that torchrun started")
        from dbuffer.integrations.vllm.launched import LaunchedFollower

        launched = LaunchedFollower(engine, chosen)
        launched.start()
        return launched
    if is_async(engine) and len(replicas_of(engine.vllm_config)) > 1:
        _require_no(canary, "data-parallel replicas")
        loop = AsyncVllm.loop_of(engine)
        replicas = [AsyncVllm(engine, loop, index) for index in replicas_of(engine.vllm_config)]
        followers = (Follower(replica, chosen, pause=pause) for replica in replicas)
        return BackgroundFollower(*followers)
    driven = vllm_engine_of(engine, api_key=api_key)
    follower = Follower(driven, chosen, pause=pause, canary=probe)
    if not isinstance(driven, OfflineVllm):
        return BackgroundFollower(follower)
    follower.start()
    return follower


def _require_no(canary: object, kind: str) -> None:
    if canary is not None:
        raise UnsupportedError(f"an engine with {kind} cannot be a canary")
