"""`follow`: keep a vLLM engine on a store's newest version."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, overload

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import PauseMode
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.config import replicas_of
from dbuffer.integrations.vllm.vllm_engine import (
    AsyncVllm,
    OfflineVllm,
    is_async,
    is_one_of_several,
    vllm_engine_of,
)

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.launched import LaunchedFollower


class _Offline(Protocol):
    """A ``vllm.LLM``, to a type checker."""

    llm_engine: Any


class _Asynchronous(Protocol):
    """An ``AsyncLLM``, to a type checker."""

    engine_core: Any


@overload
def follow(
    engine: str | _Asynchronous,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    **options: Any,
) -> BackgroundFollower: ...


@overload
def follow(
    engine: _Offline,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower | LaunchedFollower: ...


def follow(
    engine: Any,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower | BackgroundFollower | LaunchedFollower:
    """Keep an engine on a store's newest version.

    Args:
        engine: a ``vllm.LLM``: call ``sync()`` of the follower between generations. If the ``LLM``
            is one rank of an engine that torchrun started, let every rank make these calls. An
            ``AsyncLLM``, in its event loop: it is followed in the background, until ``aclose()``;
            data-parallel replicas of a dense model are followed independently.
            The URL of a server in development mode: followed in the background, until ``close()``.
        store: the store's directory, as the engine's workers and this process see it. Default:
            the one in the engine's ``additional_config``.
        pause: treatment of requests in flight during a switch: ``"keep"``, ``"wait"`` or
            ``"abort"``; for an ``AsyncLLM`` whose requests share no cache, also ``"in_place"``:
            they continue on what older weights computed. An ``LLM`` has none in flight.
        api_key: for a server.
        **options: more of :class:`EngineOptions`; with ``version``, the engine serves that version
            and stays on it.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid, or there is no store.
        VersionError: ``version`` is no longer in the store.
        UnsupportedError: the engine was not started in a way that lets it follow, or be paused so.
            A server that does not answer (yet) is waited for, in the background.
    """
    chosen = None
    if store is not None:
        chosen = EngineOptions.parse({"store": store, **options})
    elif options:
        raise OptionError(f"{', '.join(options)} given without a store")
    if is_one_of_several(engine):
        from dbuffer.integrations.vllm.launched import LaunchedFollower

        launched = LaunchedFollower(engine, chosen)
        launched.start()
        return launched
    if is_async(engine) and len(replicas_of(engine.vllm_config)) > 1:
        loop = AsyncVllm.loop_of(engine)
        replicas = [AsyncVllm(engine, loop, index) for index in replicas_of(engine.vllm_config)]
        followers = (Follower(replica, chosen, pause=pause) for replica in replicas)
        return BackgroundFollower(*followers)
    driven = vllm_engine_of(engine, api_key=api_key)
    follower = Follower(driven, chosen, pause=pause)
    if not isinstance(driven, OfflineVllm):
        return BackgroundFollower(follower)
    follower.start()
    return follower
