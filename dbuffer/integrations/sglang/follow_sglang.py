"""`follow`: keep an SGLang engine on a store's newest version."""

from __future__ import annotations

import os
from typing import Any, Literal, overload

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.integrations.sglang.sglang_engine import OfflineSglang, sglang_engine_of

SglangPause = Literal["keep", "abort"]
"""Treatment of requests in flight: they are kept and go on with the new weights, their caches
recomputed; or aborted."""


@overload
def follow(
    engine: str,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> BackgroundFollower: ...


@overload
def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower: ...


def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower | BackgroundFollower:
    """Keep an engine on a store's newest version.

    Args:
        engine: an ``sglang.Engine``, whose follower's ``sync()`` you call between generations; or
            the URL of a server, which is followed in the background, until ``close()``. Either was
            started with ``custom_weight_loader=["dbuffer.integrations.sglang.load_from_store"]``.
        store: the store's directory, as the engine's processes and this one see it.
        pause: treatment of requests in flight during a switch: ``"keep"`` (SGLang's
            ``retract``) or ``"abort"``. An ``Engine`` has none.
        api_key: for a server.
        **options: more of :class:`EngineOptions`; with ``version``, the engine serves that version
            and stays on it.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid.
        VersionError: ``version`` is no longer in the store.
        UnsupportedError: the engine was not started in a way that lets it follow.
            A server that does not answer (yet) is waited for, in the background.
    """
    chosen = EngineOptions.parse({"store": store, **options})
    driven = sglang_engine_of(engine, api_key=api_key)
    follower = Follower(driven, chosen, pause=pause)
    if not isinstance(driven, OfflineSglang):
        return BackgroundFollower(follower)
    follower.start()
    return follower
